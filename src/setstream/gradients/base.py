"""Shared by all gradient modes: the forward pass without a graph, and recomputation with one.

    forward    state = Σ_blocks absorb(phi(block))                            no graph: the memory of one block
    backward   ∂L/∂θ = Σ_carriers factor · ∂L/∂state · ∂absorb(phi(block))/∂θ

The state is small, so its cotangent ∂L/∂state is too, and nothing else needs to be kept. A mode decides which blocks carry the
gradient (the carriers), and with what factor. The factor is on the *state*, numerator and normaliser, and not on the output or
on named parameters: all that follows the state (the division, a slot residual, a layer norm, the value projection, the head)
sees the value of the full set and gets its ordinary gradient, with weight one.

Random modules in phi (dropout) draw the same numbers in both directions: each block has a seed of its own.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from itertools import zip_longest
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from setstream.gradients.protocol import Batch, Options
from setstream.models.encoder import SetEncoder
from setstream.models.phi import Reader
from setstream.pools.base import Context, Want, select_sets
from setstream.pools.kernels.shared_rows import add_bar
from setstream.pools.kernels.weighted_sums import block_size
from setstream.sets.layout import Packed, tiles
from setstream.states import reduce
from setstream.states.accumulators import accumulator_dtype, align
from setstream.states.state import State

Name = tuple[str, str]  # of an accumulator, and of a tensor in it
Module = TypeVar("Module", bound=nn.Module)
PullBack = Callable[[dict[Any, Tensor]], list[Tensor | None]]  # from cotangents to the gradients of inputs

# Modules that are known to draw no random numbers.
DETERMINISTIC = (nn.Sequential, nn.Linear, nn.ReLU, nn.GELU, nn.SiLU, nn.Tanh, nn.LayerNorm, nn.Identity, nn.Conv2d, nn.Flatten)
# Held while the process-wide generators are seeded for a block, or drawn from: threads would change each other's numbers.
drawing = threading.RLock()


def generators(device: torch.device) -> list[torch.Generator]:
    """The generators that modules on this device draw from when they are given none."""
    defaults = [torch.default_generator]
    if device.type == "cuda":
        defaults.append(torch.cuda.default_generators[device.index or 0])
    elif device.type == "mps":
        defaults.append(torch.mps._get_default_mps_generator())
    return defaults


class GradientSums:
    """Sums of gradients over blocks, in the accumulators' precision."""

    def __init__(self, targets: list[Tensor]) -> None:
        self.targets = targets
        self.sums: list[Tensor | None] = [None] * len(targets)

    def add(
        self, outputs: Iterable[Tensor], cotangents: Iterable[Tensor], extra: tuple[Tensor, ...] = ()
    ) -> list[Tensor | None]:
        """Add gradients of `outputs`; returns those of `extra`, not summed."""
        pairs = [(out, cot.to(out.dtype)) for out, cot in zip(outputs, cotangents, strict=True) if out.requires_grad]
        if not pairs:
            return [None] * len(extra)
        graded, cotangents = zip(*pairs, strict=True)
        targets = [*self.targets, *extra]
        gradients = torch.autograd.grad(graded, targets, cotangents, allow_unused=True)
        self.sums = [_sum(*pair) for pair in zip(self.sums, gradients, strict=False)]
        return list(gradients[len(self.targets) :])


def _sum(total: Tensor | None, gradient: Tensor | None) -> Tensor | None:
    if total is None or gradient is None:
        return gradient if total is None else total
    return total.to(accumulator_dtype(gradient.device)) + gradient


