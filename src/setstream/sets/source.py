"""SetSource: one set, wherever it lies, served in pieces.

    len(source), source.shape, source.dtype          how many elements, of what shape and type
    source.read(start, stop)                         a contiguous range
    source.take(index)                               any elements
    source.chunks(chunk_size, partition)             all of them, in a partition of your choice, read ahead

Partitions, any of which is legal for a consistent encoder:

    contiguous   the order of the file
    blocks       contiguous blocks in random order: as good as the disk likes it
    random       fully random, element by element
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeGuard

import numpy as np
import torch
from torch import Tensor

from setstream._utils.prefetch import read_ahead
from setstream.errors import ConfigurationError, ShapeError
from setstream.sets.layout import from_array

PARTITIONS = ("contiguous", "blocks", "random")
# Gaps of up to this many elements are read over rather than sought over.
SMALL_GAP = 32
# Chunks that lie side by side are read together, up to this many bytes.
READ_BYTES = 2**22

Metadata = dict[str, Any] | None


class SetSource(ABC):
    """One set of elements that need not be in memory. Opened when it is first read, in the process that reads it.

    id:        its name among others
    label:     what is to be learned about it, if anything
    metadata:  anything else that came with it
    """

    id: str = ""
    label: Any = None
    #: The file or folder that it lies in, if any.
    path: Path | None = None

    def __init__(self, id: str = "", label: Any = None, metadata: Metadata = None) -> None:
        self.id, self.label = id, label
        self.metadata: dict[str, Any] = {} if metadata is None else metadata

    @abstractmethod
    def __len__(self) -> int: ...

    @property
    @abstractmethod
    def shape(self) -> tuple[int, ...]:
        """The shape of an element."""

    @property
    @abstractmethod
    def dtype(self) -> torch.dtype:
        """The type of its numbers."""

    @abstractmethod
    def read(self, start: int, stop: int) -> Tensor:
        """Elements start .. stop - 1: (stop - start, ...)."""

    def take(self, index: Tensor) -> Tensor:
        """The elements at any positions, in that order. Reads ranges in the order of the file, over small gaps."""
        if not len(index):
            return self.read(0, 0)
        order = index.argsort()
        positions = index[order]
        lowest, highest = int(positions[0]), int(positions[-1])
        if lowest < 0 or highest >= len(self):
            raise ShapeError(f"{self.id or 'this set'} has {len(self)} elements; asked for {lowest} .. {highest}")
        cuts = ((positions.diff() > SMALL_GAP).nonzero().flatten() + 1).tolist()
        pieces = []
        for first, last in pairwise([0, *cuts, len(positions)]):
            low = int(positions[first])
            block = self.read(low, int(positions[last - 1]) + 1)
            pieces.append(block[positions[first:last] - low])
        found = torch.cat(pieces)
        back = torch.empty_like(found)
        back[order] = found
        return back

    def chunks(
        self,
        chunk_size: int,
        partition: str = "contiguous",
        *,
        generator: torch.Generator | None = None,
        ahead: int = 2,
    ) -> Pieces:
        """All elements in chunks; can be gone through again and again, in the same order each time."""
        return Pieces(self, chunk_size, partition, generator, ahead)

    def tensor(self) -> Tensor:
        """All elements, in memory."""
        return self.read(0, len(self))

    def close(self) -> None:  # noqa: B027 - most sources hold nothing
        """Give back what holds the file open; reading opens it again."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.id!r}, {len(self)} x {tuple(self.shape)}, {self.dtype})"


def are_sources(sets: Any) -> TypeGuard[Sequence[SetSource]]:
    """Whether these are sets that lie in sources, one source each."""
    return isinstance(sets, list | tuple) and bool(sets) and all(isinstance(source, SetSource) for source in sets)


class Pieces:
    """The chunks of one source: (n, ...) tensors, read ahead of whoever uses them."""

    def __init__(
        self, source: SetSource, chunk_size: int, partition: str, generator: torch.Generator | None, ahead: int
    ) -> None:
        if partition not in PARTITIONS:
            raise ConfigurationError(f"unknown partition {partition!r}: choose one of {', '.join(PARTITIONS)}")
        if chunk_size < 1:
            raise ConfigurationError(f"chunk_size must be at least 1; got {chunk_size}")
        self.source, self.chunk_size, self.ahead = source, chunk_size, ahead
        size = len(source)
        self.order: Tensor | None = None
        self.in_order = partition == "contiguous"
        starts = torch.arange(0, size, chunk_size)
        self.starts = starts[torch.randperm(len(starts), generator=generator)] if partition == "blocks" else starts
        if partition == "random":
            self.order = torch.randperm(size, generator=generator)

    def __len__(self) -> int:
        return len(self.starts)

    def piece(self, number: int) -> Tensor:
        """Chunk `number`; nothing where there is no such chunk."""
        if number >= len(self):
            return self.source.read(0, 0)
        start = int(self.starts[number])
        stop = min(start + self.chunk_size, len(self.source))
        return self.source.read(start, stop) if self.order is None else self.source.take(self.order[start:stop])

    def __iter__(self) -> Iterator[Tensor]:
        if not self.in_order:
            yield from read_ahead((partial(self.piece, number) for number in range(len(self))), self.ahead)
            return
        # Handing a piece from thread to thread costs as much as reading a small one: several at a time, as they lie.
        size = len(self.source)
        chunk_bytes = self.chunk_size * math.prod(self.source.shape) * self.source.dtype.itemsize if size else 1
        step = self.chunk_size * max(1, READ_BYTES // max(1, chunk_bytes))
        reads = (partial(self.source.read, start, min(start + step, size)) for start in range(0, size, step))
        for block in read_ahead(reads, self.ahead):
            yield from block.split(self.chunk_size)


class ArraySource(SetSource):
    """A set in memory: a tensor or an array (N, ...).

    >>> source = ArraySource(np.arange(6.0).reshape(3, 2), id="a")
    >>> len(source), source.shape, source.take(torch.tensor([2, 0])).tolist()
    (3, (2,), [[4.0, 5.0], [0.0, 1.0]])
    """

    def __init__(self, array: np.ndarray | Tensor, id: str = "", label: Any = None, metadata: Metadata = None) -> None:
        super().__init__(id, label, metadata)
        self.array = from_array(array) if isinstance(array, np.ndarray) else array
        if self.array.dim() < 1:
            raise ShapeError(f"a set is (N, ...) elements; {id or 'this one'} is a single number")

    def __len__(self) -> int:
        return len(self.array)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of an element."""
        return tuple(self.array.shape[1:])

    @property
    def dtype(self) -> torch.dtype:
        """The type of its numbers."""
        return self.array.dtype

    def read(self, start: int, stop: int) -> Tensor:
        """A view."""
        return self.array[start:stop]

    def take(self, index: Tensor) -> Tensor:
        """The elements at any positions."""
        return self.array[index]
