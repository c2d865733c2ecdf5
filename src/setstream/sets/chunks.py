"""Sets that are served chunk by chunk, also as a source of blocks for `ss.encode`, and their shares on many ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Generator, Tensor

from setstream._utils.prefetch import read_ahead
from setstream.errors import ConfigurationError, ShapeError
from setstream.sets.layout import Packed, Sets, pack
from setstream.sets.partition import Carriers, InMemory, draw_counts
from setstream.sets.source import PartSource, SetSource

Random = Generator | None
Device = torch.device | None


class Chunks:
    """Sets that are served chunk by chunk: anything that can be iterated any number of times.

    Each item is a chunk of all sets of the batch, in any layout (a list where a set has no elements in this chunk). The
    number of chunks need not be known before the first pass. `chunks[rows]` are the chunks of some of the sets.

    Example:
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
                "a source of chunks is read more than once, but an iterator or generator gives its chunks only once. Pass a "
                "list, or an object whose __iter__ starts again from the beginning."
            )
        self.source = source

    def __iter__(self) -> Iterator[Packed]:
        batch: int | None = None
        for chunk in self._served():
            packed = pack(chunk)
            if batch not in (None, len(packed)):
                raise ShapeError(f"every chunk must hold all sets: the first had {batch}, this one has {len(packed)}")
            batch = len(packed)
            yield packed

    def _served(self) -> Iterable[Sets]:
        return self.source

    def __getitem__(self, rows: slice) -> Chunks:
        return Chunks(_MappedChunks(self, lambda sets: sets[rows]))

    def part(self, number: int, parts: int) -> Chunks:
        """Part `number` of `parts` contiguous parts of every chunk; all of it is read."""
        return Chunks(_MappedChunks(self, lambda sets: [x.tensor_split(parts)[number] for x in sets]))


@dataclass(frozen=True)
class _MappedChunks:
    """Chunks, each a list of tensors, to which a function is applied when they are read."""

    chunks: Chunks
    change: Callable[[list[Tensor]], list[Tensor]]

    def __iter__(self) -> Iterator[list[Tensor]]:
        return (self.change(list(packed.elements.split(packed.lengths))) for packed in self.chunks)


class SourceChunks(Chunks):
    """Sets in sources, served together: chunk j of every set, for each j until the end of the longest, read ahead.

    Example:
        >>> import setstream as ss
        >>> from setstream.data import ArraySource
        >>> sets = SourceChunks([ArraySource(torch.randn(n, 3)) for n in (5, 9)], chunk_size=4)
        >>> [chunk.lengths for chunk in sets]
        [[4, 4], [1, 4], [0, 1]]
        >>> [chunk.lengths for chunk in sets.part(1, 2)]         # what the second of two processes holds of every set
        [[2, 4]]
    """

    def __init__(
        self, sources: Sequence[SetSource], chunk_size: int, partition: str = "contiguous", generator: Random = None
    ) -> None:
        self.sources, self._options = list(sources), (chunk_size, partition, generator)
        self._chunked = [source.chunks(chunk_size, partition, generator=generator) for source in sources]

    def _served(self) -> Iterator[list[Tensor]]:
        example = next((source for source in self.sources if len(source)), self.sources[0])
        nothing = torch.empty(0, *example.shape, dtype=example.dtype)

        def read(number: int) -> list[Tensor]:
            return [chunks.chunk(number) if number < len(chunks) else nothing for chunks in self._chunked]

        count = max(1, *map(len, self._chunked))
        return read_ahead(partial(read, number) for number in range(count))

    def __getitem__(self, rows: slice) -> SourceChunks:
        return SourceChunks(self.sources[rows], *self._options)

    def part(self, number: int, parts: int) -> SourceChunks:
        """Part `number` of `parts` contiguous parts of every set; nothing else is read."""
        return SourceChunks([PartSource(source, number, parts) for source in self.sources], *self._options)


