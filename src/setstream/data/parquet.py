"""Sets in Parquet or Arrow files: one row an element, a column that says which set it belongs to.

    set_id   features: fixed_size_list<float>[D]          or numeric columns f0, f1, ...
    "a"      [0.1, ...]
    "b"      [0.7, ...]            the rows of a set may lie anywhere, in any row group of any file

`ParquetSets.stream()` reads every row group once, in the order of the files, and hands out (set ids, features): what bulk
encoding needs, as states of scattered pieces add up. `ParquetSets.source(id)` serves one set, from an index of its rows.
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

from setstream.data.ahead import read_ahead
from setstream.data.files import need
from setstream.data.source import SetSource
from setstream.errors import DataError

SET_COLUMNS = ("set_id", "set", "bag_id", "bag", "slide_id", "id")
FEATURE_COLUMNS = ("features", "feature", "embedding", "x")
# Numbers that are rarely meant to be features.
NO_FEATURES = ("label", "labels", "target", "class", "y", "time", "timestamp", "date", "index", "row")
SUFFIXES = (".parquet", ".pq", ".arrow", ".feather")


@dataclass(frozen=True)
class Group:
    """One row group (or record batch) of one file."""

    file: Path
    number: int


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


def is_table(path: Path) -> bool:
    """Whether a path is a Parquet or Arrow file, or a folder of such."""
    return path.suffix in SUFFIXES or (path.is_dir() and any(file.suffix in SUFFIXES for file in path.iterdir()))


def parquet_files(path: Path) -> list[Path]:
    """The file itself, or all Parquet and Arrow files in and below a folder, in the order of their names."""
    if path.is_file():
        return [path]
    return sorted(file for file in path.rglob("*") if file.suffix in SUFFIXES)


class ParquetSets:
    """Many sets in Parquet or Arrow files.

    set_column, columns: the column of set ids and those of features; found by their usual names unless given.
    """

    def __init__(self, path: str | Path, set_column: str | None = None, columns: list[str] | None = None) -> None:
        self.path = Path(path)
        self.files = parquet_files(self.path)
        if not self.files:
            raise DataError(f"{self.path}: no Parquet or Arrow file is there")
        names, numeric = self._schema(self.files[0])
        self.set_column = set_column or next((name for name in SET_COLUMNS if name in names), None) or ""
        if self.set_column not in names:
            raise DataError(
                f"{self.files[0]}: has no column of set ids ({set_column or ', '.join(SET_COLUMNS)}); its columns are {names}"
            )
        listed = next((name for name in FEATURE_COLUMNS if name in names), None)
        plain = [name for name in numeric if name != self.set_column]
        doubtful = [name for name in plain if name.lower() in NO_FEATURES]
        if columns is None and listed is None and doubtful:
            raise DataError(
                f"{self.files[0]}: {doubtful} may be labels or times rather than features: name the feature columns "
                f"(columns=[...], --columns); its columns are {names}"
            )
        self.columns = columns or ([listed] if listed else plain)
        missing = [name for name in self.columns if name not in names]
        if missing or not self.columns:
            raise DataError(f"{self.files[0]}: has no feature columns {missing or FEATURE_COLUMNS}; its columns are {names}")
        self._index: dict[str, list[tuple[Group, np.ndarray]]] | None = None

    # -- all sets at once ---------------------------------------------------------------------------------------------

    def groups(self) -> list[Group]:
        """All row groups of all files, in order."""
        return [Group(file, number) for file in self.files for number in range(self._group_count(file))]

    def stream(self, ahead: int = 1, groups: list[Group] | None = None) -> Iterator[tuple[Ids, Tensor]]:
        """Every row (of some row groups) once: its set's id and the features (n, D), a row group at a time."""
        chosen = self.groups() if groups is None else groups
        return read_ahead((partial(self.read, group) for group in chosen), ahead)

    def read(self, group: Group) -> tuple[Ids, Tensor]:
        """One row group."""
        table = self._table(group, [self.set_column, *self.columns])
        return self._ids(table, group), self._features(table, group)

    # -- one set ------------------------------------------------------------------------------------------------------

    def index(self) -> dict[str, list[tuple[Group, np.ndarray]]]:
        """Where the rows of every set are; reads the column of set ids once."""
        if self._index is None:
            found: dict[str, list[tuple[Group, np.ndarray]]] = {}
            for group in self.groups():
                ids = self._ids(self._table(group, [self.set_column]), group)
                order = np.argsort(ids.codes, kind="stable")
                bounds = np.searchsorted(ids.codes[order], np.arange(len(ids.names) + 1))
                for number, name in enumerate(ids.names):
                    found.setdefault(name, []).append((group, order[bounds[number] : bounds[number + 1]]))
            self._index = found
        return self._index

    def ids(self) -> list[str]:
        """The ids of all sets, in the order in which they first appear."""
        return list(self.index())

    def source(self, id: str, label: Any = None) -> ParquetSource:
        """One set."""
        if id not in self.index():
            raise DataError(f"{self.path}: has no set {id!r}")
        return ParquetSource(self, id, label)

    # -- helpers ------------------------------------------------------------------------------------------------------

    def _open(self, file: Path) -> Any:
        arrow = need("pyarrow")
        try:
            if file.suffix in (".arrow", ".feather"):
                return need("pyarrow.ipc").open_file(arrow.memory_map(str(file)))
            return need("pyarrow.parquet").ParquetFile(file, memory_map=True)
        except (arrow.ArrowException, OSError) as error:
            raise DataError(f"{file}: cannot be read, it may be cut off or of another kind: {error}") from error

    def _schema(self, file: Path) -> tuple[list[str], list[str]]:
        types = need("pyarrow").types
        opened = self._open(file)
        schema = opened.schema if file.suffix in (".arrow", ".feather") else opened.schema_arrow
        numeric = [f.name for f in schema if types.is_floating(f.type) or types.is_integer(f.type)]
        return list(schema.names), numeric

    def _group_count(self, file: Path) -> int:
        opened = self._open(file)
        return int(opened.num_record_batches if file.suffix in (".arrow", ".feather") else opened.num_row_groups)

    def _table(self, group: Group, columns: list[str]) -> Any:
        arrow = need("pyarrow")
        opened = self._open(group.file)
        try:
            if group.file.suffix in (".arrow", ".feather"):
                return arrow.Table.from_batches([opened.get_batch(group.number)]).select(columns)
            return opened.read_row_group(group.number, columns=columns, use_threads=False)
        except (arrow.ArrowException, OSError, KeyError, ValueError) as error:
            raise DataError(f"{group.file}, row group {group.number}: cannot be read: {error}") from error

    def _ids(self, table: Any, group: Group) -> Ids:
        column = table.column(self.set_column)
        if column.null_count:
            raise DataError(f"{group.file}, row group {group.number}: {column.null_count} rows have no {self.set_column!r}")
        encoded = column.combine_chunks().dictionary_encode()
        names = encoded.dictionary.cast(need("pyarrow").string()).to_pylist()
        return Ids(names, encoded.indices.to_numpy(zero_copy_only=False).astype(np.int64))

    def _features(self, table: Any, group: Group) -> Tensor:
        types = need("pyarrow").types
        arrays = []
        for name in self.columns:
            column = table.column(name).combine_chunks()
            if column.null_count:
                raise DataError(f"{group.file}, row group {group.number}: {column.null_count} rows of {name!r} are empty")
            if types.is_fixed_size_list(column.type):
                width = column.type.list_size
                arrays.append(column.flatten().to_numpy(zero_copy_only=False).reshape(len(column), width))
            elif types.is_list(column.type) or types.is_large_list(column.type):
                flat, sizes = column.flatten().to_numpy(zero_copy_only=False), np.diff(column.offsets.to_numpy())
                if len(set(sizes.tolist())) > 1:
                    raise DataError(f"{group.file}: rows of {name!r} have different lengths, {sizes.min()} to {sizes.max()}")
                arrays.append(flat.reshape(len(column), -1))
            else:
                arrays.append(column.to_numpy(zero_copy_only=False).reshape(-1, 1))
        joined = arrays[0] if len(arrays) == 1 else np.concatenate(arrays, axis=1)
        return torch.from_numpy(joined if joined.flags.writeable else joined.copy())


