"""One set of a table, and the rows of it that were decoded last.

A row group can only be read from its beginning. Its readers are kept: reading a set in order decodes every row once.
"""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from setstream.sets.source import SetSource

if TYPE_CHECKING:
    from setstream.data.table_sets import ParquetSets

# Bytes of decoded rows that are kept for all sets of a table together, and of one piece of a set.
KEPT_BYTES, PIECE_BYTES = 2**27, 2**22
# Row groups that are open at a time, so that reading can continue.
OPEN_READERS = 4
# Some rows of a row group: a range, or any positions.
Rows = range | np.ndarray


@dataclass(frozen=True)
class Group:
    """One row group (or record batch) of one file, and how many rows it has."""

    file: Path
    number: int
    rows: int

    @property
    def place(self) -> str:
        return f"{self.file}, row group {self.number}"


class Kept:
    """Recently decoded rows of all sets of a table: at most KEPT_BYTES, the least recently used are dropped first."""

    def __init__(self) -> None:
        self.process = os.getpid()
        self._lock = threading.Lock()
        self._pieces: OrderedDict[tuple[str, int, int], Tensor] = OrderedDict()
        self._readers: OrderedDict[tuple[str, int], tuple[int, Iterator[Tensor]]] = OrderedDict()
        self._bytes = 0

    def piece(self, key: tuple[str, int], number: int, pieces: Callable[[], Iterator[Tensor]], count: int) -> Tensor:
        """Piece `number` of the `count` pieces that `pieces` gives, for a set and one of its row groups."""
        with self._lock:
            if (*key, number) in self._pieces:
                self._pieces.move_to_end((*key, number))
                return self._pieces[*key, number]
            following, reader = self._readers.pop(key, (0, None))
            if reader is None or following > number:
                following, reader = 0, pieces()
            for position in range(following, number + 1):
                piece = next(reader)
                self._bytes += _cost(piece) - _cost(self._pieces.pop((*key, position), None))
                self._pieces[*key, position] = piece
                while self._bytes > KEPT_BYTES:
                    self._bytes -= _cost(self._pieces.popitem(last=False)[1])
            if number + 1 < count:
                self._readers[key] = number + 1, reader
                while len(self._readers) > OPEN_READERS:
                    self._readers.popitem(last=False)
            return piece


def _cost(piece: Tensor | None) -> int:
    return 0 if piece is None else piece.nbytes + 1024  # the tensor itself


class ParquetSource(SetSource):
    """One set of `ParquetSets`: its rows in the order of the files. The table caches decoded rows for all of its sets."""

    def __init__(self, sets: ParquetSets, id: str, label: Any = None) -> None:
        super().__init__(id, label)
        self.sets = sets
        self.places = sets.index()[id]
        self.ends = np.cumsum([len(rows) for _, rows in self.places])

    def __len__(self) -> int:
        return int(self.ends[-1])

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.sets.element().shape[1:])

    @property
    def dtype(self) -> torch.dtype:
        return self.sets.element().dtype

    def read(self, start: int, stop: int) -> Tensor:
        element = self.sets.element()
        size = max(1, PIECE_BYTES // max(1, element.shape[1:].numel() * element.dtype.itemsize))
        parts = [element]
        for place in range(int(np.searchsorted(self.ends, start, side="right")), len(self.places)):
            group, rows = self.places[place]
            begin = int(self.ends[place]) - len(rows)
            if begin >= stop:
                break
            low, high, count = max(0, start - begin), stop - begin, -(-len(rows) // size)
            for number in range(low // size, min(count, -(-high // size))):
                piece = self.sets.kept.piece((self.id, place), number, partial(self.sets.pieces, group, rows, size), count)
                parts.append(piece[max(0, low - number * size) : high - number * size])
        return parts[1] if len(parts) == 2 else torch.cat(parts)
