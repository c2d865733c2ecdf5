"""Plain sums over the elements: a + b."""

from typing import Self

import torch
import torch.distributed as dist
from torch import Tensor

from setstream.errors import RemovalError
from setstream.states.accumulators.base import Accumulator, align
from setstream.states.collectives import Group, all_reduce


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
