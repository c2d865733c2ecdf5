"""Sets in Parquet or Arrow files: one row per element, and a column with the id of its set.

    set_id   features: fixed_size_list<float>[D]          or numeric columns f0, f1, ...
    "a"      [0.1, ...]
    "b"      [0.7, ...]            the rows of a set may be anywhere, in any row group of any file

    set_id=a/part-0.parquet        or one folder per set, as written by Hive, Spark and pyarrow

`ParquetSets.stream()` reads every row once, in the order of the files, and gives (set ids, features): what bulk encoding
needs, as states of scattered pieces add up. `ParquetSets.source(id)` serves one set, from an index of its rows.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import unquote

import numpy as np
import torch
from torch import Tensor

from setstream._utils.prefetch import iterate_ahead
from setstream.data.collection import Block, Ids, SetCollection, Share, Skip, file_facts
from setstream.data.formats import TABLE_OF, ParquetTable
from setstream.data.formats.file import reading
from setstream.data.formats.table import TableFile, row_features, row_ids
from setstream.data.table_source import Group, Kept, ParquetSource, Rows
from setstream.errors import ConfigurationError, DataError
from setstream.sets.source import SetSource

SET_COLUMNS = ("set_id", "set", "bag_id", "bag", "slide_id", "id")
FEATURE_COLUMNS = ("features", "feature", "embedding", "x")
# Numbers that are rarely meant to be features.
NO_FEATURES = ("label", "labels", "target", "class", "y", "time", "timestamp", "date", "index", "row")


def is_table(path: Path) -> bool:
    """Whether a path is a table's file, or a folder of such files, or of folders `column=value`."""
    inside = list(path.iterdir()) if path.is_dir() else []
    partitions = [item for item in inside if "=" in item.name and item.is_dir()]
    return any(file.suffix in TABLE_OF for file in (path, *inside)) or any(map(table_files, partitions))


def table_files(path: Path) -> list[Path]:
    """The file itself, or all files of tables in and below a folder, in the order of their names."""
    return [path] if path.is_file() else sorted(file for file in path.rglob("*") if file.suffix in TABLE_OF)


