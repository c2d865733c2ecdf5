"""Sources as chunks that `ss.encode` takes: chunk j of every set of a batch, for each j, read ahead."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

import torch
from torch import Tensor

from setstream._utils.prefetch import read_ahead
from setstream.sets.part import PartSource
from setstream.sets.partition import Chunks
from setstream.sets.source import SetSource


class SourceChunks(Chunks):
    """Sets that lie in sources, served together; ends with the longest set.

    >>> import setstream as ss
    >>> from setstream.data import ArraySource
    >>> sets = SourceChunks([ArraySource(torch.randn(n, 3)) for n in (5, 9)], chunk_size=4)
    >>> [chunk.lengths for chunk in sets]
    [[4, 4], [1, 4], [0, 1]]
    >>> [chunk.lengths for chunk in sets.part(1, 2)]         # what the second of two processes holds of every set
    [[2, 4]]
    """

    def __init__(
        self,
        sources: Sequence[SetSource],
        chunk_size: int,
        partition: str = "contiguous",
        generator: torch.Generator | None = None,
        ahead: int = 2,
    ) -> None:
        super().__init__(_Together(sources, chunk_size, partition, generator, ahead))
        self.sources = list(sources)
        self._options = (chunk_size, partition, generator, ahead)

    def __getitem__(self, sets: slice) -> SourceChunks:
        """Some of the sets."""
        return SourceChunks(self.sources[sets], *self._options)

    def part(self, number: int, parts: int) -> SourceChunks:
        """A part of every set: one of several contiguous ones."""
        return SourceChunks([PartSource(source, number, parts) for source in self.sources], *self._options)


class _Together:
    """Chunk j of every set, for each j, as lists."""

    def __init__(
        self, sources: Sequence[SetSource], chunk_size: int, partition: str, generator: torch.Generator | None, ahead: int
    ) -> None:
        self.sources, self.ahead = list(sources), ahead
        full = next((source for source in self.sources if len(source)), self.sources[0])
        self.nothing = torch.empty(0, *full.shape, dtype=full.dtype)
        self.pieces = [source.chunks(chunk_size, partition, generator=generator) for source in self.sources]

    def _read(self, number: int) -> list[Tensor]:
        return [own.piece(number) if number < len(own) else self.nothing for own in self.pieces]

    def __iter__(self) -> Iterator[list[Tensor]]:
        count = max(1, *(len(own) for own in self.pieces))
        return read_ahead((partial(self._read, number) for number in range(count)), self.ahead)
