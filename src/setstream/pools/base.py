"""The base of all pools: what an encoder needs to stream through a pool::

    empty_accumulators   batch              -> accumulators     the zero of `+`
    draw_accumulators    batch              -> accumulators     what is drawn at random for the pass
    prepare              weights, draw      -> context          once per pass: what does not depend on the elements
    accumulate           context, features  -> accumulators     of one chunk alone; they merge by their own law
    finalize             State              -> z                once per set

Your own pool defines these and nothing else; it can then read sets in any chunks.
"""

import warnings
from collections.abc import Iterator
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, nn

from setstream.errors import ConfigurationError, ConsistencyError, MaskError, ShapeError
from setstream.states.accumulators import Accumulator
from setstream.states.state import GIVEN, State

Context = dict[str, Tensor]
# The tensors of a whole set's accumulators by accumulator and name: cotangents where they carry a gradient, values elsewhere.
Cotangents = dict[tuple[str, str], Tensor]

Want = Literal["rows", "norms", "rows only"] | None
Key = TypeVar("Key")

#: Methods of pools by their names in 0.1.
RENAMED = {"empty_parts": "empty_accumulators", "draw_parts": "draw_accumulators", "absorb_parts": "accumulate"}
#: What callers pass as `chunks` to average a pool that is not consistent over the chunks of a set.
AVERAGE = "average"


def select_sets(context: dict[Key, Tensor], rows: list[int]) -> dict[Key, Tensor]:
    """The context of some sets of the batch. Tensors that are the same for all sets have batch size one and stay."""
    adjacent = rows[-1] - rows[0] + 1 == len(rows)
    some = slice(rows[0], rows[-1] + 1) if adjacent else rows
    return {name: tensor if len(tensor) == 1 else tensor[some] for name, tensor in context.items()}


def named_tensors(z: Any, name: str = "z") -> Iterator[tuple[str, Tensor]]:
    """The tensors of an encoding with their names: one, or one for each member of a `Parallel`."""
    if isinstance(z, dict):
        for key, value in z.items():
            yield from named_tensors(value, f"{name}.{key}")
    else:
        yield name, z


def cast(z: Any, dtype: torch.dtype) -> Any:
    """The encoding in another floating-point type."""
    return {key: cast(value, dtype) for key, value in z.items()} if isinstance(z, dict) else z.to(dtype)


def parameter_dtype(module: nn.Module) -> torch.dtype | None:
    """The floating-point type of a module's parameters; None when it has none."""
    return next((p.dtype for p in module.parameters() if p.is_floating_point()), None)


def given_slots(state: State) -> Tensor | None:
    """The slots (B, num_slots, slot_dim) that an earlier pass gives to a pool; None in a first pass.

    >>> import torch, setstream as ss
    >>> pools = [ss.UMBC(8, num_slots=4), ss.UMBC(8, num_slots=4, slots="given")]
    >>> encoder = ss.SetEncoder(torch.nn.Identity(), ss.MultiPass(pools, between=[torch.nn.Linear(8, 8)]))
    >>> begun = encoder.next_pass(encoder.update(None, torch.randn(1, 10, 8)))
    >>> ss.given_slots(begun.select("pass2")).shape
    torch.Size([1, 4, 8])
    """
    given = state.accumulators.get(GIVEN)
    return None if given is None else given["slots"]


