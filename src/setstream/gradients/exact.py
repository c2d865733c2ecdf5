"""A pass over sets of any size without a graph, and its way back.

    forward   state = Σ_blocks absorb(phi(block))                     no graph: the memory of one block
    backward  for the blocks that carry the gradient:
                  recompute absorb(phi(block)) with a graph,
                  feed it the state's cotangent times the block's factor

The state is small, so its cotangent is too, and nothing else needs to be kept. All blocks with factor one: the exact gradient.
Some drawn blocks with factor C / m': the paper's estimator, unbiased; those are few, so their graph is made at once. The factor
is on the *state*, numerator and normaliser, and not on the output or on named parameters: whatever follows the state (the
division, a slot residual, a layer norm, the value projection, the head) sees the value of the full set and gets its ordinary
gradient, with weight one.

Random modules in phi (dropout) draw the same numbers in both directions: each block has a seed of its own.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from setstream.models.encoder import SetEncoder
from setstream.pools.base import Context
from setstream.sets.layout import Packed
from setstream.states import reduce
from setstream.states.accumulators import Accumulator, accumulator_dtype, align
from setstream.states.state import State

Name = tuple[str, str]  # of a part, and of a tensor in it


@dataclass(frozen=True)
class Block:
    """A piece of every set, and where it lies in the packed elements (None when it came from a source)."""

    index: int
    packed: Packed
    positions: Tensor | slice | None = None


# Modules that need no trial to know that they draw no random numbers.
DETERMINISTIC = (nn.Sequential, nn.Linear, nn.ReLU, nn.GELU, nn.SiLU, nn.Tanh, nn.LayerNorm, nn.Identity, nn.Conv2d, nn.Flatten)


def generators(device: torch.device) -> list[torch.Generator]:
    """The generators that modules on this device draw from when they are given none."""
    found = [torch.default_generator]
    if device.type == "cuda":
        found.append(torch.cuda.default_generators[device.index or 0])
    elif device.type == "mps":
        found.append(torch.mps._get_default_mps_generator())
    return found


def draws_numbers(encoder: SetEncoder, elements: Tensor) -> bool:
    """Whether phi draws random numbers: a dropout in training does, elements or none; the rest is tried on one element."""
    if any(isinstance(own, nn.modules.dropout._DropoutNd) and own.training and own.p > 0 for own in encoder.phi.modules()):
        return True
    maybe = any(module.training and type(module) not in DETERMINISTIC for module in encoder.phi.modules())
    if not len(elements) or not maybe:
        return False
    with torch.no_grad():
        before = [(generator, generator.get_state()) for generator in generators(elements.device)]
        encoder.phi(encoder.cast(elements[:1]))
        drew = [not torch.equal(generator.get_state(), state) for generator, state in before]
        for generator, state in before:
            generator.set_state(state)
        return any(drew)


@dataclass
class Gradients:
    """Sums of gradients over blocks; in the accumulators' precision as soon as there is something to sum."""

    targets: list[Tensor]
    sums: list[Tensor | None] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.sums = [None] * len(self.targets)

    def add(
        self, outputs: list[Tensor], cotangents: list[Tensor], extra: list[Tensor], again: bool = False
    ) -> list[Tensor | None]:
        """Add the gradients of `outputs` at `cotangents`; gives those with respect to `extra`, which are not summed.

        again: the graph may be gone through once more.
        """
        found = derivatives(outputs, cotangents, [*self.targets, *extra], again)
        for index, gradient in enumerate(found[: len(self.targets)]):
            if gradient is not None:
                before = self.sums[index]
                self.sums[index] = gradient if before is None else before.to(accumulator_dtype(gradient.device)) + gradient
        return found[len(self.targets) :]


def derivatives(
    outputs: list[Tensor], cotangents: list[Tensor], targets: list[Tensor], again: bool = False
) -> list[Tensor | None]:
    """∂(outputs · cotangents)/∂target of each; None where nothing leads to it. Outputs without a graph are counts."""
    pairs = [(out, cot.to(out.dtype)) for out, cot in zip(outputs, cotangents, strict=True) if out.requires_grad]
    if not pairs:
        return [None] * len(targets)
    graded, wanted = zip(*pairs, strict=True)
    return list(torch.autograd.grad(graded, targets, wanted, allow_unused=True, retain_graph=again))