class Leaves(Generic[Module]):
    """Parameters of an encoder and its context, as leaves of graphs of their own.

    Hooks of a parameter should see one gradient per backward pass, not one per block. So blocks are recomputed by a twin of the
    encoder, which has copies of the modules (not of their tensors) with leaves in place of the parameters. The encoder itself
    is not touched: other threads may use it at the same time. Where a module uses the original parameters and not the twin's (a
    compiled or scripted module, a closure), these get their gradient as well.
    """

    def __init__(self, module: Module, context: Context) -> None:
        self.parameters = [p for p in module.parameters() if p.requires_grad]
        stand_ins = [p.detach().requires_grad_() for p in self.parameters]
        self.module: Module = _twin(module, {id(p): leaf for p, leaf in zip(self.parameters, stand_ins, strict=True)}, {})
        self.context = {name: tensor.detach().requires_grad_(tensor.requires_grad) for name, tensor in context.items()}
        graded = [name for name, tensor in context.items() if tensor.requires_grad]
        #: The tensors that get gradients.
        self.inputs = [*self.parameters, *(context[name] for name in graded)]
        self._targets = [*stand_ins, *(self.context[name] for name in graded)]

    def sums(self) -> GradientSums:
        """Zero sums for all leaves, and for the parameters themselves."""
        return GradientSums([*self._targets, *self.parameters])

    def add_context(self, sums: GradientSums, bars: Context) -> None:
        """Add gradients of the context that were computed without autograd."""
        graded = [name for name, tensor in self.context.items() if tensor.requires_grad]
        for index, name in enumerate(graded, start=len(self._targets) - len(graded)):
            if name in bars:
                sums.sums[index] = _sum(sums.sums[index], bars[name])

    def totals(self, sums: GradientSums) -> list[Tensor | None]:
        """The sums for the inputs."""
        past_the_twin = sums.sums[len(self._targets) :]
        return [_sum(*pair) for pair in zip_longest(sums.sums[: len(self._targets)], past_the_twin)]

    def gradients(self, totals: list[Tensor | None]) -> list[Tensor | None]:
        """The totals in the types of the inputs."""
        return [None if s is None else s.to(t.dtype) for s, t in zip(totals, self.inputs, strict=True)]


def _twin(module: Module, stand_ins: dict[int, Tensor], twins: dict[int, Any]) -> Module:
    """The module with other parameters: a copy of it and of its submodules, with the same buffers and attributes."""
    if isinstance(module, torch.jit.ScriptModule):  # cannot be copied like this
        return module
    if id(module) not in twins:
        twin = twins[id(module)] = object.__new__(type(module))
        parameters = {name: stand_ins.get(id(p), p) for name, p in module._parameters.items()}
        children = {name: child and _twin(child, stand_ins, twins) for name, child in module._modules.items()}
        twin.__dict__.update(module.__dict__ | {"_parameters": parameters, "_modules": children})
    twin = twins[id(module)]
    return twin


@dataclass(frozen=True)
class Forward:
    """The state of all blocks, and which block owns each entry of accumulators that single elements own (a maximum)."""

    state: State
    owners: dict[str, Tensor]

    def contributions(self, index: int, chunk: State) -> dict[Name, Tensor]:
        """What block `index`, with the state `chunk`, adds to each tensor of the state that carries a gradient."""
        tensors = {}
        with torch.enable_grad():
            for name, accumulator in chunk.accumulators.items():
                owned = self.owners[name] == index if name in self.owners else None
                for key, tensor in accumulator.contribution(self.state.accumulators[name], owned).items():
                    tensors[name, key] = tensor
        return tensors


