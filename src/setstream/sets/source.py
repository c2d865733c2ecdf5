"""SetSource: one set, in memory or in a file, read in pieces::

    len(source), source.shape, source.dtype          how many elements, of what shape and type
    source.read(start, stop)                         a contiguous range
    source.take(index)                               elements at any positions
    source.chunks(chunk_size, partition)             all elements, in a partition of your choice, read ahead

Partitions, any of which is valid for a consistent encoder::

    contiguous   the order of the file
    blocks       contiguous blocks in random order, which disks read fast
    random       fully random, element by element
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Generator, Tensor

from setstream._utils.prefetch import read_ahead
from setstream.errors import ConfigurationError, ShapeError
from setstream.sets.layout import from_array

PARTITIONS = ("contiguous", "blocks", "random")
READ_BYTES = 2**22  # adjacent chunks are read together, up to this many bytes
Metadata = dict[str, Any] | None


class SetSource(ABC):
    """One set of elements that need not be in memory. It is opened when it is first read, in the process that reads it.

    It has a name (`id`), a label and metadata, if any. Your own source implements `__len__`, `shape`, `dtype` and `read`.
    """

    id: str = ""
    label: Any = None
    #: The file or folder of the set, if any.
    path: Path | None = None
    small_gap = 32  # positions that are at most so far apart are read together

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
        """The elements at any positions, in that order. Reads ranges in the order of the file, including small gaps."""
        if not len(index):
            return self.read(0, 0)
        order = index.argsort()
        positions = index[order]
        lowest, highest = int(positions[0]), int(positions[-1])
        if lowest < 0 or highest >= len(self):
            raise ShapeError(f"{self.id or 'this set'} has {len(self)} elements; asked for {lowest} .. {highest}")
        cuts = ((positions.diff() > self.small_gap).nonzero().flatten() + 1).tolist()
        ranges = [self.read(int(near[0]), int(near[-1]) + 1)[near - near[0]] for near in positions.tensor_split(cuts)]
        return torch.cat(ranges)[order.argsort()]

    def chunks(self, chunk_size: int, partition: str = "contiguous", *, generator: Generator | None = None) -> ChunkedSource:
        """All elements in chunks, which can be iterated any number of times, in the same order each time."""
        return ChunkedSource(self, chunk_size, partition, generator)

    def tensor(self) -> Tensor:
        """All elements, in memory."""
        return self.read(0, len(self))

    def close(self) -> None:  # noqa: B027 - most sources hold nothing
        """Close the file, if one is open; reading opens it again."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.id!r}, {len(self)} x {tuple(self.shape)}, {self.dtype})"


class ChunkedSource:
    """The chunks of one source: (n, ...) tensors, read ahead of their use."""

    def __init__(self, source: SetSource, chunk_size: int, partition: str, generator: Generator | None) -> None:
        if partition not in PARTITIONS:
            raise ConfigurationError(f"unknown partition {partition!r}: choose one of {', '.join(PARTITIONS)}")
        if chunk_size < 1:
            raise ConfigurationError(f"chunk_size must be at least 1; got {chunk_size}")
        self.source, self.chunk_size = source, chunk_size
        self.in_order = partition == "contiguous"
        starts = torch.arange(0, len(source), chunk_size)
        self.starts = starts[torch.randperm(len(starts), generator=generator)] if partition == "blocks" else starts
        self.order = torch.randperm(len(source), generator=generator) if partition == "random" else None

    def __len__(self) -> int:
        return len(self.starts)

    def chunk(self, number: int) -> Tensor:
        start = int(self.starts[number])
        stop = min(start + self.chunk_size, len(self.source))
        return self.source.read(start, stop) if self.order is None else self.source.take(self.order[start:stop])

    def __iter__(self) -> Iterator[Tensor]:
        if not self.in_order:
            yield from read_ahead(partial(self.chunk, number) for number in range(len(self)))
            return
        # Passing a chunk between threads costs as much as reading a small one: read several at a time.
        size = len(self.source)
        chunk_bytes = self.chunk_size * math.prod(self.source.shape) * self.source.dtype.itemsize if size else 1
        step = self.chunk_size * max(1, READ_BYTES // max(1, chunk_bytes))
        reads = (partial(self.source.read, start, min(start + step, size)) for start in range(0, size, step))
        for block in read_ahead(reads):
            yield from block.split(self.chunk_size)


class ArraySource(SetSource):
    """A set in memory: a tensor or an array (N, ...).

    Example:
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
        return tuple(self.array.shape[1:])

    @property
    def dtype(self) -> torch.dtype:
        return self.array.dtype

    def read(self, start: int, stop: int) -> Tensor:
        return self.array[start:stop]

    def take(self, index: Tensor) -> Tensor:
        return self.array[index]


class PartSource(SetSource):
    """Part `number` of `parts` contiguous parts of nearly equal size, which together are the whole. Reads nothing else.

    Example:
        >>> source = ArraySource(torch.arange(5.0)[:, None], id="a")
        >>> [PartSource(source, number, 2).tensor().flatten().tolist() for number in (0, 1)]
        [[0.0, 1.0, 2.0], [3.0, 4.0]]
    """

    def __init__(self, source: SetSource, number: int, parts: int) -> None:
        if not 0 <= number < parts:
            raise ConfigurationError(f"there is no part {number} of {parts}: parts are counted from 0")
        super().__init__(source.id, source.label, source.metadata)
        self.source, self.number, self.parts = source, number, parts

    def _range(self) -> range:
        """As torch.tensor_split cuts: the first parts may have one element more."""
        each, more = divmod(len(self.source), self.parts)
        start = self.number * each + min(self.number, more)
        return range(start, start + each + (self.number < more))

    def __len__(self) -> int:
        return len(self._range())

    @property
    def shape(self) -> tuple[int, ...]:
        return self.source.shape

    @property
    def dtype(self) -> torch.dtype:
        return self.source.dtype

    def read(self, start: int, stop: int) -> Tensor:
        part = self._range()[start:stop]
        return self.source.read(part.start, part.stop)

    def take(self, index: Tensor) -> Tensor:
        return self.source.take(index + self._range().start)

    def close(self) -> None:
        self.source.close()
