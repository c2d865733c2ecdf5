"""Accumulators whose law is one operation on each tensor.

Sums, Chunks          a + b
Maximum, Minimum      max(a, b), min(a, b)
Shared                a = b, or it is an error
"""

from collections.abc import Callable
from typing import ClassVar, Self

import torch
import torch.distributed as dist
from torch import Tensor

from setstream.errors import MismatchError, RemovalError
from setstream.states.accumulators.base import Accumulator, Group, align, all_reduce, must_be_empty


class Sums(Accumulator):
    """Plain sums over the elements: merging adds, removal subtracts.

    The error of a removal is the rounding error of the larger sum, which is not checked: signed sums may cancel.
    """

    kind = "sums"

    def merge(self, other: Self) -> Self:
        return self._add(other, 1)

    def remove(self, other: Self, emptied: Tensor, tolerance: float) -> Self:
        return self._add(other, -1).map(lambda total: total.masked_fill(align(emptied, total), 0))

    def scale(self, factor: Tensor) -> Self:
        return self.map(lambda total: total * align(factor.to(total.dtype), total))

    def reduce(self, group: Group) -> Self:
        return self.map(lambda total: all_reduce(total, dist.ReduceOp.SUM, group))

    def _add(self, other: Self, sign: int) -> Self:
        pairs = {name: (total, other[name]) for name, total in self.tensors.items()}
        return type(self)(**{name: torch.add(align(a, b), align(b, a), alpha=sign) for name, (a, b) in pairs.items()})


class Chunks(Sums):
    """The number of chunks of each set, where that matters. Decay does not change it; removal is an error."""

    kind = "chunks"

    def graded(self) -> tuple[str, ...]:
        return ()

    def remove(self, other: Self, emptied: Tensor, tolerance: float) -> Self:
        raise RemovalError(
            "elements cannot be removed from a mean over chunks: their chunk is not known. Encode the remaining elements "
            "anew, or use a consistent pool."
        )

    def scale(self, factor: Tensor) -> Self:
        return self

    def fault(self, seen: Tensor) -> str | None:
        chunks = self.tensors.get("seen")
        if chunks is None or chunks.dtype != torch.int64 or bool((chunks < seen.to(chunks.dtype)).any()):
            return "the number of chunks is missing, or less than one for a set that has elements"
        return None


class Maximum(Accumulator):
    """Feature-wise maximum over the elements: it merges, but does not support removal or decay."""

    kind = "maximum"
    owned_by_one_element = True
    nothing: ClassVar[float] = float("-inf")
    choose: ClassVar[Callable[[Tensor, Tensor], Tensor]] = torch.maximum
    beats: ClassVar[Callable[[Tensor, Tensor], Tensor]] = torch.gt
    operation: ClassVar[dist.ReduceOp.RedOpType] = dist.ReduceOp.MAX

    def merge(self, other: Self) -> Self:
        a, b = self["value"], other["value"]
        if a.shape[-1] != b.shape[-1]:
            narrow, wide = sorted((a, b), key=lambda value: value.shape[-1])
            must_be_empty(narrow == self.nothing, narrow, wide)
        return type(self)(value=type(self).choose(a, b))

    def remove(self, other: Self, emptied: Tensor, tolerance: float) -> Self:
        raise RemovalError(
            f"elements cannot be removed from a {self.kind}: the next value is not known. Encode the others anew, or "
            "use a model without it: pools that are means, sums or UMBC, and elements_stream=False in a SetClassifier."
        )

    def fault(self, seen: Tensor) -> str | None:
        value = self.tensors.get("value")
        if value is None:
            return f"a {self.kind} has no value"
        right = torch.where(align(seen, value), torch.isfinite(value), value == self.nothing)
        return None if bool(right.all()) else f"a {self.kind} is not finite, or is of no elements"

    def reduce(self, group: Group) -> Self:
        return type(self)(value=all_reduce(self["value"], self.operation, group))

    def contribution(self, whole: Self, owned: Tensor | None = None) -> dict[str, Tensor]:
        return self.tensors if owned is None else {"value": self["value"].masked_fill(~owned, 0.0)}

    def merge_owners(self, other: Self, owners: Tensor, other_owners: Tensor) -> Tensor:
        """Of equal values, the first keeps its owner."""
        return torch.where(type(self).beats(other["value"], self["value"]), other_owners, owners)


class Minimum(Maximum):
    """Feature-wise minimum over the elements."""

    kind = "minimum"
    nothing = float("inf")
    choose, beats, operation = torch.minimum, torch.lt, dist.ReduceOp.MIN


class Shared(Accumulator):
    """What all chunks of one pass must have in common, such as the slots' random draw. Removal and decay do not change it."""

    kind = "shared"
    shared = True

    def to_dtype(self, dtype: torch.dtype) -> Self:
        """A draw keeps its type: rounded, it would be another draw."""
        return self

    def merge(self, other: Self) -> Self:
        for name, tensor in self.tensors.items():
            if tensor is not other[name] and not torch.equal(tensor, other[name]):
                raise MismatchError(
                    f"these states come from different random draws or different first passes ({name}), so their sum means "
                    "nothing. Start both from one `state = encoder.empty(batch)`, or from one `encoder.next_pass(state)`; call "
                    "encoder.eval() if no draw is needed."
                )
        return self

    def remove(self, other: Self, emptied: Tensor, tolerance: float) -> Self:
        return self.merge(other)

    def scale(self, factor: Tensor) -> Self:
        return self

    def reduce(self, group: Group) -> Self:
        return self

    def from_first_rank(self, group: Group) -> Self:
        first = dist.get_global_rank(group, 0)

        def of_first_rank(tensor: Tensor) -> Tensor:
            value = tensor.detach().contiguous().clone()
            dist.broadcast(value, src=first, group=group)
            return tensor + (value - tensor.detach()) if tensor.requires_grad else value  # slots keep their graph

        return self.map(of_first_rank)
