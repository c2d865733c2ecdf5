"""Sets in Parquet or Arrow files: one row an element, a column that says which set it belongs to.

    set_id   features: fixed_size_list<float>[D]          or numeric columns f0, f1, ...
    "a"      [0.1, ...]
    "b"      [0.7, ...]            the rows of a set may lie anywhere, in any row group of any file

    set_id=a/part-0.parquet        or a folder for each set, as Hive, Spark and pyarrow's datasets write it

`ParquetSets.stream()` reads every row once, in the order of the files, and hands out (set ids, features): what bulk encoding
needs, as states of scattered pieces add up. `ParquetSets.source(id)` serves one set, from an index of its rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import numpy as np
import torch
from torch import Tensor

from setstream.data.tables import SUFFIXES, Ids, TableFile, row_features, row_ids
from setstream.errors import DataError
from setstream.sets.prefetch import iterate_ahead
from setstream.sets.source import SetSource

SET_COLUMNS = ("set_id", "set", "bag_id", "bag", "slide_id", "id")
FEATURE_COLUMNS = ("features", "feature", "embedding", "x")
# Numbers that are rarely meant to be features.
NO_FEATURES = ("label", "labels", "target", "class", "y", "time", "timestamp", "date", "index", "row")

# Some rows of a row group: in a run, or anywhere.
Rows = range | np.ndarray


@dataclass(frozen=True)
class Group:
    """One row group (or record batch) of one file, and how many rows it has."""

    file: Path
    number: int
    rows: int


def is_table(path: Path) -> bool:
    """Whether a path is a Parquet or Arrow file, or a folder of such, or of folders `column=value`."""
    if path.suffix in SUFFIXES:
        return True
    inside = list(path.iterdir()) if path.is_dir() else []
    partitions = [item for item in inside if "=" in item.name and item.is_dir()]
    return any(file.suffix in SUFFIXES for file in inside) or any(map(parquet_files, partitions))


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
        first = self.files[0]
        names, numeric = TableFile(first).columns()
        known = [*names, *self._folders(first)]
        self.set_column = set_column or next((name for name in SET_COLUMNS if name in known), None) or ""
        if self.set_column not in known:
            wanted = set_column or ", ".join(SET_COLUMNS)
            raise DataError(f"{first}: has no column of set ids ({wanted}); its columns are {known}")
        # Whether the folder of a file says which set it is of.
        self.by_folder = self.set_column not in names
        listed = next((name for name in FEATURE_COLUMNS if name in names), None)
        plain = [name for name in numeric if name != self.set_column]
        doubtful = [name for name in plain if name.lower() in NO_FEATURES]
        if columns is None and listed is None and doubtful:
            raise DataError(
                f"{first}: {doubtful} may be labels or times rather than features: name the feature columns "
                f"(columns=[...], --columns); its columns are {names}"
            )
        self.columns = columns or ([listed] if listed else plain)
        missing = [name for name in self.columns if name not in names]
        if missing or not self.columns:
            raise DataError(f"{first}: has no feature columns {missing or FEATURE_COLUMNS}; its columns are {names}")
        self._index: dict[str, list[tuple[Group, Rows]]] | None = None
        self._element: Tensor | None = None

    # -- all sets at once ---------------------------------------------------------------------------------------------

    def groups(self) -> list[Group]:
        """All row groups of all files, in order."""
        return [group for file in self.files for group in self._groups(TableFile(file))]

    def stream(self, skip: int = 0, ahead: int = 2) -> Iterator[tuple[Ids, Tensor]]:
        """Every row but the first `skip` once: its set's id and the features (n, D), some megabytes at a time.

        Rows are decoded by a thread, ahead of whoever uses them; with ahead = 0 when they are asked for.
        """
        left = self.groups()
        while left and skip and left[0].rows <= skip:
            skip -= left.pop(0).rows
        return iterate_ahead(self.read(left, skip), ahead)

    def read(self, groups: list[Group], skip: int = 0) -> Iterator[tuple[Ids, Tensor]]:
        """The rows of some row groups, without the first `skip`; not ahead."""
        column = [] if self.by_folder else [self.set_column]
        for file, together in groupby(groups, lambda group: group.file):
            table = TableFile(file, column)
            for group in together:
                for batch in self._batches(table, group.number, [*column, *self.columns]):
                    if skip and batch.num_rows <= skip:
                        skip -= batch.num_rows
                        continue
                    rest, skip = batch.slice(skip), 0
                    yield self._ids(rest, table, group.number), self._features(rest, table, group.number)

    # -- one set ------------------------------------------------------------------------------------------------------

    def index(self) -> dict[str, list[tuple[Group, Rows]]]:
        """Where the rows of every set are; reads the column of set ids once."""
        if self._index is None:
            found: dict[str, list[tuple[Group, Rows]]] = {}
            for file in self.files:
                table = TableFile(file, [] if self.by_folder else [self.set_column])
                for group in self._groups(table):
                    for name, rows in self._rows_of_sets(table, group).items():
                        found.setdefault(name, []).append((group, rows))
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

    def rows(self, group: Group, rows: Rows) -> Tensor:
        """Some rows of a row group, in their order; memory is that of the rows and of one batch."""
        pieces, start, done = [], 0, 0
        table = TableFile(group.file)
        for batch in self._batches(table, group.number, self.columns):
            features = self._features(batch, table, group.number)
            stop = start + len(features)
            if isinstance(rows, range):
                pieces.append(features[max(0, rows.start - start) : max(0, rows.stop - start)])
                if rows.stop <= stop:
                    break
            else:
                upto = int(np.searchsorted(rows, stop))
                pieces.append(features[torch.from_numpy(rows[done:upto] - start)])
                if upto == len(rows):
                    break
                done = upto
            start = stop
        return torch.cat(pieces)

    def element(self) -> Tensor:
        """Nothing, in the shape and type of elements: (0, D)."""
        if self._element is None:
            table = TableFile(self.files[0])
            self._element = self._features(next(self._batches(table, 0, self.columns)), table, 0)[:0].clone()
        return self._element

    # -- helpers ------------------------------------------------------------------------------------------------------

    def _rows_of_sets(self, table: TableFile, group: Group) -> dict[str, Rows]:
        """Where the rows of each set are in a row group."""
        if self.by_folder:
            return {self._set_of_folder(group.file): range(group.rows)}
        pieces: dict[str, list[np.ndarray]] = {}
        start = 0
        for batch in self._batches(table, group.number, [self.set_column]):
            ids = self._ids(batch, table, group.number)
            order, position = ids.order(), 0
            for name, length in zip(order.names, order.lengths, strict=True):
                rows = (
                    np.arange(position, position + length) if order.rows is None else order.rows[position : position + length]
                )
                pieces.setdefault(name, []).append(rows + start)
                position += length
            start += len(ids)
        return {name: _run_or_rows(np.concatenate(own)) for name, own in pieces.items()}

    def _folders(self, file: Path) -> dict[str, str]:
        """What the folders between the path and the file say: column=value."""
        parts = file.relative_to(self.path).parent.parts if self.path.is_dir() else ()
        pairs = [part.split("=", 1) for part in parts if "=" in part]
        return {unquote(name): unquote(value) for name, value in pairs}

    def _groups(self, table: TableFile) -> list[Group]:
        """Those of one file; a folder whose file has none is an empty set, which a group without rows stands for."""
        found = [Group(table.path, number, table.rows(number)) for number in range(len(table))]
        return found or [Group(table.path, 0, 0)] * self.by_folder

    def _batches(self, table: TableFile, group: int, columns: list[str]) -> Iterator[Any]:
        """The batches of a row group; of an empty set's file one without rows."""
        any_rows = False
        for batch in table.batches(group, columns) if group < len(table) else ():
            any_rows = True
            yield batch
        if not any_rows:
            yield table.nothing(columns)

    def _ids(self, batch: Any, table: TableFile, group: int) -> Ids:
        if self.by_folder:
            return Ids.all(self._set_of_folder(table.path), batch.num_rows)
        return row_ids(batch, self.set_column, f"{table.path}, row group {group}")

    def _set_of_folder(self, file: Path) -> str:
        name = self._folders(file).get(self.set_column)
        if name in (None, "__HIVE_DEFAULT_PARTITION__"):
            raise DataError(f"{file}: its folders do not say which set it is of ({self.set_column}=...)")
        return str(name)

    def _features(self, batch: Any, table: TableFile, group: int) -> Tensor:
        found = row_features(batch, self.columns, f"{table.path}, row group {group}")
        return found.clone() if table.arrow else found  # what is mapped cannot be written to


