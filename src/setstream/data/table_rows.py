"""Rows of a table's sets, and those that were decoded last.

A row group can only be read from its beginning. Its readers are kept: reading a set in order decodes every row once.
"""

import threading
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from setstream.errors import DataError

# Bytes of decoded rows that are kept for all sets of a table together.
KEPT_BYTES = 2**27
# Row groups that are open at a time, so that reading can continue.
OPEN_READERS = 4
# Some rows of a row group: a range, or any positions in order.
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


def pieces(batches: Iterable[Tensor], rows: Rows, size: int, place: str) -> Iterator[Tensor]:
    """Some rows of a row group's batches, `size` at a time; memory is that of a piece and of one batch."""
    start = count = 0
    waiting: list[Tensor] = []
    for features in batches:
        stop = start + len(features)
        if isinstance(rows, range):
            wanted = features[max(0, rows.start - start) : max(0, rows.stop - start)]
        else:
            low, high = np.searchsorted(rows, (start, stop))
            wanted = features[torch.from_numpy(rows[low:high] - start)]
        while len(wanted):
            waiting.append(wanted[: size - count])
            count, wanted = count + len(waiting[-1]), wanted[size - count :]
            if count == size:
                yield torch.cat(waiting)
                waiting, count = [], 0
        if rows[-1] < stop:
            break
        start = stop
    else:
        raise DataError(f"{place}: has fewer rows than the file says")
    if waiting:
        yield torch.cat(waiting)


class Kept:
    """Recently decoded rows of all sets of a table: at most KEPT_BYTES, the least recently used are dropped first."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.pieces: OrderedDict[tuple[str, int, int], Tensor] = OrderedDict()
        self.readers: OrderedDict[tuple[str, int], tuple[int, Iterator[Tensor]]] = OrderedDict()
        self.bytes = 0

    def piece(self, key: tuple[str, int], number: int, count: int, pieces: Iterator[Tensor]) -> Tensor:
        """Piece `number` of `count`, for a set and one of its row groups; `pieces` starts from the first, if that is needed."""
        with self._lock:
            if (*key, number) in self.pieces:
                self.pieces.move_to_end((*key, number))
                return self.pieces[*key, number]
            following, reader = self.readers.pop(key, (0, None))
            if reader is None or following > number:
                following, reader = 0, pieces
            for position in range(following, number + 1):
                piece = next(reader)
                self.bytes += _cost(piece) - _cost(self.pieces.pop((*key, position), None))
                self.pieces[*key, position] = piece
                while self.bytes > KEPT_BYTES:
                    self.bytes -= _cost(self.pieces.popitem(last=False)[1])
            if number + 1 < count:
                self.readers[key] = number + 1, reader
                while len(self.readers) > OPEN_READERS:
                    self.readers.popitem(last=False)
            return piece


def _cost(piece: Tensor | None) -> int:
    return 0 if piece is None else piece.nbytes + 1024  # the tensor itself
