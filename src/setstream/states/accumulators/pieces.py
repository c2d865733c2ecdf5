"""The accumulators of many blocks of a batch of sets, merged together at the end.

merged(set) = Σ_blocks accumulators(block of the set)          one merge for all blocks, not one per block
"""

import cmath
import operator
from collections.abc import Sequence
from functools import reduce

from torch import Tensor

from setstream.states.accumulators.base import Accumulator

# Blocks are merged earlier if they hold more numbers than this.
MOST_NUMBERS = 2**23


class Pieces:
    """Accumulators of blocks, each of some sets of a batch."""

    def __init__(self, batch: int) -> None:
        self.batch = batch
        self.blocks: list[dict[str, Accumulator]] = []
        self.sets: list[int] = []  # the set of each row of the blocks, one block after another
        self.numbers = 0

    def add(self, sets: list[int], block: dict[str, Accumulator]) -> None:
        """Add a block of these sets."""
        self.blocks.append(block)
        self.sets += sets
        if len(self.blocks) == 1:  # the first is kept in any case
            return
        self.numbers += sum(tensor.numel() for accumulator in block.values() for tensor in accumulator.tensors.values())
        if self.numbers > MOST_NUMBERS:
            self._merge()
            self.numbers = 0

    def _merge(self) -> None:
        """Merge all blocks into one, of the sets in their order."""
        if len(self.blocks) < 2 and (len(self.sets) == 1 or self.sets == sorted(self.sets)):
            return
        seen = sorted(set(self.sets))
        place = {index: row for row, index in enumerate(seen)}
        rows = [place[index] for index in self.sets]
        first, *others = self.blocks
        joined = {name: one.cat([block[name] for block in others]) if others else one for name, one in first.items()}
        if len(rows) > len(seen):
            joined = {name: one.merge_rows(rows, len(seen)) for name, one in joined.items()}
        elif rows != sorted(rows):
            order = sorted(range(len(rows)), key=rows.__getitem__)
            joined = {name: one.map(lambda tensor: tensor[order]) for name, one in joined.items()}
        self.blocks, self.sets = [joined], seen

    def missing(self) -> list[int]:
        """The sets without a block."""
        return sorted(set(range(self.batch)) - set(self.sets)) if len(self.sets) < self.batch or len(self.blocks) > 1 else []

    def merged(self) -> dict[str, Accumulator]:
        """The accumulators of all sets, each of which must have a block."""
        self._merge()
        return self.blocks[0]

    def finite(self, sums: Sequence[Tensor] = ()) -> bool:
        """Whether no sum over elements is NaN or infinite, without a graph: a sum of all tells. `sums`: others to test."""
        self._merge()
        parts = [accumulator for block in self.blocks for accumulator in block.values()]
        totals = [*sums, *(part[name].sum() for part in parts for name in part.graded())]
        return not totals or cmath.isfinite(reduce(operator.add, totals).item())