class Pass:
    """One encoding of a batch: `run` goes forward, `pull_back` brings the state's cotangent to phi, pool and elements."""

    def __init__(
        self, encoder: SetEncoder, blocks: Iterable[Block], empty: State, context: Context, group: reduce.Group | None
    ) -> None:
        self.encoder, self.blocks, self.empty, self.group = encoder, blocks, empty, group
        self.prepared = context
        self.context = {name: tensor.detach() for name, tensor in context.items()}
        self.parameters = [p for p in encoder.parameters() if p.requires_grad]
        self.graded_context = [name for name, tensor in context.items() if tensor.requires_grad]
        self.inputs = [*self.parameters, *(context[name] for name in self.graded_context)]
        self.elements: Tensor | None = None  # set when the elements want a gradient
        self.phi_learns = any(p.requires_grad for p in encoder.phi.parameters())
        self.owners: dict[str, Tensor] = {}
        self.whole = empty
        self._leaves: tuple[dict[int, Tensor], Context] | None = None
        random = any(module.training for module in encoder.phi.modules())
        self.seed = int(torch.randint(2**62, ())) if random else None
        kind = empty.device.type
        self.autocast: tuple[str, torch.dtype] | None = None
        if torch.is_autocast_enabled(kind):
            self.autocast = kind, torch.get_autocast_dtype(kind)

    # -- forward ------------------------------------------------------------------------------------------------------

    def run(self) -> State:
        """The state of all blocks (of all ranks)."""
        state = self.empty
        for block in self.blocks:
            with self._replay(block):
                features = self.encoder.features(block.packed.elements)
            chunk = self.absorb(block, features)
            self._claim(state, chunk, block.index)
            # The first chunk needs no merging with nothing; ranks, which may have none, need sums of one type.
            state = chunk if state is self.empty and self.group is None else state + chunk
        self.whole = state
        if self.group is not None:
            self.whole = reduce.reduce_state(state, self.group)
            for name, owners in self.owners.items():
                self.owners[name] = state.accumulators[name].reduce_owners(owners, self.group)
        return self.whole

    def absorb(self, block: Block, features: Tensor) -> State:
        """The block's part of the state, going forward."""
        return self.encoder.absorb(self.empty, self.context, block.packed, features)

    def _claim(self, before: State, chunk: State, index: int) -> None:
        """Remember which block holds each extreme value: it alone gets the gradient."""
        for name, part in chunk.accumulators.items():
            if part.owned_by_one_element:
                state = before.accumulators[name]
                owners = self.owners.get(name, state.new_owners(-1))
                self.owners[name] = state.merge_owners(part, owners, part.new_owners(index))

    # -- backward -----------------------------------------------------------------------------------------------------

    def tie(self, tensors: dict[Name, Tensor]) -> dict[Name, Tensor]:
        """The state's tensors as functions of weights, context and elements, with `pull_back` as their derivative."""
        inputs = [*self.inputs, *([] if self.elements is None else [self.elements])]
        if not inputs or not tensors:
            return tensors
        return dict(zip(tensors, _Encode.apply(self, tensors, *inputs), strict=True))

    def factors(self) -> Iterator[tuple[Block, Tensor | None]]:
        """The blocks that carry the gradient, each with its factor per set (None: one)."""
        for block in self.blocks:
            yield block, None

    def pull_back(self, cotangents: dict[str, dict[str, Tensor]]) -> list[Tensor | None]:
        """The gradients of all inputs, given those of the state's parts."""
        to_elements = None if self.elements is None else torch.zeros_like(self.elements)
        extra = to_elements is not None
        with self.leaves() as (gradients, context):
            for block, factor in self.factors():
                elements = block.packed.elements.detach().requires_grad_(extra)
                with self._replay(block), torch.set_grad_enabled(self.phi_learns or extra), self._autocast():
                    features = self.encoder.features(elements)
                outputs, cots = self.outputs(block, context, features, cotangents, factor)
                found = gradients.add(outputs, cots, [elements] if extra else [])
                if to_elements is not None and found[0] is not None:
                    to_elements[block.positions] += found[0]
        return self.finish(gradients, to_elements)

    @contextmanager
    def leaves(self) -> Iterator[tuple[Gradients, Context]]:
        """Sums for all inputs, and the context; inside, both context and parameters are leaves of new graphs.

        Stand-ins take the parameters' places: their hooks should see one gradient for each backward, not one for each block.
        They are the same each time, so that a graph made going forward can be used going back.
        """
        if self._leaves is None:
            self._leaves = (
                {id(p): p.detach().requires_grad_() for p in self.parameters},
                {n: t.detach().requires_grad_(n in self.graded_context) for n, t in self.context.items()},
            )
        stand_ins, context = self._leaves
        places: list[tuple[dict[str, Any], str, Tensor]] = [
            (module._parameters, name, p)
            for module in self.encoder.modules()
            for name, p in module._parameters.items()
            if p is not None and id(p) in stand_ins
        ]
        for parameters, name, p in places:
            parameters[name] = stand_ins[id(p)]
        try:
            yield Gradients([*stand_ins.values(), *(context[name] for name in self.graded_context)]), context
        finally:
            for parameters, name, p in places:
                parameters[name] = p

    def outputs(
        self,
        block: Block,
        context: Context,
        features: Tensor,
        cotangents: dict[str, dict[str, Tensor]],
        factor: Tensor | None = None,
    ) -> tuple[list[Tensor], list[Tensor]]:
        """The block's part of the state with a graph, and what each of its tensors gets of the state's cotangent."""
        with torch.enable_grad(), self._autocast():
            chunk = self.encoder.absorb(self.empty, context, block.packed, features)
        return self.shares(block, chunk, cotangents, factor)

    def shares(
        self, block: Block, chunk: State, cotangents: dict[str, dict[str, Tensor]], factor: Tensor | None = None
    ) -> tuple[list[Tensor], list[Tensor]]:
        """The tensors of a block's part of the state, and what each gets of the state's cotangent."""
        outputs, cots = [], []
        for name, cotangent in cotangents.items():
            owned = self.owners[name] == block.index if name in self.owners else None
            with torch.enable_grad():
                contribution = chunk.accumulators[name].contribution(self.whole.accumulators[name], owned)
            for key, out in contribution.items():
                cot = cotangent[key]
                outputs.append(out)
                cots.append(cot if factor is None else cot * align(factor.to(cot), cot))
        return outputs, cots

    def finish(self, gradients: Gradients, to_elements: Tensor | None) -> list[Tensor | None]:
        """Sum over the ranks, in the inputs' own types, elements last."""
        sums = gradients.sums
        if self.group is not None:
            sums = reduce.sum_gradients(sums, gradients.targets, self.group)
        found = [None if s is None else s.to(t.dtype) for s, t in zip(sums, gradients.targets, strict=True)]
        return found if self.elements is None else [*found, to_elements]

    # -- helpers ------------------------------------------------------------------------------------------------------

    @contextmanager
    def _replay(self, block: Block) -> Iterator[None]:
        """phi's random numbers for this block, the same each time; the caller's own stream is not touched."""
        if self.seed is None:
            yield
            return
        # Not torch.manual_seed, which seeds every kind of device there may be and takes a millisecond for it.
        before = [(generator, generator.get_state()) for generator in generators(self.empty.device)]
        for generator, _ in before:
            generator.manual_seed(self.seed + block.index)
        try:
            yield
        finally:
            for generator, state in before:
                generator.set_state(state)

    def _autocast(self) -> torch.autocast:
        """The autocast that was on going forward."""
        kind, dtype = self.autocast or (self.empty.device.type, None)
        return torch.autocast(kind, dtype=dtype, enabled=self.autocast is not None)