class ParquetSets(SetCollection):
    """Many sets in Parquet or Arrow files.

    Args:
        path: A file, or a folder of files.
        set_column: The column of set ids; found by its usual names unless given.
        columns: The columns of features; likewise.
    """

    unit: ClassVar[str] = "rows"

    def __init__(self, path: str | Path, set_column: str | None = None, columns: Sequence[str] | None = None) -> None:
        if isinstance(columns, str):
            raise ConfigurationError(f"columns is a list of names; got the text {columns!r}")
        self.path = Path(path)
        self.files = table_files(self.path)
        if not self.files:
            raise DataError(f"{self.path}: there is no Parquet or Arrow file")
        for first in self.files:  # the first that can be opened; files before it raise errors when their rows are read
            try:
                table = _open(first)
                break
            except DataError:
                if first == self.files[-1]:
                    raise
        names = table.names
        known = [*names, *self._folders(first)]
        self.set_column = set_column or next((name for name in SET_COLUMNS if name in known), None) or ""
        if self.set_column not in known:
            wanted = set_column or ", ".join(SET_COLUMNS)
            raise DataError(f"{first}: has no column of set ids ({wanted}); its columns are {known}")
        self.by_folder = self.set_column not in names  # the folder of a file names the set of its rows
        self._id_columns = [] if self.by_folder else [self.set_column]
        self.columns = self._feature_columns(table, columns)
        self._index: dict[str, list[tuple[Group, Rows]]] | None = None
        self._element: Tensor | None = None
        self._kept: Kept | None = None

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_kept": None}

    def _feature_columns(self, table: TableFile, columns: Sequence[str] | None) -> list[str]:
        first, names = table.path, table.names
        listed = next((name for name in FEATURE_COLUMNS if name in names), None)
        numeric = [name for name in table.numeric() if name != self.set_column]
        doubtful = [name for name in numeric if name.lower() in NO_FEATURES]
        if columns is None and listed is None and doubtful:
            raise DataError(
                f"{first}: {doubtful} may be labels or times rather than features: name the feature columns "
                f"(columns=[...], --columns); its columns are {names}"
            )
        chosen = list(columns) if columns else [listed] if listed else numeric
        missing = [name for name in chosen if name not in names]
        if missing or not chosen:
            raise DataError(f"{first}: has no feature columns {missing or FEATURE_COLUMNS}; its columns are {names}")
        return chosen

    def groups(self, skip_bad: Skip | None = None) -> list[Group]:
        """All row groups of all files, in order; `skip_bad` is called for a file that cannot be opened."""
        groups: list[Group] = []
        for file in self.files:
            try:
                groups += self._groups(_open(file))
            except DataError as error:
                if skip_bad is None:
                    raise
                skip_bad(str(file), f"{error} (none of its rows are used)")
        return groups

    def stream(self, start: int = 0, ahead: int = 2, skip_bad: Skip | None = None) -> Iterator[tuple[Ids, Tensor | DataError]]:
        """Every row after the first `start`, once: the ids of their sets and the features (n, D), some megabytes at a time.

        A thread decodes `ahead` batches ahead. `skip_bad` is called for a file that cannot be opened; with it, rows that cannot
        be read are replaced by the error, with the sets of their row group. Without it, both raise.
        """
        left = self.groups(skip_bad)
        while left and start and left[0].rows <= start:
            start -= left.pop(0).rows
        return iterate_ahead(self._read(left, start, skip_bad is not None), ahead)

    def _read(self, groups: list[Group], start: int, lenient: bool) -> Iterator[tuple[Ids, Tensor | DataError]]:
        table: TableFile | None = None
        for group in groups:
            left = group.rows
            try:
                if table is None or table.path != group.file:
                    table = _open(group.file, self._id_columns)
                for batch in table.batches(group.number, [*self._id_columns, *self.columns]):
                    if start and batch.num_rows <= start:
                        start, left = start - batch.num_rows, left - batch.num_rows
                        continue
                    rest = batch.slice(start)
                    yield self._ids(rest, group), self._features(rest, table, group)
                    start, left = 0, left - batch.num_rows
            except DataError as error:
                if not lenient:
                    raise
                names: list[str] = []  # the sets that have rows in the row group, unless their ids cannot be read either
                with suppress(DataError):
                    names = list(self._rows_of_sets(_open(group.file, self._id_columns), group))
                yield Ids(names, np.zeros(max(0, left - start), np.int64), group.place), error
                start = 0

    def __iter__(self) -> Iterator[SetSource]:
        return (self.source(name) for name in self.ids())

    def facts(self) -> list[Any]:
        return [self.set_column, self.columns, *map(file_facts, self.files)]

    def total(self) -> int:
        return sum(group.rows for group in self.groups(lambda name, reason: None))

    def blocks(self, position: int, chunk_size: int, decode_ahead: int, skip: Skip) -> Iterator[Block]:
        for ids, features in self.stream(position, decode_ahead, skip):
            position += len(ids)
            yield Block(ids, features, position)

    def shares(self, size: int = 0, skip: Skip | None = None) -> list[Share]:
        """One share per row group, of any size."""
        return [Share(group, group.rows, group.rows) for group in self.groups(skip)]

    def read_share(self, share: Share, chunk_size: int) -> Iterator[Block]:
        return (Block(ids, features) for ids, features in self._read([share.where], 0, lenient=True))

    def index(self) -> dict[str, list[tuple[Group, Rows]]]:
        """Where the rows of every set are; reads the column of set ids once."""
        if self._index is None:
            index: dict[str, list[tuple[Group, Rows]]] = {}
            for file in self.files:
                table = _open(file, self._id_columns)
                for group in self._groups(table):
                    for name, rows in self._rows_of_sets(table, group).items():
                        index.setdefault(name, []).append((group, rows))
            self._index = index
        return self._index

    def ids(self) -> list[str]:
        """The ids of all sets, in the order in which they first appear."""
        return list(self.index())

    def source(self, id: str, label: Any = None) -> ParquetSource:
        """One set."""
        if id not in self.index():
            raise DataError(f"{self.path}: has no set {id!r}")
        return ParquetSource(self, id, label)

    def pieces(self, group: Group, rows: Rows, size: int) -> Iterator[Tensor]:
        """Some rows of a row group in their order, `size` at a time; memory is that of a piece and of one batch."""
        table = _open(group.file)
        start = count = 0
        waiting: list[Tensor] = []
        for batch in table.batches(group.number, self.columns):
            features = self._features(batch, table, group)
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
            raise DataError(f"{group.place}: has fewer rows than the file says")
        if waiting:
            yield torch.cat(waiting)

    @property
    def kept(self) -> Kept:
        """What was decoded last; anew after a fork."""
        if self._kept is None or self._kept.process != os.getpid():
            self._kept = Kept()
        return self._kept

    def element(self) -> Tensor:
        """No elements, in the shape and type of elements: (0, D)."""
        if self._element is None:
            table, group = _open(self.files[0]), Group(self.files[0], 0, 0)
            self._element = self._features(next(table.batches(0, self.columns)), table, group)[:0].clone()
        return self._element

    def _rows_of_sets(self, table: TableFile, group: Group) -> dict[str, Rows]:
        """Where the rows of each set are in a row group."""
        if self.by_folder:
            return {self._set_of_folder(group.file): range(group.rows)}
        pieces: dict[str, list[np.ndarray]] = {}
        start = 0
        for batch in table.batches(group.number, [self.set_column]):
            order = self._ids(batch, group).order()
            rows = np.arange(batch.num_rows) if order.rows is None else order.rows
            for name, part in zip(order.names, np.split(rows, np.cumsum(order.lengths)), strict=False):
                pieces.setdefault(name, []).append(part + start)
            start += batch.num_rows
        return {name: _run_or_rows(np.concatenate(parts)) for name, parts in pieces.items()}

    def _folders(self, file: Path) -> dict[str, str]:
        """The columns that the folders between the path and the file name: column=value."""
        parts = file.relative_to(self.path).parent.parts if self.path.is_dir() else ()
        pairs = [part.split("=", 1) for part in parts if "=" in part]
        return {unquote(name): unquote(value) for name, value in pairs}

    def _groups(self, table: TableFile) -> list[Group]:
        """The row groups of one file; a folder whose file has none is an empty set, as one group without rows."""
        with reading(table.path):
            groups = [Group(table.path, number, table.rows(number)) for number in range(len(table))]
        return groups or [Group(table.path, 0, 0)] * self.by_folder

    def _ids(self, batch: Any, group: Group) -> Ids:
        if self.by_folder:
            return Ids.all(self._set_of_folder(group.file), batch.num_rows, group.place)
        with reading(group.place):
            return row_ids(batch, self.set_column, group.place)

    def _set_of_folder(self, file: Path) -> str:
        name = self._folders(file).get(self.set_column)
        if name in (None, "__HIVE_DEFAULT_PARTITION__"):
            raise DataError(f"{file}: its folders do not name its set ({self.set_column}=...)")
        return str(name)

    def _features(self, batch: Any, table: TableFile, group: Group) -> Tensor:
        with reading(group.place):
            features = row_features(batch, self.columns, group.place)
        return features.clone() if table.mapped else features


def _open(file: Path, dictionaries: list[str] | None = None) -> TableFile:
    return TABLE_OF.get(file.suffix, ParquetTable)(file, dictionaries)


def _run_or_rows(rows: np.ndarray) -> Rows:
    in_one_run = len(rows) and rows[-1] - rows[0] + 1 == len(rows)
    return range(int(rows[0]), int(rows[0]) + len(rows)) if in_one_run else rows
