"""Feature-wise extremes over the elements: max(a, b), min(a, b)."""

from collections.abc import Callable
from typing import ClassVar, Self

import torch
import torch.distributed as dist
from torch import Tensor

from setstream.errors import RemovalError
from setstream.states.accumulators.base import Accumulator, align, must_be_empty
from setstream.states.collectives import Group, all_reduce


class _Extremum(Accumulator):
    """A feature-wise maximum or minimum: it merges, but does not support removal or decay."""

    owned_by_one_element = True
    nothing: ClassVar[float]
    choose: ClassVar[Callable[[Tensor, Tensor], Tensor]]
    beats: ClassVar[Callable[[Tensor, Tensor], Tensor]]
    operation: ClassVar[dist.ReduceOp.RedOpType]

    def merge(self, other: Self) -> Self:
        a, b = self["value"], other["value"]
        if a.shape[-1] != b.shape[-1]:
            narrow, wide = sorted((a, b), key=lambda value: value.shape[-1])
            must_be_empty(narrow == self.nothing, narrow, wide)
        return type(self)(value=type(self).choose(a, b))

    def remove(self, other: Self, emptied: Tensor, tolerance: float) -> Self:
        raise RemovalError(
            f"elements cannot be removed from a {self.kind}: the next value is not known. Encode the remaining "
            "elements anew, or use a model without it: pools that are means, sums or UMBC, and elements_stream=False in a "
            "SetClassifier."
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
        value = self["value"]
        return {"value": value if owned is None else value.masked_fill(~owned, 0.0)}

    def merge_owners(self, other: Self, owners: Tensor, other_owners: Tensor) -> Tensor:
        """Of equal values, the first keeps its owner."""
        return torch.where(type(self).beats(other["value"], self["value"]), other_owners, owners)


class Maximum(_Extremum):
    """Feature-wise maximum over the elements."""

    kind = "maximum"
    nothing = float("-inf")
    choose, beats, operation = torch.maximum, torch.gt, dist.ReduceOp.MAX


class Minimum(_Extremum):
    """Feature-wise minimum over the elements."""

    kind = "minimum"
    nothing = float("inf")
    choose, beats, operation = torch.minimum, torch.lt, dist.ReduceOp.MIN
