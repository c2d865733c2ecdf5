"""How sets in memory are cut into blocks, and which chunks carry the gradient.

    random       a random order of each set, cut into chunks of chunk_size (the last may be smaller)
    contiguous   the given order, cut the same way: no copy of the elements for a single set
    given        an index list for each chunk of each set

Set i has C_i chunks; m' of them are drawn, uniformly, with or without replacement. The gradient of what the drawn chunks
contribute is multiplied by

    factor = t C_i / m'        t: how often the chunk was drawn (always one without replacement)

which makes its expectation the gradient of the whole. The factor is per set: sets of one batch have different sizes. With
m' >= C_i every chunk is taken once, with factor one: the full gradient.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import inf
from typing import TypeAlias

import torch
from torch import Tensor

from setstream.errors import ShapeError
from setstream.sets.layout import Packed, tiles

# Index lists: for each set, one list (or tensor) of element positions for each chunk.
Given: TypeAlias = "Sequence[Sequence[Sequence[int] | Tensor]]"
# What carries the gradient: the number of a block in the forward pass, the block, and its factor per set (None: one).
Carriers: TypeAlias = "Iterable[tuple[int, Packed, Tensor | None]]"


@dataclass(frozen=True)
class Piece:
    """Some elements of consecutive sets: where they are in the packed elements, how many of each set, and the first set."""

    positions: Tensor | slice
    lengths: list[int]
    first: int = 0

    def of(self, elements: Tensor) -> Packed:
        """The piece itself; a view where the positions are a slice."""
        at = self.positions
        return Packed(elements[at] if isinstance(at, slice) else elements.index_select(0, at), self.lengths, at, self.first)


@dataclass(frozen=True)
class Blocks:
    """Pieces of packed elements, which can be iterated any number of times."""

    elements: Tensor
    pieces: list[Piece]

    def __iter__(self) -> Iterator[Packed]:
        return (piece.of(self.elements) for piece in self.pieces)


@dataclass(frozen=True)
class Cut:
    """One set, cut: an order of its elements and the bounds of the chunks in it."""

    order: Tensor
    bounds: list[int]

    def __len__(self) -> int:
        return len(self.bounds) - 1

    def chunk(self, index: int) -> Tensor:
        """The positions of chunk `index` within the set; none where there is no such chunk."""
        return self.order[self.bounds[index] : self.bounds[index + 1]] if index < len(self) else self.order[:0]

    def select(self, indices: Iterable[int]) -> Cut:
        chunks = [self.chunk(index) for index in indices]
        order = chunks[0] if len(chunks) == 1 else torch.cat([self.order[:0], *chunks])
        return Cut(order, [0, *accumulate(map(len, chunks))])


def even_cut(order: Tensor, chunk_size: int) -> Cut:
    """Chunks of chunk_size; the last may be smaller."""
    return Cut(order, [*range(0, len(order), chunk_size), len(order)])


def cut(lengths: list[int], chunk_size: int, partition: str | Given, generator: torch.Generator | None) -> list[Cut]:
    """Each set, cut by `partition`."""
    if partition == "random":
        return [even_cut(torch.randperm(length, generator=generator), chunk_size) for length in lengths]
    if isinstance(partition, str):
        return [even_cut(torch.arange(length), chunk_size) for length in lengths]
    if len(partition) != len(lengths):
        raise ShapeError(f"a given partition needs an index list for each of the {len(lengths)} sets; got {len(partition)}")
    cuts = []
    for index, (chunks, length) in enumerate(zip(partition, lengths, strict=True)):
        order = torch.cat([torch.empty(0, dtype=torch.int64), *(torch.as_tensor(c, dtype=torch.int64) for c in chunks)])
        if not torch.equal(order.sort().values, torch.arange(length)):
            raise ShapeError(f"the given partition of set {index} must name each of its {length} elements exactly once")
        cuts.append(Cut(order, [0, *accumulate(map(len, chunks))]))
    return cuts


def in_order(lengths: list[int], size: int) -> list[Piece]:
    """All sets in memory order, in slices of at most `size` elements: several whole sets, or a part of one."""
    pieces = [Piece(slice(tile.start, tile.stop), tile.lengths, tile.first) for tile in tiles(lengths, size)]
    return pieces or [Piece(slice(0, 0), lengths)]


def runs(lengths: Iterable[int], size: int, most: float = inf) -> Iterator[slice]:
    """Runs of consecutive sets with at most `size` elements together, and at most `most` sets; larger sets alone."""
    first = last = total = 0
    for length in lengths:
        if last > first and (total + length > size or last - first >= most):
            yield slice(first, last)
            first, total = last, 0
        total += length
        last += 1
    if last > first:
        yield slice(first, last)


def joined(selection: Sequence[Tensor], lengths: list[int]) -> Piece:
    """The piece that takes selection[i] from set i."""
    counts = [len(positions) for positions in selection]
    if len(selection) == 1 and counts[0]:
        first, last = int(selection[0][0]), int(selection[0][-1])
        if last - first + 1 == counts[0] and bool((selection[0].diff() == 1).all()):
            return Piece(slice(first, last + 1), counts)
    starts = [0, *accumulate(lengths)]
    return Piece(torch.cat([positions + start for positions, start in zip(selection, starts, strict=False)]), counts)


def columns(cuts: list[Cut], lengths: list[int]) -> list[Piece]:
    """Chunk j of every set together, for each j; a set that has no chunk j gives nothing."""
    count = max(1, *(len(chunks) for chunks in cuts))
    return [joined([chunks.chunk(j) for chunks in cuts], lengths) for j in range(count)]


def draw_counts(chunks: int, wanted: int, replacement: bool, generator: torch.Generator | None) -> dict[int, int]:
    """Which of a set's chunks are drawn, and how often each."""
    if wanted >= chunks:
        return dict.fromkeys(range(chunks), 1)
    if not replacement:
        order = torch.randint(chunks, (1,), generator=generator) if wanted == 1 else torch.randperm(chunks, generator=generator)
        return dict.fromkeys(order[:wanted].tolist(), 1)
    return Counter(torch.randint(chunks, (wanted,), generator=generator).tolist())