def scatter_sets(sets: Any, mask: Tensor | None = None, group: dist.ProcessGroup | None = None) -> Any:
    """The part of every set that this rank holds, for `encode`: contiguous shares of nearly equal size::

        rank r holds elements r·N/R .. (r+1)·N/R of every set
        encode(encoder, parts, group=group)          gives every rank the z and the gradients of the whole sets

    Only states and gradients are sent, for any number of elements. Every rank passes the same sets, in any layout. Sources on
    disk, and chunks of them, become views: a rank reads only its part. Other chunks are read by all ranks, each of which keeps
    its part. A rank may hold no element of a set. Without torch.distributed one rank holds everything.

    Example:
        >>> import torch, setstream as ss
        >>> [len(x) for x in ss.scatter_sets(torch.randn(2, 5, 3))]
        [5, 5]
    """
    rank, ranks = 0, 1
    if dist.is_available() and dist.is_initialized():
        rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    if isinstance(sets, list | tuple) and sets and all(isinstance(source, SetSource) for source in sets):
        return [PartSource(source, rank, ranks) for source in sets]
    if isinstance(sets, Chunks):
        return sets.part(rank, ranks)
    packed = pack(sets, mask)
    return [torch.tensor_split(x, ranks)[rank] for x in packed.elements.split(packed.lengths)]


class Served:
    """Chunks as a source of blocks: every block is a chunk, on the encoder's device."""

    learned = None  # elements that are read get no gradient

    def __init__(self, chunks: Chunks, device: Device, generator: Random) -> None:
        self.chunks, self.device, self.generator = chunks, device, generator
        #: For each chunk that was read, which sets have elements in it.
        self.present: list[list[bool]] = []

    @cached_property
    def _known(self) -> tuple[int, Tensor]:
        """The number of sets, and a copy of one element: a view would hold the first chunk until the backward pass."""
        first = next(iter(self.chunks), None)
        if first is None:
            raise ShapeError("the source of chunks is empty: at least one chunk is needed, to know how many sets there are")
        return len(first), self._moved(Packed(first.elements[:1].clone(), first.lengths)).elements

    def __len__(self) -> int:
        return self._known[0]

    @property
    def sample(self) -> Tensor:
        return self._known[1]

    def __iter__(self) -> Iterator[Packed]:
        for index, packed in enumerate(self.chunks):
            if index == len(self.present):
                self.present.append([length > 0 for length in packed.lengths])
            yield self._moved(packed)

    def _moved(self, packed: Packed) -> Packed:
        return packed if self.device is None else Packed(packed.elements.to(self.device), packed.lengths)

    def whole(self) -> Packed | None:
        return None

    def blocks(self, size: int) -> Iterable[Packed]:
        return self

    def subset(self, wanted: int) -> InMemory:
        raise ConfigurationError("gradient='subset' cannot draw from chunks: serve fewer chunks and use gradient='exact'")

    def draw(self, wanted: int, replacement: bool, size: int, apart: bool) -> tuple[Iterable[Packed], Carriers]:
        return self, DrawnChunks(self, wanted, replacement)


@dataclass(frozen=True)
class DrawnChunks:
    """Chunks drawn for each set among its own, with factors: drawn after the first pass, which counts them."""

    served: Served
    wanted: int
    replacement: bool

    def __iter__(self) -> Iterator[tuple[int, Packed, Tensor]]:
        factors: dict[int, Tensor] = {}
        for row in range(len(self.served)):
            chunks = [index for index, present in enumerate(self.served.present) if present[row]]
            drawn = draw_counts(len(chunks), self.wanted, self.replacement, self.served.generator)
            for number, times in drawn.items():
                of_sets = factors.setdefault(chunks[number], torch.zeros(len(self.served)))
                of_sets[row] = times * max(len(chunks) / self.wanted, 1.0)
        last = max(factors, default=-1)
        for index, packed in enumerate(self.served):
            if index in factors:
                yield index, packed, factors[index]
            if index >= last:
                return


class Sources(Served):
    """Files as a source of blocks: read in chunks, or whole, or only a random subset of their elements."""

    def __init__(
        self, sources: Sequence[SetSource], chunk_size: int, partition: str, generator: Random, device: Device
    ) -> None:
        super().__init__(SourceChunks(sources, chunk_size, partition, generator), device, generator)
        self.sources, self.chunk_size = sources, chunk_size

    def whole(self) -> Packed:
        return self._moved(pack([source.tensor() for source in self.sources]))

    def subset(self, wanted: int) -> InMemory:
        """As many random elements of each set as `wanted` chunks hold; nothing else is read."""
        size = self.chunk_size * wanted
        drawn = [torch.randperm(len(source), generator=self.generator)[:size].sort().values for source in self.sources]
        taken = pack([source.take(positions) for source, positions in zip(self.sources, drawn, strict=True)])
        return InMemory(self._moved(taken), self.chunk_size, "contiguous", self.generator, chunks_matter=False)
