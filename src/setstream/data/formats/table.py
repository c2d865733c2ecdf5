"""Tables as record batches of Arrow: some megabytes are decoded at a time, for row groups of any size.

table.batches(group, columns)       record batches of one row group, in order
row_ids(batch, column)              the set of each row, as codes
row_features(batch, columns)        (n, D), without a copy
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack

from setstream._utils.optional import need
from setstream.data.collection import Ids
from setstream.data.formats.file import reading
from setstream.errors import DataError

# Bytes of decoded rows in a batch: large enough that a batch holds many rows of each of some hundred sets.
BATCH_BYTES = 2**23
FEWEST_ROWS = 1024


class TableFile(ABC):
    """One file of a table: its columns, and its row groups some rows at a time. `dictionaries`: columns of text read so."""

    #: The endings of such files.
    suffixes: ClassVar[tuple[str, ...]]
    #: Whether decoded rows are in a memory map, which is read-only.
    mapped: ClassVar[bool] = False

    def __init__(self, path: Path, dictionaries: list[str] | None = None) -> None:
        self.path = path
        with reading(path):
            self.file, self.schema = self.open(dictionaries or [])
            self.names: list[str] = list(self.schema.names)

    @abstractmethod
    def open(self, dictionaries: list[str]) -> tuple[Any, Any]:
        """The opened file and its Arrow schema."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def rows(self, group: int) -> int:
        """How many rows a row group has."""

    @abstractmethod
    def _batches(self, group: int, columns: list[str]) -> Iterator[Any]: ...

    def batches(self, group: int, columns: list[str]) -> Iterator[Any]:
        """The rows of one row group, as record batches of some megabytes; one without rows where there are none."""
        batch: Any = None
        with reading(f"{self.path}, row group {group}"):
            for batch in self._batches(group, columns) if group < len(self) else ():
                yield batch
            if batch is None:
                arrow = need("pyarrow")
                empty = [arrow.array([], self.schema.field(name).type) for name in columns]
                yield arrow.RecordBatch.from_arrays(empty, columns)


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
        used, codes = np.unique(codes, return_inverse=True)  # a dictionary may hold more than the batch uses, or a name twice
        numbers: dict[str, int] = {}
        merged = np.array([numbers.setdefault(names[code], len(numbers)) for code in used], np.int64)
        return Ids(list(numbers), merged[codes], place)
    return Ids(names, codes.astype(np.int64), place)


def row_features(batch: Any, columns: list[str], place: str) -> Tensor:
    """The features (n, D). One list column is not copied: the tensor is the memory that it was decoded into."""
    parts = [_numbers(batch.column(name), name, place) for name in columns]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)


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
