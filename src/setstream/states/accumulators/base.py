"""The base of all accumulators: merging, removal, decay, sums over ranks, gradients, serialisation."""

from collections.abc import Callable, Sequence
from functools import reduce
from typing import ClassVar, Self

import torch
import torch.distributed as dist
from torch import Tensor

from setstream.errors import ConfigurationError, MismatchError, RemovalError, StateFormatError, wrong_width

Group = dist.ProcessGroup

# The shift of weighted sums that have seen nothing. Finite on purpose: e^(NOTHING - NOTHING) is 1 and not NaN, and the
# sums it multiplies are zero. It is exact in bfloat16 and up, and far below any logit.
NOTHING = -(2.0**120)

RANK = 2**32  # an owner of rank r and block b is the number r·RANK + b


def accumulator_dtype(device: torch.device) -> torch.dtype:
    """The dtype of sums over a set: float64, or float32 where the device has no float64 (MPS).

    10^6 elements summed one by one in float32 are less accurate than one product over them. The state is small, so it is cheap.
    """
    return torch.float32 if device.type == "mps" else torch.float64


def align(tensor: Tensor, like: Tensor) -> Tensor:
    """`tensor` with trailing axes of size one until it has as many axes as `like`."""
    return tensor.reshape(tensor.shape + (1,) * (like.dim() - tensor.dim()))


def all_reduce(tensor: Tensor, operation: dist.ReduceOp.RedOpType, group: Group) -> Tensor:
    """The sum, maximum or minimum of all ranks' tensors, on every rank."""
    tensor = tensor.contiguous().clone()
    dist.all_reduce(tensor, operation, group=group)
    return tensor


def all_gather(tensor: Tensor, group: Group) -> list[Tensor]:
    """The tensors of all ranks in their order, on every rank; they have one shape."""
    gathered = [torch.empty_like(tensor, memory_format=torch.contiguous_format) for _ in range(dist.get_world_size(group))]
    dist.all_gather(gathered, tensor.contiguous(), group=group)
    return gathered


def must_be_empty(nothing: Tensor, narrow: Tensor, wide: Tensor) -> None:
    """Raise unless the accumulator of the narrower tensor has seen `nothing`: only then its width is not known yet."""
    if not bool(nothing.all()):
        merged = "the elements of the state that is merged with it"
        raise MismatchError(wrong_width("a state", narrow.shape[-1], merged, wide.shape[-1]))