class Pass:
    """One encoding of a batch: the empty state, with one random draw for all ranks, and what both directions share."""

    def __init__(self, encoder: SetEncoder, sets: Batch, options: Options) -> None:
        self.encoder, self.options, self.learned = encoder, options, sets.learned
        with drawing:
            self.empty = options.begun or encoder.pool.empty(len(sets), encoder.device or sets.sample.device)
        if options.group is not None:
            self.empty = reduce.share_draw(self.empty, options.group)
        self.prepared = encoder.pool.prepare(self.empty)
        kind = self.empty.device.type
        self.autocast_dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        self.learns_phi = self.learned is not None or any(p.requires_grad for p in encoder.phi.parameters())

    @cached_property
    def reader(self) -> Reader:
        """What phi's modules determine, for all blocks."""
        return self.encoder.reader()

    @cached_property
    def may_be_random(self) -> bool:
        """Whether phi has modules in training mode that could draw random numbers."""
        modules = self.encoder.phi.modules() if self.reader.layers is None else ()
        return any(module.training and type(module) not in DETERMINISTIC for module in modules)

    def draws_numbers(self, elements: Tensor) -> bool:
        """Whether phi draws random numbers: dropout in training mode does; other modules are tried on one element."""
        if not self.may_be_random:
            return False
        phi = self.encoder.phi
        if any(isinstance(m, nn.modules.dropout._DropoutNd) and m.training and m.p > 0 for m in phi.modules()):
            return True
        if not len(elements):
            return False
        with torch.no_grad(), drawing:
            before = [(generator, generator.get_state()) for generator in generators(elements.device)]
            phi(self.encoder.cast(elements[:1]))
            drew = [not torch.equal(generator.get_state(), state) for generator, state in before]
            for generator, state in before:
                generator.set_state(state)
            return any(drew)

    def forward_size(self, sets: Batch) -> int:
        """How many elements a block without a graph may have: any number if the encoder cuts blocks itself."""
        if self.encoder.pool.consistent and not self.may_be_random:
            return sys.maxsize
        return max(self.options.chunk_size * len(sets), self.reader.block_size(sets.sample))

    @cached_property
    def seed(self) -> int | None:
        """Determines the seeds of all blocks; None if phi is not in training mode."""
        with drawing:
            return int(torch.randint(2**62, ())) if any(module.training for module in self.encoder.phi.modules()) else None

    def features(self, index: int, elements: Tensor, encoder: SetEncoder | None = None, again: bool = False) -> Tensor:
        """phi of a block's elements, with the same random numbers each time; `again`: after the forward pass, which checks."""
        with self._random_numbers_of(index), self.autocast():
            return (encoder or self.encoder).features(elements, known=again, reader=self.reader)

    def forward(
        self,
        blocks: Iterable[Packed],
        keep: Callable[[int, Tensor], None] | None = None,
        known: Callable[[int, Packed], Tensor] | None = None,
    ) -> Forward:
        """The state of all blocks of all ranks; `keep` gets the features of each, or they are `known`."""
        state, group = self.empty, self.options.group
        owners = {name: a.new_owners(-1) for name, a in state.accumulators.items() if a.owned_by_one_element}
        together = keep is None and known is None and not self.may_be_random
        for index, block in enumerate(blocks):
            if self.options.one_chunk and any(map(min, state.count.tolist()[block.first :], block.lengths)):
                raise self.encoder.pool.inconsistent()
            features = known(index, block) if known else None if together else self.features(index, block.elements)
            if keep is not None and features is not None:
                keep(index, features)
            with self.autocast():
                chunk = self.encoder.absorb(self.empty, self.prepared, block, features, self.reader)
            chunk = chunk if group is None else chunk.widened()  # ranks without elements need sums of one type
            for name, numbers in owners.items():
                accumulator = chunk.accumulators[name]
                owners[name] = state.accumulators[name].merge_owners(accumulator, numbers, accumulator.new_owners(index))
            # The first chunk needs no merging with an empty state.
            state = chunk if state is self.empty and group is None else state + chunk
        if group is not None:
            owners = {name: state.accumulators[name].reduce_owners(numbers, group) for name, numbers in owners.items()}
            state = reduce.reduce_state(state, group)
        return Forward(state, owners)

    def recompute(self, index: int, block: Packed, elements: Tensor) -> State:
        """A block's state as a function of the leaves and of `elements`."""
        return self.absorb(block, self.recompute_features(index, elements))

    def recompute_features(self, index: int, elements: Tensor) -> Tensor:
        """A block's features as a function of the leaves and of `elements`."""
        with torch.set_grad_enabled(self.learns_phi):
            return self.features(index, elements, self.leaves.module, again=True)

    @property
    def owned(self) -> bool:
        """Whether single elements own entries of the state (a maximum)."""
        return any(accumulator.owned_by_one_element for accumulator in self.empty.accumulators.values())

    def absorb(self, block: Packed, features: Tensor) -> State:
        """A block's state as a function of the leaves and of its features."""
        with torch.enable_grad(), self.autocast():
            return self.leaves.module.absorb(self.empty, self.leaves.context, block, features)

    def way_back(self, forward: Forward, cotangents: dict[Name, Tensor]) -> WayBack | None:
        """The pool's own derivative, given the cotangents of the state; None if a graph through the pool is needed."""
        return WayBack(self, forward, cotangents) if self.encoder.pool.has_pull_back else None

    @cached_property
    def leaves(self) -> Leaves[SetEncoder]:
        """Parameters and context as leaves of new graphs."""
        return Leaves(self.encoder, self.prepared)

    def encode(self, forward: Forward, pull_back: PullBack) -> Any:
        """z, with `pull_back` as the derivative of the state: from its cotangents to the gradients of inputs."""
        inputs = [*self.leaves.inputs, *([] if self.learned is None else [self.learned])]
        return self.finalize(forward.state, recomputed(pull_back, graded_tensors(forward.state), inputs))

    def finalize(self, state: State, tensors: dict[Name, Tensor]) -> Any:
        """z of a state with some of its tensors replaced."""
        accumulators = {
            name: type(accumulator)(**{key: tensors.get((name, key), t) for key, t in accumulator.tensors.items()})
            for name, accumulator in state.accumulators.items()
        }
        return self.result(State(accumulators, state.count, state.origin, self.prepared))

    def first_pass(self) -> Any:
        """The backward pass of the first pass over these sets, if this is a later one, whose slots lead back to it."""
        begun = (tensor for part in self.empty.accumulators.values() for tensor in part.tensors.values())
        return self.options.shared.get("first") if any(tensor.requires_grad for tensor in begun) else None

    def show_next_pass(self, first: Any) -> None:
        """Let the next pass, if there is one, know the backward pass of the first."""
        self.options.shared.clear()  # nothing is kept alive by a circle
        if self.encoder.pool.pass_of(self.empty) < self.encoder.passes:
            self.options.shared["first"] = first

    def result(self, state: State) -> Any:
        """z, or the state with which the next pass begins."""
        last = self.encoder.pool.pass_of(state) == self.encoder.passes
        return self.encoder.finalize_unchecked(state) if last else self.encoder.next_unchecked(state)

    def gradients(self, sums: GradientSums, to_elements: Tensor | None) -> list[Tensor | None]:
        """The gradients of all inputs, summed over the ranks, in the inputs' types."""
        totals = self.leaves.totals(sums)
        if self.options.group is not None:
            totals = reduce.sum_gradients(totals, self.leaves.inputs, self.options.group)
        return self.leaves.gradients(totals) + ([] if self.learned is None else [to_elements])

    def autocast(self) -> AbstractContextManager[Any]:
        """The autocast mode of the forward pass."""
        dtype = self.autocast_dtype
        if dtype is None and not torch.is_autocast_enabled(self.empty.device.type):
            return nullcontext()
        # Without the cache: it would hand the casts of the pass without a graph to the pass with one (torch 2.6).
        return torch.autocast(self.empty.device.type, dtype=dtype, enabled=dtype is not None, cache_enabled=False)

    @contextmanager
    def _random_numbers_of(self, index: int) -> Iterator[None]:
        """Seed the generators for a block, and restore them: the caller's random numbers are not touched."""
        if not self.may_be_random or self.seed is None:
            yield
            return
        with drawing:
            # Not torch.manual_seed, which seeds every kind of device and takes a millisecond.
            before = [(generator, generator.get_state()) for generator in generators(self.empty.device)]
            for generator, _ in before:
                generator.manual_seed(self.seed + index)
            try:
                yield
            finally:
                for generator, state in before:
                    generator.set_state(state)


