"""Tables as record batches of Arrow: some megabytes are decoded at a time, for row groups of any size.

table.batches(group, columns)       record batches of one row group, in order
row_ids(batch, column)              the set of each row, as codes
row_features(batch, columns)        (n, D), without a copy
row_times(batch, column)            the time of each row, in seconds
pieces(batches, rows, size)         some rows of a row group, a piece at a time; `Kept` holds those that were decoded last

A row group can only be read from its beginning. Its readers are kept: reading a set in order decodes every row once.
"""

import threading
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack

from setstream._utils.optional import need
from setstream.data.collection import Ids
from setstream.data.formats.file import reading
from setstream.errors import DataError

BATCH_BYTES = 2**23  # bytes of decoded rows in a batch: large enough that a batch holds many rows of each of some hundred sets
FEWEST_ROWS = 1024
KEPT_BYTES, TENSOR_BYTES = 2**27, 1024  # of decoded rows, kept for all sets of a table; of a tensor, beside its elements
OPEN_READERS = 4  # row groups that are open at a time, so that reading can continue
Rows = range | np.ndarray  # some rows of a row group: a range, or any positions in order


class TableFile(ABC):
    """One file of a table: its columns, and its row groups some rows at a time. `dictionaries`: columns of text read so."""

    suffixes: ClassVar[tuple[str, ...]]  #: the endings of such files
    mapped: ClassVar[bool] = False  #: whether decoded rows are in a memory map, which is read-only

    def __init__(self, path: Path, dictionaries: list[str] | None = None) -> None:
        self.path = path
        with reading(path):
            self.file, self.schema, self.groups = self.open(dictionaries or [])
            self.names: list[str] = list(self.schema.names)

    @abstractmethod
    def open(self, dictionaries: list[str]) -> tuple[Any, Any, int]:
        """The opened file, its Arrow schema, and how many row groups it has."""

    @abstractmethod
    def rows(self, group: int) -> int:
        """How many rows a row group has."""

    @abstractmethod
    def _batches(self, group: int, columns: list[str]) -> Iterator[Any]: ...

    def batches(self, group: int, columns: list[str]) -> Iterator[Any]:
        """The rows of one row group, as record batches of some megabytes; one without rows where there are none."""
        batch: Any = None
        with reading(f"{self.path}, row group {group}"):
            for batch in self._batches(group, columns) if group < self.groups else ():
                yield batch
            if batch is None:
                yield need("pyarrow").RecordBatch.from_pylist([], self.schema).select(columns)


def batch_rows(size: int, rows: int) -> int:
    """How many rows make a batch, from the bytes that some rows take."""
    return max(FEWEST_ROWS, BATCH_BYTES * rows // max(1, size))


def row_ids(batch: Any, column: str, place: str) -> Ids:
    """The set of each row; only sets that have rows here."""
    texts = batch.column(column)
    if texts.null_count:
        raise DataError(f"{place}: {texts.null_count} rows have no {column!r}")
    library = need("pyarrow")
    encoded = texts if library.types.is_dictionary(texts.type) else texts.dictionary_encode()
    names = encoded.dictionary.cast(library.string()).to_pylist()
    codes = encoded.indices.to_numpy(zero_copy_only=False)
    if len(names) == 1:
        return Ids.all(names[0], len(codes), place)
    if len(set(names)) < len(names) or np.bincount(codes, minlength=len(names)).min(initial=1) == 0:
        decoded = library.RecordBatch.from_arrays([texts.dictionary_decode()], [column])
        return row_ids(decoded, column, place)  # a dictionary may hold more than the batch uses, or a name twice
    return Ids(names, codes.astype(np.int64), place)


def row_features(batch: Any, columns: list[str], place: str) -> Tensor:
    """The features (n, D). One list column is not copied: the tensor is the memory that it was decoded into."""
    parts = [_numbers(batch.column(name), name, place) for name in columns]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)


def row_times(batch: Any, column: str, place: str) -> Tensor:
    """The time of each row (n,), in seconds since 1970: float64, or integers."""
    library, times = need("pyarrow"), batch.column(column)
    if library.types.is_temporal(times.type):
        times = times.cast(library.timestamp("us", getattr(times.type, "tz", None))).cast(library.int64())
        return _numbers(times, column, place).flatten().double() / 1e6
    numbers = _numbers(times, column, place).flatten()
    if not bool(torch.isfinite(numbers).all()):
        raise DataError(f"{place}: {column!r} holds NaN or infinity; times are finite")
    return numbers


def _numbers(column: Any, name: str, place: str) -> Tensor:
    types = need("pyarrow").types
    if column.null_count:
        raise DataError(f"{place}: {column.null_count} rows of {name!r} are empty")
    rows, of_any_length = len(column), types.is_list(column.type) or types.is_large_list(column.type)
    sizes = np.diff(column.offsets.to_numpy()) if of_any_length and rows else np.ones(1)
    if sizes.min() != sizes.max():
        raise DataError(f"{place}: rows of {name!r} have different lengths, {sizes.min()} to {sizes.max()}")
    flat = column.flatten() if of_any_length or types.is_fixed_size_list(column.type) else column
    if flat.null_count:
        raise DataError(f"{place}: {flat.null_count} numbers in {name!r} are missing")
    if not (types.is_floating(flat.type) or types.is_integer(flat.type)):
        raise DataError(f"{place}: {name!r} holds {flat.type}; features are numbers")
    values = from_dlpack(flat)
    return values.view(rows, -1) if rows else values.view(0, getattr(column.type, "list_size", 1))


class Group(NamedTuple):
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
                if (*key, position) not in self.pieces:
                    self.pieces[*key, position] = piece
                    self.bytes += piece.nbytes + TENSOR_BYTES
                while self.bytes > KEPT_BYTES:
                    self.bytes -= self.pieces.popitem(last=False)[1].nbytes + TENSOR_BYTES
            if number + 1 < count:
                self.readers[key] = number + 1, reader
                while len(self.readers) > OPEN_READERS:
                    self.readers.popitem(last=False)
            return piece
