"""What all chunks of one pass must have in common: a = b, or it is an error."""

from typing import Self

import torch
import torch.distributed as dist
from torch import Tensor

from setstream.errors import MismatchError
from setstream.states.accumulators.base import Accumulator
from setstream.states.collectives import Group


class Shared(Accumulator):
    """What all chunks of one pass must have in common, such as the slots' random draw. Removal and decay do not change it."""

    kind = "shared"
    shared = True

    def graded(self) -> tuple[str, ...]:
        return ()

    def to_dtype(self, dtype: torch.dtype) -> Self:
        """A draw keeps its type: rounded, it would be another draw."""
        return self

    def merge(self, other: Self) -> Self:
        for name, tensor in self.tensors.items():
            if tensor is not other[name] and not torch.equal(tensor, other[name]):
                raise MismatchError(
                    f"these states come from different random draws ({name}), so their sum means nothing. Start both "
                    "from one `state = encoder.empty(batch)`, or call encoder.eval() if no draw is needed."
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
        draw = self.map(lambda tensor: tensor.contiguous().clone())
        for tensor in draw.tensors.values():
            dist.broadcast(tensor, src=first, group=group)
        return draw