class Accumulator:
    """Named tensors, each (B, ...), and the laws of merging, removal, decay and sums over ranks.

    Your own kind is a subclass with a `kind` (its name in saved states) and a `merge`. By default it does not support removal
    or decay, is gathered and merged over ranks, and saves its tensors as they are. Its gradient is that of a sum, unless it
    overrides `contribution`, or `graded` to have none.
    """

    kind: ClassVar[str]
    #: Whether it is the same for all chunks of a pass, like a random draw: elements do not change it.
    shared: ClassVar[bool] = False
    #: Whether each entry comes from one element, which gets the whole gradient, as in a maximum.
    owned_by_one_element: ClassVar[bool] = False
    _kinds: ClassVar[dict[str, type["Accumulator"]]] = {}

    def __init_subclass__(cls, **options: object) -> None:
        super().__init_subclass__(**options)
        if "kind" not in vars(cls):
            if hasattr(cls, "kind"):
                raise ConfigurationError(f"{cls.__qualname__} needs its own kind, to distinguish its states from {cls.kind!r}")
            return  # an abstract base
        known = Accumulator._kinds.setdefault(cls.kind, cls)
        if (known.__module__, known.__qualname__) != (cls.__module__, cls.__qualname__):
            raise ConfigurationError(f"there is an accumulator of kind {cls.kind!r}: {known.__module__}.{known.__qualname__}")
        Accumulator._kinds[cls.kind] = cls

    def __init__(self, **tensors: Tensor) -> None:
        self.tensors = tensors

    def __getitem__(self, name: str) -> Tensor:
        return self.tensors[name]

    def merge(self, other: Self) -> Self:
        """The accumulator of both sets together."""
        raise NotImplementedError

    def remove(self, other: Self, emptied: Tensor, tolerance: float) -> Self:
        """The accumulator without the elements of `other`; PrecisionError if its relative error may exceed `tolerance`.

        `emptied` (B,): true for the sets that have no element left.
        """
        raise RemovalError(f"elements cannot be removed from a {self.kind}. Encode the others anew, or use another pool.")

    def scale(self, factor: Tensor) -> Self:
        """The accumulator with every element's weight multiplied by `factor` (B,)."""
        raise ConfigurationError(f"a {self.kind} cannot decay: its elements have no weights. Use a mean, a sum or UMBC.")

    def fault(self, seen: Tensor) -> str | None:
        """What is impossible in these numbers, read from outside; `seen` (B,) is true for sets that have elements."""
        return None if all(bool(torch.isfinite(tensor).all()) for tensor in self.tensors.values()) else "NaN or infinity"

    def map(self, change: Callable[[Tensor], Tensor]) -> Self:
        """The accumulator with every tensor changed."""
        return type(self)(**{name: change(tensor) for name, tensor in self.tensors.items()})

    def to_dtype(self, dtype: torch.dtype) -> Self:
        """The accumulator in another floating-point type; whole numbers stay."""
        return self.map(lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor)

    def widened(self) -> Self:
        """The accumulator of one chunk as if merged with an empty one: sums in the wide type."""
        return self

    def narrowed(self) -> Self:
        """The accumulator for keeping in few bytes: sums in float32, counts as they are. `widened` reads it."""
        return self

    def cat(self, others: Sequence["Accumulator"]) -> Self:
        """Concatenate the batches of several. An accumulator without elements may not know its width yet."""
        joined = {}
        for name, first in self.tensors.items():
            pieces = [first, *(other[name] for other in others)]
            widest = max(pieces, key=lambda piece: (piece.dim(), piece.numel() // max(len(piece), 1)))
            if any(piece.shape[1:] != widest.shape[1:] for piece in pieces):
                pieces = [align(piece, widest).expand(len(piece), *widest.shape[1:]) for piece in pieces]
            joined[name] = torch.cat(pieces)
        return type(self)(**joined)

    def _row(self, row: int) -> Self:
        return self.map(lambda tensor: tensor[row : row + 1])

    def merge_rows(self, owner: Sequence[int], batch: int) -> Self:
        """The accumulator of `batch` sets, each merged from the rows that it owns: owner[i] is the set of row i."""
        merged: list[Self | None] = [None] * batch
        for row, index in enumerate(owner):
            piece = self._row(row)
            before = merged[index]
            merged[index] = piece if before is None else before.merge(piece)
        first, *others = (one for one in merged if one is not None)
        return first.cat(others)

    def gather(self, group: Group) -> list[Self]:
        """The accumulators of all ranks, on every rank."""
        gathered = {name: all_gather(tensor, group) for name, tensor in self.tensors.items()}
        return [type(self)(**dict(zip(gathered, tensors, strict=True))) for tensors in zip(*gathered.values(), strict=True)]

    def reduce(self, group: Group) -> Self:
        """The merged accumulators of all ranks, on every rank."""
        return reduce(type(self).merge, self.gather(group))

    def from_first_rank(self, group: Group) -> Self:
        """Before a pass: take what all ranks must agree on from the group's first rank."""
        return self

    def graded(self) -> tuple[str, ...]:
        """The names of the tensors that carry a gradient."""
        return () if self.shared else tuple(self.tensors)

    def contribution(self, whole: Self, owned: Tensor | None = None) -> dict[str, Tensor]:
        """What this chunk adds to each graded tensor of the whole, as a differentiable function of the chunk's tensors.

        The contributions of all chunks sum to the whole, so the whole's gradient is that of each contribution.

        `owned`: the whole's entries that come from this chunk; given where one element owns each entry.
        """
        return {name: self[name] for name in self.graded()}

    def new_owners(self, index: int) -> Tensor:
        """One owner for every entry: the block `index`, or -1 for none."""
        return torch.full_like(self[self.graded()[0]], index, dtype=torch.int64)

    def merge_owners(self, other: Self, owners: Tensor, other_owners: Tensor) -> Tensor:
        """The owners of the entries of `self.merge(other)`."""
        raise NotImplementedError

    def reduce_owners(self, owners: Tensor, group: Group) -> Tensor:
        """The owners of the entries of `self.reduce(group)`, -1 for those of other ranks."""
        rank = dist.get_rank(group)
        merged, *ranked = all_gather(torch.where(owners < 0, -1, owners + rank * RANK), group)
        whole, *accumulators = self.gather(group)
        for accumulator, others in zip(accumulators, ranked, strict=True):
            merged, whole = whole.merge_owners(accumulator, merged, others), whole.merge(accumulator)
        return torch.where(merged // RANK == rank, merged % RANK, -1)

    @staticmethod
    def of_kind(kind: str) -> type["Accumulator"]:
        """The class of this kind."""
        if kind not in Accumulator._kinds:
            raise StateFormatError(
                f"this state has an accumulator of unknown kind {kind!r}: import the module that defines it, with "
                f"kind = {kind!r}, before reading the state; or a newer setstream wrote it"
            )
        return Accumulator._kinds[kind]

    def to_tensors(self) -> dict[str, Tensor]:
        """What is saved."""
        return self.tensors

    @classmethod
    def from_tensors(cls, tensors: dict[str, Tensor], version: int) -> Self:
        """The accumulator from what was saved in a state of this format version."""
        return cls(**tensors)
