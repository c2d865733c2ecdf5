"""How sets are cut into chunks, and which chunks carry the gradient.

    random       a random order of each set, cut into pieces of chunk_size (the last may be smaller)
    contiguous   the given order, cut the same way: no copy of the elements for a single set
    given        an index list for each chunk of each set

Set i has C_i chunks; m' of them are drawn, uniformly, with or without replacement. The gradient of what the drawn chunks
contribute is multiplied by

    factor = t C_i / m'        t: how often the chunk was drawn (always one without replacement)

which makes its expectation the gradient of the whole. The factor is per set: sets of one batch have different sizes. With
m' >= C_i every chunk is taken once, with factor one: the full gradient.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TypeAlias

import torch
from torch import Tensor

from setstream.errors import ConfigurationError, ShapeError
from setstream.sets.layout import Packed, Sets, pack

# Index lists: for each set, one list (or tensor) of element positions for each chunk.
Given: TypeAlias = "Sequence[Sequence[Sequence[int] | Tensor]]"


@dataclass(frozen=True)
class Piece:
    """Some elements of each set: where they are in the packed elements, and how many of each set."""

    positions: Tensor | slice
    lengths: list[int]

    def of(self, elements: Tensor) -> Packed:
        """The piece itself; a view where the positions are a slice."""
        own = elements[self.positions] if isinstance(self.positions, slice) else elements.index_select(0, self.positions)
        return Packed(own, self.lengths)

    @property
    def total(self) -> int:
        """Elements of all sets together."""
        return sum(self.lengths)


class Chunks:
    """Sets that are served chunk by chunk: anything that can be iterated again and again.

    Each item is a chunk of all sets of the batch, in any layout (a list where a set has nothing to give in this chunk). How
    many chunks there are need not be known before the first pass.

    >>> import torch, setstream as ss
    >>> x = torch.randn(1, 100, 3)
    >>> source = ss.Chunks(x.split(30, dim=1))
    >>> encoder = ss.SetEncoder(torch.nn.Linear(3, 8), ss.UMBC(8, num_slots=2)).eval()
    >>> torch.allclose(ss.encode(encoder, source, gradient="none"), encoder(x), atol=1e-5)
    True
    """

    def __init__(self, source: Iterable[Sets]) -> None:
        if isinstance(source, Iterator):
            raise ConfigurationError(
                "a source of chunks is read more than once, and an iterator or generator only gives its chunks once. Pass a "
                "list, or an object whose __iter__ starts anew."
            )
        self.source = source

    def __iter__(self) -> Iterator[Packed]:
        batch: int | None = None
        for chunk in self.source:
            packed = pack(chunk)
            if batch not in (None, len(packed)):
                raise ShapeError(
                    f"every chunk must hold all sets of the batch: the first had {batch}, this one has {len(packed)}"
                )
            batch = len(packed)
            yield packed


class Cut:
    """One set, cut: an order of its elements and the bounds of the chunks in it."""

    def __init__(self, order: Tensor, bounds: list[int]) -> None:
        self.order, self.bounds = order, bounds

    def __len__(self) -> int:
        return len(self.bounds) - 1

    def chunk(self, index: int) -> Tensor:
        """The positions of chunk `index` within the set; none where there is no such chunk."""
        return self.order[self.bounds[index] : self.bounds[index + 1]] if index < len(self) else self.order[:0]

    def without(self, taken: Iterable[int]) -> Cut:
        """The other chunks, as they are."""
        gone = set(taken)
        left = [self.chunk(index) for index in range(len(self)) if index not in gone]
        return Cut(_together(left or [self.order[:0]]), [0, *accumulate(map(len, left))])


def even_cut(order: Tensor, chunk_size: int) -> Cut:
    """Chunks of chunk_size; the last may be smaller."""
    return Cut(order, [*range(0, len(order), chunk_size), len(order)])


def cut(lengths: list[int], chunk_size: int, partition: str | Given, generator: torch.Generator | None) -> list[Cut]:
    """Each set, cut as `partition` says."""
    if partition == "random":
        return [even_cut(torch.randperm(length, generator=generator), chunk_size) for length in lengths]
    if isinstance(partition, str):
        return [even_cut(torch.arange(length), chunk_size) for length in lengths]
    if len(partition) != len(lengths):
        raise ShapeError(f"a given partition needs an index list for each of the {len(lengths)} sets; got {len(partition)}")
    cuts = []
    for index, (own, length) in enumerate(zip(partition, lengths, strict=True)):
        chunks = [torch.as_tensor(chunk, dtype=torch.int64) for chunk in own]
        order = torch.cat([torch.empty(0, dtype=torch.int64), *chunks])
        if not torch.equal(order.sort().values, torch.arange(length)):
            raise ShapeError(f"the given partition of set {index} must name each of its {length} elements exactly once")
        cuts.append(Cut(order, [0, *torch.tensor([len(chunk) for chunk in chunks]).cumsum(0).tolist()]))
    return cuts


def in_order(lengths: list[int], size: int) -> list[Piece]:
    """All sets as they lie in memory, in slices of at most `size` elements: several whole sets, or a part of one."""
    pieces: list[Piece] = []
    own: dict[int, int] = {}
    start = 0

    def close() -> None:
        nonlocal start
        end = start + sum(own.values())
        if end > start or not pieces:
            pieces.append(Piece(slice(start, end), [own.get(index, 0) for index in range(len(lengths))]))
        start = end
        own.clear()

    room = size
    for index, length in enumerate(lengths):
        if length > room:
            if own:
                close()
            while length > size:
                own[index] = size
                close()
                length -= size
            room = size
        own[index] = length
        room -= length
    close()
    return pieces


def joined(selection: Sequence[Tensor], lengths: list[int]) -> Piece:
    """The piece that takes selection[i] from set i."""
    own = [len(positions) for positions in selection]
    if len(selection) == 1 and own[0]:
        only = selection[0]
        first, last = int(only[0]), int(only[-1])
        if last - first + 1 == own[0] and bool((only.diff() == 1).all()):
            return Piece(slice(first, last + 1), own)
    start, shifted = 0, []
    for positions, length in zip(selection, lengths, strict=True):
        shifted.append(positions + start)
        start += length
    return Piece(torch.cat(shifted), own)


def columns(cuts: list[Cut], lengths: list[int]) -> list[Piece]:
    """Chunk j of every set together, for each j; a set that has no chunk j gives nothing."""
    count = max(1, *(len(own) for own in cuts))
    return [joined([own.chunk(j) for own in cuts], lengths) for j in range(count)]


@dataclass(frozen=True)
class Drawn:
    """Chunks that carry the gradient, with the factor of each set."""

    pieces: list[Piece]
    factors: list[Tensor]
    cuts: list[Cut]
    taken: list[dict[int, int]]

    def rest(self) -> list[Cut]:
        """Everything else, for each set, in the chunks that it was cut into."""
        return [own.without(taken) for own, taken in zip(self.cuts, self.taken, strict=True)]


def draw_counts(chunks: int, wanted: int, replacement: bool, generator: torch.Generator | None) -> dict[int, int]:
    """Which of a set's chunks are drawn, and how often each."""
    if wanted >= chunks:
        return dict.fromkeys(range(chunks), 1)
    if not replacement:
        order = torch.randint(chunks, (1,), generator=generator) if wanted == 1 else torch.randperm(chunks, generator=generator)
        return dict.fromkeys(order[:wanted].tolist(), 1)
    counts: dict[int, int] = {}
    for chunk in torch.randint(chunks, (wanted,), generator=generator).tolist():
        counts[chunk] = counts.get(chunk, 0) + 1
    return counts