class _Encode(torch.autograd.Function):
    """state = f(inputs), as autograd sees it. Parameters are explicit inputs, so hooks and DDP meet their gradients."""

    @staticmethod
    def forward(ctx: Any, job: Pass, tensors: dict[Name, Tensor], *inputs: Tensor) -> tuple[Tensor, ...]:
        ctx.job, ctx.names = job, list(tensors)
        return tuple(tensor.detach() for tensor in tensors.values())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *cotangents: Tensor) -> tuple[Tensor | None, ...]:
        by_part: dict[str, dict[str, Tensor]] = {}
        for (part, key), cotangent in zip(ctx.names, cotangents, strict=True):
            by_part.setdefault(part, {})[key] = cotangent
        return (None, None, *ctx.job.pull_back(by_part))


def differentiable(job: Pass) -> State:
    """The state of a pass, tied to the pass's way back."""
    with torch.no_grad():
        whole = job.run()
    tensors = job.tie({(name, key): part[key] for name, part in whole.accumulators.items() for key in part.graded()})
    parts: dict[str, Accumulator] = {
        name: type(part)(**{key: tensors.get((name, key), tensor) for key, tensor in part.tensors.items()})
        for name, part in whole.accumulators.items()
    }
    state = State(parts, whole.count, whole.origin)
    state.context = job.prepared
    return state