def drawn_elements(
    lengths: list[int], chunk_size: int, wanted: int, generator: torch.Generator | None
) -> tuple[Piece, list[float]]:
    """The elements of `wanted` random chunks of each set, and the factors: without an order of all elements."""
    chunks = [-(-length // chunk_size) for length in lengths]
    sizes = [length if wanted >= of_set else wanted * chunk_size for length, of_set in zip(lengths, chunks, strict=True)]
    for index, (length, of_set) in enumerate(zip(lengths, chunks, strict=True)):
        if wanted < of_set and length % chunk_size and wanted > int(torch.randint(of_set, (), generator=generator)):
            sizes[index] -= chunk_size - length % chunk_size  # the last chunk, which is smaller, is among them
    groups: dict[tuple[int, int], list[int]] = {}
    for index, group in enumerate(zip(lengths, sizes, strict=True)):
        groups.setdefault(group, []).append(index)
    starts = torch.tensor([0, *accumulate(lengths)])
    positions = [starts[:0]] * len(lengths)
    for (length, size), sets in groups.items():
        for index, of_set in zip(sets, distinct(len(sets), length, size, generator) + starts[sets, None], strict=True):
            positions[index] = of_set
    return Piece(torch.cat(positions), sizes), [max(of_set / wanted, 1.0) for of_set in chunks]


def distinct(rows: int, below: int, wanted: int, generator: torch.Generator | None) -> Tensor:
    """In each of some rows `wanted` different numbers below a bound, (rows, wanted): all choices are equally likely."""
    if wanted**2 >= below:
        return torch.stack([torch.randperm(below, generator=generator)[:wanted] for _ in range(rows)])
    draw = torch.randint(below, (rows, wanted), generator=generator)
    while bool((twice := (draw.sort(1).values.diff(dim=1) == 0).any(1)).any()):
        draw[twice] = torch.randint(below, (int(twice.sum()), wanted), generator=generator)
    return draw


@dataclass(frozen=True)
class InMemory:
    """Sets in memory, as a source of blocks.

    chunks_matter: every block must be a chunk of the partition, because the pool's result depends on it or the caller gave
    it. Otherwise forward passes may read the elements in memory order, in blocks of any size.
    """

    packed: Packed
    chunk_size: int
    partition: str | Given
    generator: torch.Generator | None
    chunks_matter: bool

    def __len__(self) -> int:
        return len(self.packed)

    @property
    def sample(self) -> Tensor:
        return self.packed.elements[:1]

    @property
    def learned(self) -> Tensor | None:
        return self.packed.elements if self.packed.elements.requires_grad else None

    def whole(self) -> Packed:
        return self.packed

    def blocks(self, size: int) -> Blocks:
        lengths = self.packed.lengths
        pieces = columns(self._cuts(), lengths) if self.chunks_matter else in_order(lengths, size)
        return Blocks(self.packed.elements, pieces)

    def subset(self, wanted: int) -> InMemory:
        chosen = [chunks.select(draw_counts(len(chunks), wanted, False, self.generator)).order for chunks in self._cuts()]
        piece = joined(chosen, self.packed.lengths)
        drawn = Packed(piece.of(self.packed.elements).elements, piece.lengths)
        return InMemory(drawn, self.chunk_size, "contiguous", self.generator, self.chunks_matter)

    def draw(self, wanted: int, replacement: bool, size: int, apart: bool) -> tuple[Blocks, Carriers]:
        """All elements for the forward pass, in blocks of about `size`, and `wanted` drawn chunks of each set with factors.

        Without replacement all drawn chunks have one factor and form one block; with it, or where chunks matter, each is a
        separate block. apart: the drawn blocks must be the first blocks of the forward pass.
        """
        lengths, elements = self.packed.lengths, self.packed.elements
        if self.partition == "random" and not (apart or replacement or self.chunks_matter):
            piece, factors = drawn_elements(lengths, self.chunk_size, wanted, self.generator)
            return Blocks(elements, in_order(lengths, size)), [(0, piece.of(elements), torch.tensor(factors))]
        cuts = self._cuts()
        drawn = [draw_counts(len(chunks), wanted, replacement, self.generator) for chunks in cuts]
        turns = [drawn]
        if replacement or self.chunks_matter:
            most = max(1, *map(len, drawn))
            turns = [[dict([*counts.items()][turn : turn + 1]) for counts in drawn] for turn in range(most)]
        pieces, carriers = [], []
        for number, chosen in enumerate(turns):
            picks = list(zip(cuts, chosen, strict=True))
            factors = [max(times.values(), default=1) * max(len(chunks) / wanted, 1.0) for chunks, times in picks]
            pieces.append(joined([chunks.select(times).order for chunks, times in picks], lengths))
            carriers.append((number, pieces[-1].of(elements), torch.tensor(factors)))
        if not apart and not self.chunks_matter:
            return Blocks(elements, in_order(lengths, size)), carriers
        rest = [each.select(sorted({*range(len(each))} - counts.keys())) for each, counts in zip(cuts, drawn, strict=True)]
        if not self.chunks_matter:
            rest = [even_cut(chunks.order, max(1, size // len(lengths))) for chunks in rest]
        return Blocks(elements, [*pieces, *columns(rest, lengths)]), carriers

    def _cuts(self) -> list[Cut]:
        return cut(self.packed.lengths, self.chunk_size, self.partition, self.generator)