def factor(chunks: int, wanted: int, times: int) -> float:
    """What the gradient of a chunk that was drawn `times` times is multiplied by."""
    return times * max(chunks / wanted, 1.0)


def _together(tensors: list[Tensor]) -> Tensor:
    return tensors[0] if len(tensors) == 1 else torch.cat(tensors)


def draw(
    cuts: list[Cut],
    lengths: list[int],
    wanted: int,
    replacement: bool,
    generator: torch.Generator | None,
    *,
    apart: bool = False,
) -> Drawn:
    """Draw `wanted` chunks of each set.

    Without replacement all chunks of a set have one factor and make one piece; with it, or `apart`, each is a piece of its own.
    """
    drawn = [draw_counts(len(own), wanted, replacement, generator) for own in cuts]
    if not replacement and not apart:
        taken = [
            _together([own.chunk(index) for index in counts] or [own.order[:0]])
            for own, counts in zip(cuts, drawn, strict=True)
        ]
        factors = torch.tensor([factor(len(own), wanted, 1) for own in cuts])
        return Drawn([joined(taken, lengths)], [factors], cuts, drawn)
    pieces, factors_list = [], []
    for turn in range(max(1, *(len(counts) for counts in drawn))):
        picks = [[*counts.items(), *[(len(own), 1)] * (turn + 1)][turn] for own, counts in zip(cuts, drawn, strict=True)]
        pieces.append(joined([own.chunk(index) for own, (index, _) in zip(cuts, picks, strict=True)], lengths))
        factors_list.append(torch.tensor([factor(len(own), wanted, n) for own, (_, n) in zip(cuts, picks, strict=True)]))
    return Drawn(pieces, factors_list, cuts, drawn)
