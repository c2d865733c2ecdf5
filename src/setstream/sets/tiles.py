"""Packed elements in tiles that fit a processor's cache: several whole sets, or a part of one.

tile    elements start .. stop of the packed ones, of the consecutive sets first .. first + len(lengths)
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor


class Group(NamedTuple):
    """A dense block of features."""

    sets: list[int]  # which of the batch, without empty ones
    where: slice | Tensor  # where its elements are in the tile
    features: Tensor  # (b, m, D)
    mask: Tensor | None  # (b, m), if padded


@dataclass(frozen=True)
class Tile:
    """A slice of packed elements: where it starts, the first of its sets, and how many elements of each it has."""

    start: int
    first: int
    lengths: list[int]

    @property
    def stop(self) -> int:
        """Where it ends."""
        return self.start + sum(self.lengths)

    def groups(self, features: Tensor) -> Iterator[Group]:
        """Its features (n, D) in dense blocks."""
        lengths = self.lengths
        if len(lengths) == 1 or min(lengths) == max(lengths):
            if lengths[0]:
                sets = [*range(self.first, self.first + len(lengths))]
                yield Group(sets, slice(None), features.unflatten(0, (len(lengths), lengths[0])), None)
            return
        starts = [0, *accumulate(lengths)]
        buckets: dict[int, list[int]] = {}
        for index, length in enumerate(lengths):
            if length:
                buckets.setdefault((length - 1).bit_length(), []).append(index)
        for rows in buckets.values():
            sets = [self.first + row for row in rows]
            begin, end, length = starts[rows[0]], starts[rows[-1] + 1], lengths[rows[0]]
            if end - begin == length * len(rows) and all(lengths[row] == length for row in rows):
                block = features if end - begin == len(features) else features[begin:end]  # a slice's backward is a copy
                yield Group(sets, slice(begin, end), block.unflatten(0, (len(rows), length)), None)  # contiguous sets
                continue
            sizes = torch.tensor([lengths[row] for row in rows])
            offsets = torch.arange(int(sizes.max()))
            mask = offsets < sizes[:, None]
            # Padding repeats an element of the same set: finite like all features, and masked.
            positions = torch.tensor([starts[row] for row in rows])[:, None] + offsets.minimum(sizes[:, None] - 1)
            # index_select takes a fifth of the time of indexing with positions, and its backward adds rows in order.
            block = features.index_select(0, positions.flatten().to(features.device)).unflatten(0, mask.shape)
            yield Group(sets, positions[mask].to(features.device), block, mask.to(features.device))


def tiles(lengths: list[int], size: int, first_set: int = 0) -> list[Tile]:
    """All elements of sets of these lengths, in tiles of at most `size`; longer sets are cut evenly.

    >>> [(tile.start, tile.first, tile.lengths) for tile in tiles([2, 1, 0, 9, 3], 4)]
    [(0, 0, [2, 1, 0]), (3, 3, [3]), (6, 3, [3]), (9, 3, [3]), (12, 4, [3])]
    """
    cut: list[Tile] = []
    start = first = taken = 0
    for index, length in enumerate(lengths):
        if taken + length > size:
            if index > first:
                cut.append(Tile(start, first_set + first, lengths[first:index]))
            start, first, taken = start + taken, index, 0
            if length > size:
                parts = -(-length // size)
                for part in range(parts):
                    low, high = length * part // parts, length * (part + 1) // parts
                    cut.append(Tile(start + low, first_set + index, [high - low]))
                start, first = start + length, index + 1
                continue
        taken += length
    if first < len(lengths) and taken:
        cut.append(Tile(start, first_set + first, lengths[first:]))
    return cut