def _run_or_rows(rows: np.ndarray) -> Rows:
    if len(rows) and rows[-1] - rows[0] + 1 > len(rows):
        return rows
    return range(int(rows[0]), int(rows[-1]) + 1) if len(rows) else range(0)


class ParquetSource(SetSource):
    """One set of `ParquetSets`: its rows in the order of the files. Keeps its rows of the row group that was read last."""

    def __init__(self, sets: ParquetSets, id: str, label: Any = None) -> None:
        super().__init__(id, label)
        self.sets = sets
        self.places = sets.index()[id]
        self.ends = np.cumsum([len(rows) for _, rows in self.places])
        self._kept: tuple[int, Tensor] | None = None

    def __len__(self) -> int:
        return int(self.ends[-1])

    def _rows(self, place: int) -> Tensor:
        if self._kept is None or self._kept[0] != place:
            self._kept = place, self.sets.rows(*self.places[place])
        return self._kept[1]

    @property
    def shape(self) -> tuple[int, ...]:
        """(D,)."""
        return tuple(self.sets.element().shape[1:])

    @property
    def dtype(self) -> torch.dtype:
        """As the file has it."""
        return self.sets.element().dtype

    def read(self, start: int, stop: int) -> Tensor:
        """A range of the set's rows, from as many row groups as it touches."""
        first = int(np.searchsorted(self.ends, start, side="right"))
        pieces = [self.sets.element()]
        for place in range(first, len(self.places)):
            begin = int(self.ends[place - 1]) if place else 0
            if begin >= stop:
                break
            pieces.append(self._rows(place)[max(0, start - begin) : stop - begin])
        return pieces[1] if len(pieces) == 2 else torch.cat(pieces)

    def close(self) -> None:
        """Give back the rows that are kept."""
        self._kept = None

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_kept": None}