class ParquetSource(SetSource):
    """One set of `ParquetSets`: its rows in the order of the files. Keeps the row group that was read last."""

    def __init__(self, sets: ParquetSets, id: str, label: Any = None) -> None:
        super().__init__(id, label)
        self.sets = sets
        self.places = sets.index()[id]
        self.ends = np.cumsum([len(rows) for _, rows in self.places])
        self._kept: tuple[int, Tensor] | None = None

    def __len__(self) -> int:
        return int(self.ends[-1]) if len(self.ends) else 0

    def _rows(self, place: int) -> Tensor:
        if self._kept is None or self._kept[0] != place:
            group, rows = self.places[place]
            table = self.sets._table(group, self.sets.columns)
            self._kept = place, self.sets._features(table, group)[torch.from_numpy(rows)]
        return self._kept[1]

    @property
    def shape(self) -> tuple[int, ...]:
        """(D,)."""
        return tuple(self._rows(0).shape[1:])

    @property
    def dtype(self) -> torch.dtype:
        """As the file has it."""
        return self._rows(0).dtype

    def read(self, start: int, stop: int) -> Tensor:
        """A range of the set's rows, from as many row groups as it touches."""
        first = int(np.searchsorted(self.ends, start, side="right"))
        pieces = []
        for place in range(first, len(self.places)):
            begin = int(self.ends[place - 1]) if place else 0
            if begin >= stop:
                break
            pieces.append(self._rows(place)[max(0, start - begin) : stop - begin])
        return torch.cat(pieces) if pieces else self._rows(0)[:0]

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_kept": None}
