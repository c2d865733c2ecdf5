"""Parquet and Arrow files as batches of rows: what is decoded at a time is some megabytes, however large a row group is.

TableFile(path).batches(group, columns)          record batches of one row group, in order
row_ids(batch)                                   the set of each row, as codes
row_features(batch)                              (n, D), in the memory that the decoder wrote
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack

from setstream.data.files import need
from setstream.errors import DataError

ARROW = (".arrow", ".feather")
SUFFIXES = (".parquet", ".pq", *ARROW)
# Bytes of decoded rows in a batch: large enough that a batch holds many rows of each of some hundred sets.
BATCH_BYTES = 2**23
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
    """The set of each of n rows: its name is names[codes[row]]. Each name once, and no text for each row."""

    names: list[str]
    codes: np.ndarray

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
    def all(name: str, rows: int) -> Ids:
        """All rows are of one set."""
        return Ids([name], np.zeros(rows, np.int64))


class TableFile:
    """One Parquet or Arrow file: its columns, and its row groups (or record batches) some rows at a time."""

    def __init__(self, path: Path, dictionaries: list[str] | None = None) -> None:
        self.path, self.arrow = path, path.suffix in ARROW
        library = need("pyarrow")
        try:
            if self.arrow:
                self.file = need("pyarrow.ipc").open_file(library.memory_map(str(path)))
            else:
                self.file = need("pyarrow.parquet").ParquetFile(
                    path, read_dictionary=dictionaries, buffer_size=FILE_BUFFER, pre_buffer=False
                )
        except (library.ArrowException, OSError) as error:
            raise DataError(f"{path}: cannot be read, it may be cut off or of another kind: {error}") from error
        except KeyError as error:
            raise DataError(f"{path}: has no column {', '.join(dictionaries or [])}, unlike the files before it") from error

    def __len__(self) -> int:
        return int(self.file.num_record_batches if self.arrow else self.file.num_row_groups)

    def columns(self) -> tuple[list[str], list[str]]:
        """The names of all columns, and of those with numbers."""
        types = need("pyarrow").types
        schema = self.file.schema if self.arrow else self.file.schema_arrow
        numeric = [f.name for f in schema if types.is_floating(f.type) or types.is_integer(f.type)]
        return list(schema.names), numeric

    def rows(self, group: int) -> int:
        """How many rows a row group has."""
        return int(self.file.get_batch(group).num_rows if self.arrow else self.file.metadata.row_group(group).num_rows)

    def nothing(self, columns: list[str]) -> Any:
        """A batch without rows."""
        schema = self.file.schema if self.arrow else self.file.schema_arrow
        library = need("pyarrow")
        return library.RecordBatch.from_arrays([library.array([], schema.field(name).type) for name in columns], columns)

    def batches(self, group: int, columns: list[str]) -> Iterator[Any]:
        """The rows of one row group, as record batches of some megabytes."""
        library = need("pyarrow")
        try:
            if self.arrow:
                whole = self.file.get_batch(group).select(columns)
                rows = _rows_of_a_batch(whole.nbytes, whole.num_rows)
                yield from (whole.slice(start, rows) for start in range(0, whole.num_rows, rows))
            else:
                rows = self._rows_of_a_batch(group, set(columns))
                yield from self.file.iter_batches(rows, row_groups=[group], columns=columns, use_threads=False)
        except (library.ArrowException, OSError, KeyError, ValueError) as error:
            raise DataError(f"{self.path}, row group {group}: cannot be read: {error}") from error

    def _rows_of_a_batch(self, group: int, columns: set[str]) -> int:
        """From the number of values, as the size of encoded columns says little."""
        facts = self.file.metadata.row_group(group)
        leaves = [facts.column(number) for number in range(facts.num_columns)]
        values = sum(leaf.num_values for leaf in leaves if leaf.path_in_schema.split(".")[0] in columns)
        return _rows_of_a_batch(4 * values, facts.num_rows)


def _rows_of_a_batch(size: int, rows: int) -> int:
    return max(1024, BATCH_BYTES * rows // max(1, size))


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