class WayBack:
    """The backward pass through a pool that has a derivative of its own, tile by tile."""

    def __init__(self, run: Pass, forward: Forward, cotangents: dict[Name, Tensor]) -> None:
        self.run, self.pool = run, run.encoder.pool
        self.context = {name: tensor.detach() for name, tensor in run.prepared.items()}
        dtype = max((tensor.dtype for tensor in self.context.values()), key=lambda dtype: dtype.itemsize)
        tensors = {(name, key): t for name, part in forward.state.accumulators.items() for key, t in part.tensors.items()}
        self.whole = {name: t.detach().to(dtype) for name, t in (tensors | cotangents).items()}
        self.graded = set(cotangents)
        wide = accumulator_dtype(run.empty.device)
        #: The gradients of the context, summed over all blocks.
        self.bars = {name: torch.zeros_like(tensor, dtype=wide) for name, tensor in self.context.items()}

    def __call__(self, block: Packed, features: Tensor, want: Want = "rows", factor: Tensor | None = None) -> Tensor:
        """The cotangents (M, in_dim) of a block's features (M, in_dim), or their norms (M,); times a factor per set."""
        all_sets = self.whole
        if factor is not None:
            all_sets = all_sets | {name: t * align(factor.to(t), t) for name, t in all_sets.items() if name in self.graded}
        result = features.new_empty((0,) if want is None else features.shape[:1] if want == "norms" else features.shape)
        size = block_size(features.device, max(self.pool.width, features.shape[-1]))
        batch = len(self.run.empty)
        with torch.no_grad(), self.run.autocast():
            for tile in tiles(block.lengths, size, block.first):
                here = slice(tile.start, tile.stop)
                for sets, where, dense, mask in tile.groups(features[here]):
                    context, whole = self.context, all_sets
                    if len(sets) < batch:
                        context, whole = select_sets(context, sets), select_sets(whole, sets)
                    to_features, to_context = self.pool.pull_back(context, dense, mask, whole, want)
                    if to_features is not None:
                        result[here][where] = to_features.flatten(0, 1) if mask is None else to_features[mask]
                    for name, bar in to_context.items():
                        add_bar(self.bars[name], bar, sets)
        return result