class Pool(nn.Module):
    """The base of all pools: features (B, n, in_dim) of a chunk become a State, states merge, a State becomes z.

    >>> import torch, setstream as ss
    >>> pool = ss.DeepSets("mean")
    >>> pool(torch.tensor([[[1.0], [3.0]]]))       # any pool is also a module on whole sets
    tensor([[2.]])
    """

    #: Width of the features that it takes; None: any width.
    in_dim: int | None = None
    #: Whether every partition of a set gives the same answer. A pool with False overrides `chunks_seen`, too.
    consistent: bool = True
    #: How often a set is read.
    passes: int = 1
    #: Whether it can be a later pass of a `MultiPass`: `prepare` and `finalize` use `given_slots(state)` where there are some.
    takes_slots: bool = False

    @property
    def title(self) -> str:
        """What messages call it."""
        return type(self).__name__

    @property
    def width(self) -> int:
        """The most numbers that it computes from one element: blocks of elements are chosen to keep them in a cache."""
        return self.in_dim or 1

    @property
    def sums_only(self) -> bool:
        """Whether the accumulators are sums of features: they show NaN and infinity, and keep no view of a feature."""
        return False

    @property
    def cuts_blocks(self) -> bool:
        """Whether `accumulate` itself cuts the elements into blocks that fit a cache: it may get any number of them."""
        return False

    @property
    def has_pull_back(self) -> bool:
        """Whether the pool has an explicit derivative, `pull_back`."""
        return False

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        for old, new in RENAMED.items():
            if old in vars(cls):
                message = f"{cls.__qualname__}.{old} is now {new}; the old name is removed in 0.3"
                warnings.warn(message, DeprecationWarning, stacklevel=2)
                if new not in vars(cls):
                    setattr(cls, new, vars(cls)[old])

    def configuration(self) -> dict[str, Any]:
        """The options that, with the weights, determine what this pool computes: part of an encoder's fingerprint."""
        return {}

    def empty_accumulators(self, batch: int, device: torch.device, width: int | None = None) -> dict[str, Accumulator]:
        """The accumulators of sets that have no elements. `width`: of the features, where it is known."""
        raise NotImplementedError

    def draw_accumulators(self, batch: int, device: torch.device, generator: torch.Generator | None) -> dict[str, Accumulator]:
        """What is random in a pass and the same for all its chunks, as `Shared` accumulators; nothing in eval mode."""
        return {}

    def empty(
        self, batch: int, device: torch.device, generator: torch.Generator | None = None, width: int | None = None
    ) -> State:
        """The neutral state of a batch: adding it changes nothing. `width`: of the features, where it is known."""
        accumulators = self.empty_accumulators(batch, device, width) | self.draw_accumulators(batch, device, generator)
        return State(accumulators, torch.zeros(batch, dtype=torch.int64, device=device))

    def own_slots(self, state: State) -> Tensor:
        """The slots (B or 1, num_slots, slot_dim) of a first pass; needed if they are updated by later ones."""
        raise NotImplementedError

    def pass_of(self, state: State) -> int:
        """The pass that a state belongs to; the first is 1."""
        return 1

    def next_pass(self, state: State) -> dict[str, Accumulator]:
        """The accumulators with which the pass after that of a state begins; for pools with several passes."""
        raise NotImplementedError

    def empty_like(self, state: State, batch: int, width: int | None) -> dict[str, Accumulator]:
        """The accumulators of sets without elements, in the pass of a state."""
        return self.empty_accumulators(batch, state.device, width)

    def prepare(self, state: State) -> Context:
        """All that a pass computes from the weights and the draw alone, once, for any number of chunks."""
        return {}

    def accumulate(self, context: Context, features: Tensor, mask: Tensor | None) -> dict[str, Accumulator]:
        """The accumulators of one chunk.

        Args:
            context: the result of `prepare`.
            features: (B, n, in_dim), n > 0, zero where masked.
            mask: (B, n), True for real elements; None if all are.
        """
        raise NotImplementedError

    def pull_back(
        self, context: Context, features: Tensor, mask: Tensor | None, whole: Cotangents, want: Want
    ) -> tuple[Tensor | None, Context]:
        """The derivative of `accumulate` for one block, where the pool has one of its own (`has_pull_back`).

        Args:
            context: as in `accumulate`, of the sets of the block.
            features: as in `accumulate`.
            mask: as in `accumulate`.
            whole: The cotangents of the accumulators of the whole sets, and their other tensors.
            want: Of the features: "rows", their cotangents; "norms", the norms of these; or nothing. With "rows only", the
                cotangents of the context are not needed and may be left out.

        Returns:
            The cotangents of the features, (B, n, in_dim), or their norms, (B, n); and those of the context, for each set.
        """
        raise NotImplementedError

    def finalize(self, state: State) -> Any:
        """z of a state: (B, num_slots, out_dim) for pools with slots, (B, dim) for plain ones. May be wider than float32."""
        raise NotImplementedError

    def chunks_seen(self, state: State) -> Tensor | None:
        """The number of chunks of each set, (B,); None if it does not matter, or is not known."""
        return None

    def refuse_chunks(self, chunks: str | None) -> bool:
        """Whether a set must be given in one chunk: the cut matters, and the caller does not accept an average over chunks."""
        if chunks not in (None, AVERAGE):
            raise ConfigurationError(f"chunks is {AVERAGE!r}, or left out; got {chunks!r}")
        return not self.consistent and chunks is None

    def inconsistent(self) -> ConsistencyError:
        """The error for a set that is given in more than one chunk."""
        return ConsistencyError(
            f"{self.title} is not mini-batch consistent: its answer depends on where a set is cut; a set was given in "
            "more than one chunk. Give each set in one piece (a larger chunk_size, gradient='full', one update), use a "
            f"consistent pool, or accept the mean over the chunks with chunks={AVERAGE!r}."
        )

    def forward(self, features: Tensor, mask: Tensor | None = None) -> Any:
        """z of whole sets of features (B, N, in_dim) in one step."""
        if features.dim() != 3 or self.in_dim not in (None, features.shape[-1]):
            raise ShapeError(
                f"{type(self).__name__} takes features of shape (B, N, {self.in_dim or 'D'}); got {tuple(features.shape)}"
            )
        if not features.is_floating_point():
            features = features.to(parameter_dtype(self) or torch.get_default_dtype())
        return cast(self.finalize(self.absorb_whole(features, mask)), parameter_dtype(self) or features.dtype)

    def absorb_whole(self, features: Tensor, mask: Tensor | None, begun: State | None = None) -> State:
        """The state of whole sets of features; `begun`: that of a later pass, without elements."""
        batch, size = features.shape[:2]
        if mask is not None:
            if mask.dtype != torch.bool or mask.shape != (batch, size):
                raise MaskError(f"the mask must be bool {(batch, size)}, True for real; got {mask.dtype} {tuple(mask.shape)}")
            features = features.masked_fill(~mask.unsqueeze(-1), 0.0)
        count = torch.full((batch,), size, device=features.device) if mask is None else mask.sum(1)
        draw = self.draw_accumulators(batch, features.device, None) if begun is None else begun.accumulators
        state = State(draw, count)
        context = self.prepare(state)
        empty = {} if size else self.empty_like(state, batch, features.shape[-1])
        return State(draw | (self.accumulate(context, features, mask) if size else empty), count)
