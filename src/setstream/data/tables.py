"""Parquet and Arrow files as batches of rows: what is decoded at a time is some megabytes, however large a row group is.

TableFile(path).batches(group, columns)          record batches of one row group, in order
row_ids(batch)                                   the set of each row, as codes
row_features(batch)                              (n, D), in the memory that the decoder wrote
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack

from setstream._utils.optional import need
from setstream.data.arrow_ipc import check_file
from setstream.data.files import reading
from setstream.errors import DataError

ARROW = (".arrow", ".feather")
SUFFIXES = (".parquet", ".pq", *ARROW)
# Bytes of decoded rows in a batch: large enough that a batch holds many rows of each of some hundred sets.
BATCH_BYTES = 2**23
FEWEST_ROWS = 1024
# Parquet pages are read through a buffer of this size; a memory map would count as the process's memory, page by page.
FILE_BUFFER = 2**20


@dataclass(frozen=True)
class Order:
    """Rows set by set: the sets, how many rows of each, and which (None: one after another, as they are)."""

    names: list[str]
    lengths: list[int]
    rows: np.ndarray | None


@dataclass(frozen=True)
class Ids:
    """The set of each of n rows: its name is names[codes[row]]. Each name once, and no text for each row.

    place: where the rows lie, for errors.
    """

    names: list[str]
    codes: np.ndarray
    place: str = ""

    def __len__(self) -> int:
        return len(self.codes)

    @staticmethod
    def of(texts: list[str]) -> Ids:
        """From one text a row."""
        names, codes = np.unique(np.asarray(texts), return_inverse=True)
        return Ids([str(name) for name in names], codes)

    def order(self) -> Order:
        """Set by set: no reordering where the rows of each set lie together, else one stable sort."""
        if len(self.names) == 1:
            return Order(self.names, [len(self)], None)
        changes = np.flatnonzero(self.codes[1:] != self.codes[:-1]) + 1
        if len(changes) + 1 == len(self.names):
            bounds = np.array([0, *changes, len(self)])
            return Order([self.names[code] for code in self.codes[bounds[:-1]]], np.diff(bounds).tolist(), None)
        lengths = np.bincount(self.codes, minlength=len(self.names)).tolist()
        # numpy sorts numbers of two bytes by counting.
        codes = self.codes.astype(np.uint16) if len(self.names) <= 2**16 else self.codes
        return Order(self.names, lengths, np.argsort(codes, kind="stable"))

    @staticmethod
    def all(name: str, rows: int, place: str = "") -> Ids:
        """All rows are of one set."""
        return Ids([name], np.zeros(rows, np.int64), place)


class TableFile:
    """One Parquet or Arrow file: its columns, and its row groups (or record batches) some rows at a time."""

    def __init__(self, path: Path, dictionaries: list[str] | None = None) -> None:
        self.path, self.arrow = path, path.suffix in ARROW
        with reading(path):
            if self.arrow:
                mapped = need("pyarrow").memory_map(str(path))
                _check_once(path, mapped)
                self.file = need("pyarrow.ipc").open_file(mapped)
                self.schema = self.file.schema
            else:
                self.file = _parquet_file(path, dictionaries)
                self.schema = self.file.schema_arrow
            self.names: list[str] = list(self.schema.names)

    def __len__(self) -> int:
        return int(self.file.num_record_batches if self.arrow else self.file.num_row_groups)

    def numeric(self) -> list[str]:
        """The names of the columns with numbers."""
        types = need("pyarrow").types
        return [field.name for field in self.schema if types.is_floating(field.type) or types.is_integer(field.type)]

    def rows(self, group: int) -> int:
        """How many rows a row group has."""
        with reading(f"{self.path}, row group {group}"):
            return int(self.file.get_batch(group).num_rows if self.arrow else self.file.metadata.row_group(group).num_rows)

    def nothing(self, columns: list[str]) -> Any:
        """A batch without rows."""
        library = need("pyarrow")
        with reading(self.path):
            empty = [library.array([], self.schema.field(name).type) for name in columns]
            return library.RecordBatch.from_arrays(empty, columns)

    def batches(self, group: int, columns: list[str]) -> Iterator[Any]:
        """The rows of one row group, as record batches of some megabytes."""
        with reading(f"{self.path}, row group {group}"):
            if self.arrow:
                whole = self.file.get_batch(group).select(columns)
                whole.validate(full=True)  # an offset that leads outside would be followed
                rows = _rows_of_a_batch(whole.nbytes, whole.num_rows)
                yield from (whole.slice(start, rows) for start in range(0, whole.num_rows, rows))
            else:
                read = partial(self.file.iter_batches, row_groups=[group], columns=columns, use_threads=False)
                sizes = [_row_bytes(self.schema.field(name).type) for name in columns]
                if None in sizes:  # lists of any length: as long as those of the first rows
                    first = next(read(FEWEST_ROWS), None)
                    sizes = [first.nbytes // first.num_rows if first else 1]
                yield from read(_rows_of_a_batch(sum(filter(None, sizes)), 1))


def _parquet_file(path: Path, dictionaries: list[str] | None) -> Any:
    try:
        return need("pyarrow.parquet").ParquetFile(
            path, read_dictionary=dictionaries, buffer_size=FILE_BUFFER, pre_buffer=False
        )
    except KeyError as error:
        raise DataError(f"{path}: has no column {', '.join(dictionaries or [])}, unlike the files before it") from error


# Arrow files that were found intact, as they were then.
_intact: dict[Path, tuple[int, int]] = {}


def _check_once(path: Path, mapped: Any) -> None:
    """Check the framing of an Arrow file, unless that was done and the file is the same."""
    facts = path.stat()
    if _intact.get(path) != (facts.st_size, facts.st_mtime_ns):
        check_file(mapped.read_buffer(), str(path))
        _intact[path] = (facts.st_size, facts.st_mtime_ns)


def _row_bytes(kind: Any) -> int | None:
    """The bytes of a row of a column of this type, if all have the same; a text counts as its code."""
    types = need("pyarrow").types
    if types.is_list(kind) or types.is_large_list(kind):
        return None
    value, count = (kind.value_type, kind.list_size) if types.is_fixed_size_list(kind) else (kind, 1)
    return int(count * value.bit_width // 8) if types.is_primitive(value) else 4 * count


def _rows_of_a_batch(size: int, rows: int) -> int:
    """As many rows as make a batch, from the bytes that some take."""
    return max(FEWEST_ROWS, BATCH_BYTES * rows // max(1, size))


def row_ids(batch: Any, column: str, place: str) -> Ids:
    """The set of each row; only sets that have rows here."""
    found = batch.column(column)
    if found.null_count:
        raise DataError(f"{place}: {found.null_count} rows have no {column!r}")
    library = need("pyarrow")
    encoded = found if library.types.is_dictionary(found.type) else found.dictionary_encode()
    names = encoded.dictionary.cast(library.string()).to_pylist()
    codes = encoded.indices.to_numpy(zero_copy_only=False)
    if len(names) == 1:
        return Ids.all(names[0], len(codes))
    if len(set(names)) < len(names) or np.bincount(codes, minlength=len(names)).min(initial=1) == 0:
        used, codes = np.unique(codes, return_inverse=True)  # a dictionary may hold more than the batch uses
        return _without_doubles([names[code] for code in used], codes)
    return Ids(names, codes.astype(np.int64))


def _without_doubles(names: list[str], codes: np.ndarray) -> Ids:
    numbers: dict[str, int] = {}
    again = np.array([numbers.setdefault(name, len(numbers)) for name in names], np.int64)
    return Ids(list(numbers), again[codes])


def row_features(batch: Any, columns: list[str], place: str) -> Tensor:
    """The features (n, D). One list column is not copied: the tensor is the memory that it was decoded into."""
    parts = [_numbers(batch.column(name), name, place) for name in columns]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)


def _numbers(column: Any, name: str, place: str) -> Tensor:
    types = need("pyarrow").types
    if column.null_count:
        raise DataError(f"{place}: {column.null_count} rows of {name!r} are empty")
    rows, flat = len(column), column
    if types.is_fixed_size_list(column.type):
        flat = column.flatten()
    elif types.is_list(column.type) or types.is_large_list(column.type):
        sizes = np.diff(column.offsets.to_numpy())
        if len(sizes) and sizes.min() != sizes.max():
            raise DataError(f"{place}: rows of {name!r} have different lengths, {sizes.min()} to {sizes.max()}")
        flat = column.flatten()
    if flat.null_count:
        raise DataError(f"{place}: {flat.null_count} numbers in {name!r} are missing")
    if not (types.is_floating(flat.type) or types.is_integer(flat.type)):
        raise DataError(f"{place}: {name!r} holds {flat.type}; features are numbers")
    values = from_dlpack(flat)
    return values.view(rows, -1) if rows else values.view(0, getattr(column.type, "list_size", 1))