class PoolGradient:
    """The exact gradient through the pool of one pass, given the cotangents of its state."""

    def __init__(self, run: Pass, forward: Forward, cotangents: dict[Name, Tensor]) -> None:
        self.run, self.forward, self.cotangents = run, forward, cotangents
        self.way_back = run.way_back(forward, cotangents)

    def to_features(self, index: int, block: Packed, features: Tensor, sums: GradientSums, want: Want) -> Tensor | None:
        """g (M, in_dim) of a block's features (M, in_dim), or its norms, if wanted. Gradients of the pool go into `sums`."""
        if self.way_back is not None:
            return self.way_back(block, features, want)
        features = features.detach().requires_grad_(want is not None)
        parts = self.forward.contributions(index, self.run.absorb(block, features))
        extra = () if want is None else (features,)
        g = next(iter(sums.add(parts.values(), [self.cotangents[name] for name in parts], extra)), None)
        return torch.linalg.vector_norm(g, dim=1) if g is not None and want == "norms" else g

    def add_context(self, sums: GradientSums) -> None:
        """Add what the blocks so far give to the context; those that follow are not added."""
        if self.way_back is not None:
            self.run.leaves.add_context(sums, {name: bar.clone() for name, bar in self.way_back.bars.items()})


def through_pools(gradients: list[PoolGradient], index: int, block: Packed, features: Tensor) -> Tensor:
    """g of a block's features, the sum of what all passes want."""
    wanted = (one.to_features(index, block, features, GradientSums([]), "rows only") for one in gradients)
    rows = [g for g in wanted if g is not None]
    return sum(rows[1:], start=rows[0]) if rows else torch.zeros_like(features)


def graded_tensors(state: State) -> dict[Name, Tensor]:
    """The tensors of a state that carry a gradient."""
    return {(name, key): part[key] for name, part in state.accumulators.items() for key in part.graded()}


def recomputed(pull_back: PullBack, tensors: dict[Any, Tensor], inputs: list[Tensor]) -> dict[Any, Tensor]:
    """The tensors as functions of inputs, with `pull_back` as their derivative."""
    return dict(zip(tensors, _Recomputed.apply(pull_back, tensors, *inputs), strict=True)) if inputs and tensors else tensors


class _Recomputed(torch.autograd.Function):
    """Parameters are explicit inputs, so that hooks and DDP see their gradients."""

    @staticmethod
    def forward(ctx: Any, pull_back: PullBack, tensors: dict[Any, Tensor], *inputs: Tensor) -> tuple[Tensor, ...]:
        ctx.pull_back, ctx.names = pull_back, list(tensors)
        return tuple(tensor.detach() for tensor in tensors.values())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *cotangents: Tensor) -> tuple[Tensor | None, ...]:
        return (None, None, *ctx.pull_back(dict(zip(ctx.names, cotangents, strict=True))))
