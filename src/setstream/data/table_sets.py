"""Sets in Parquet or Arrow files: one row per element, and a column with the id of its set.

    set_id   features: fixed_size_list<float>[D]          or numeric columns f0, f1, ...
    "a"      [0.1, ...]
    "b"      [0.7, ...]            the rows of a set may be anywhere, in any row group of any file

    set_id=a/part-0.parquet        or one folder per set, as written by Hive, Spark and pyarrow

`ParquetSets.blocks(...)` reads every row once, in the order of the files: what bulk encoding needs, as states of scattered
pieces add up. `ParquetSets.source(id)` serves one set, from an index of its rows.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import unquote

import numpy as np
import torch
from torch import Tensor

from setstream._utils.optional import need
from setstream._utils.prefetch import iterate_ahead
from setstream.data.collection import Block, Ids, SetCollection, Share, Skip, file_facts
from setstream.data.formats import TABLE_OF, ParquetTable
from setstream.data.formats.file import reading
from setstream.data.formats.table import Group, Kept, Rows, TableFile, pieces, row_features, row_ids, row_times
from setstream.errors import ConfigurationError, DataError
from setstream.sets.source import SetSource

PIECE_BYTES = 2**22  # bytes of one piece of a set, which is decoded and kept at a time
SET_COLUMNS = ("set_id", "set", "bag_id", "bag", "slide_id", "id")
FEATURE_COLUMNS = ("features", "feature", "embedding", "x")
NO_FEATURES = ("label", "labels", "target", "class", "y", "time", "timestamp", "date", "index", "row")  # rarely features


def is_table(path: Path) -> bool:
    """Whether a path is a table's file, or a folder of such files, or of folders `column=value`."""
    inside = list(path.iterdir()) if path.is_dir() else []
    partitions = [item for item in inside if "=" in item.name and item.is_dir()]
    return any(file.suffix in TABLE_OF for file in (path, *inside)) or any(map(table_files, partitions))


def table_files(path: Path) -> list[Path]:
    """The file itself, or all files of tables in and below a folder, in the order of their names."""
    return [path] if path.is_file() else sorted(file for file in path.rglob("*") if file.suffix in TABLE_OF)


class ParquetSets(SetCollection):
    """Many sets in a Parquet or Arrow file, or a folder of them.

    The column of set ids, `set_column`, and the `columns` of features are found by their usual names unless given. The
    `time_column` is the time of each element, as numbers (seconds since 1970), dates or timestamps (UTC if they have no zone).
    """

    unit: ClassVar[str] = "rows"

    def __init__(
        self,
        path: str | Path,
        set_column: str | None = None,
        columns: Sequence[str] | None = None,
        time_column: str | None = None,
    ) -> None:
        if isinstance(columns, str):
            raise ConfigurationError(f"columns is a list of names; got the text {columns!r}")
        self.path, self.files = Path(path), table_files(Path(path))
        if not self.files:
            raise DataError(f"{self.path}: there is no Parquet or Arrow file")
        for first in self.files:  # the first that can be opened; files before it raise errors when their rows are read
            try:
                table = _open(first)
                break
            except DataError:
                if first == self.files[-1]:
                    raise
        known = [*table.names, *self._folders(first)]
        self.set_column = set_column or next((name for name in SET_COLUMNS if name in known), None) or ""
        if self.set_column not in known:
            wanted = set_column or ", ".join(SET_COLUMNS)
            raise DataError(f"{first}: has no column of set ids ({wanted}); its columns are {known}")
        self.by_folder = self.set_column not in table.names  # the folder of a file names the set of its rows
        self._id_columns = [] if self.by_folder else [self.set_column]
        self.time_column = time_column
        if time_column is not None and time_column not in table.names:
            raise DataError(f"{first}: has no column of times {time_column!r}; its columns are {table.names}")
        self.columns = self._feature_columns(table, columns)
        self._kept: dict[int, Kept] = {}  # by process

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_kept": {}}

    def _feature_columns(self, table: TableFile, columns: Sequence[str] | None) -> list[str]:
        first, names, types = table.path, table.names, need("pyarrow").types
        listed = next((name for name in FEATURE_COLUMNS if name in names), None)
        numbers = (field.name for field in table.schema if types.is_floating(field.type) or types.is_integer(field.type))
        numeric = [name for name in numbers if name not in (self.set_column, self.time_column)]
        doubtful = [name for name in numeric if name.lower() in NO_FEATURES]
        if columns is None and listed is None and doubtful:
            doubt = f"{doubtful} may be labels or times rather than features"
            raise DataError(f"{first}: {doubt}: name the feature columns (columns=[...], --columns); its columns are {names}")
        chosen = list(columns) if columns else [listed] if listed else numeric
        missing = [name for name in chosen if name not in names]
        if missing or not chosen:
            raise DataError(f"{first}: has no feature columns {missing or FEATURE_COLUMNS}; its columns are {names}")
        return chosen

    def groups(self, skip: Skip) -> list[Group]:
        """All row groups of all files, in order; `skip` is called for a file that cannot be opened."""
        groups: list[Group] = []
        for file in self.files:
            try:
                groups += self._groups(_open(file))
            except DataError as error:
                skip(str(file), f"{error} (none of its rows are used)")
        return groups

    def blocks(self, position: int, chunk_size: int, decode_ahead: int, skip: Skip) -> Iterator[Block]:
        left, start = self.groups(skip), position
        while left and start and left[0].rows <= start:
            start -= left.pop(0).rows
        for block in iterate_ahead(self._read(left, start), decode_ahead):
            position += len(block.ids)
            yield block._replace(position=position)

    def _read(self, groups: list[Group], start: int = 0) -> Iterator[Block]:
        """Every row after the first `start`, megabytes at a time, or the error of a row group."""
        table: TableFile | None = None
        columns = [*self._id_columns, *self.columns, *([] if self.time_column is None else [self.time_column])]
        for group in groups:
            left = group.rows
            try:
                if table is None or table.path != group.file:
                    table = _open(group.file, self._id_columns)
                for batch in table.batches(group.number, columns):
                    if start < batch.num_rows or not start:
                        rest = batch.slice(start)
                        times = None if self.time_column is None else row_times(rest, self.time_column, group.place)
                        yield Block(self._ids(rest, group), self._features(rest, table, group), times=times)
                    start, left = max(0, start - batch.num_rows), left - batch.num_rows
            except DataError as error:
                names = self.share_ids(Share(group, group.rows, group.rows))  # none, if they cannot be read either
                yield Block(Ids(names, np.zeros(max(0, left - start), np.int64), group.place), error)
                start = 0

    def __iter__(self) -> Iterator[SetSource]:
        return (self.source(name) for name in self.ids())

    def facts(self) -> list[Any]:
        return [self.set_column, self.columns, self.time_column, *map(file_facts, self.files)]

    def total(self) -> int:
        return sum(group.rows for group in self.groups(lambda name, reason: None))

    def shares(self, size: int, skip: Skip) -> list[Share]:
        return [Share(group, group.rows, group.rows) for group in self.groups(skip)]

    def read_share(self, share: Share, chunk_size: int, decode_ahead: int) -> Iterator[Block]:
        return iterate_ahead(self._read([share.where]), decode_ahead)

    def share_ids(self, share: Share) -> list[str]:
        with suppress(DataError):
            return list(self._rows_of_sets(_open(share.where.file, self._id_columns), share.where))
        return []

    @cached_property
    def places(self) -> dict[str, list[tuple[Group, Rows]]]:
        """Where the rows of every set are; reads the column of set ids once."""
        places: dict[str, list[tuple[Group, Rows]]] = {}
        for file in self.files:
            table = _open(file, self._id_columns)
            for group in self._groups(table):
                for name, rows in self._rows_of_sets(table, group).items():
                    places.setdefault(name, []).append((group, rows))
        return places

    def ids(self) -> list[str]:
        """The ids of all sets, in the order in which they first appear."""
        return list(self.places)

    def source(self, id: str, label: Any = None) -> ParquetSource:
        """One set."""
        if id not in self.places:
            raise DataError(f"{self.path}: has no set {id!r}")
        return ParquetSource(self, id, label)

    @property
    def kept(self) -> Kept:
        """What was decoded last; anew after a fork."""
        return self._kept.setdefault(os.getpid(), Kept())

    @cached_property
    def element(self) -> Tensor:
        """No elements, in the shape and type of elements: (0, D)."""
        return next(self.features(Group(self.files[0], 0, 0)))[:0].clone()

    def features(self, group: Group) -> Iterator[Tensor]:
        """The features of a row group, some megabytes at a time."""
        table = _open(group.file)
        for batch in table.batches(group.number, self.columns):
            yield self._features(batch, table, group)

    def _rows_of_sets(self, table: TableFile, group: Group) -> dict[str, Rows]:
        if self.by_folder:
            return {self._set_of_folder(group.file): range(group.rows)}
        start, pieces, places = 0, defaultdict[str, list[np.ndarray]](list), dict[str, Rows]()
        for batch in table.batches(group.number, [self.set_column]):
            order = self._ids(batch, group).order()
            rows = np.arange(batch.num_rows) if order.rows is None else order.rows
            for name, part in zip(order.names, np.split(rows, np.cumsum(order.lengths)), strict=False):
                pieces[name].append(part + start)
            start += batch.num_rows
        for name, parts in pieces.items():
            rows = np.concatenate(parts)
            in_one_run = len(rows) and rows[-1] - rows[0] + 1 == len(rows)
            places[name] = range(rows[0], rows[-1] + 1) if in_one_run else rows
        return places

    def _folders(self, file: Path) -> dict[str, str]:
        """The columns that the folders between the path and the file name: column=value."""
        parts = file.relative_to(self.path).parent.parts if self.path.is_dir() else ()
        return {unquote(name): unquote(value) for name, equals, value in (part.partition("=") for part in parts) if equals}

    def _groups(self, table: TableFile) -> list[Group]:
        """The row groups of one file; a folder whose file has none is an empty set, as one group without rows."""
        with reading(table.path):
            groups = [Group(table.path, number, table.rows(number)) for number in range(table.groups)]
        return groups or [Group(table.path, 0, 0)] * self.by_folder

    def _ids(self, batch: Any, group: Group) -> Ids:
        with reading(group.place):
            if self.by_folder:
                return Ids.all(self._set_of_folder(group.file), batch.num_rows, group.place)
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


class ParquetSource(SetSource):
    """One set of `ParquetSets`: its rows in the order of the files. The table caches decoded rows for all of its sets."""

    def __init__(self, sets: ParquetSets, id: str, label: Any = None) -> None:
        super().__init__(id, label)
        self.sets, self.places = sets, sets.places[id]
        self.ends = np.cumsum([len(rows) for _, rows in self.places])

    def __len__(self) -> int:
        return int(self.ends[-1])

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.sets.element.shape[1:])

    @property
    def dtype(self) -> torch.dtype:
        return self.sets.element.dtype

    def read(self, start: int, stop: int) -> Tensor:
        element = self.sets.element
        size = max(1, PIECE_BYTES // max(1, element.shape[1:].numel() * element.dtype.itemsize))
        parts = [element]
        for place in range(int(np.searchsorted(self.ends, start, side="right")), len(self.places)):
            group, rows = self.places[place]
            begin = int(self.ends[place]) - len(rows)
            if begin >= stop:
                break
            low, high, count = max(0, start - begin), stop - begin, -(-len(rows) // size)
            for number in range(low // size, min(count, -(-high // size))):
                reader = pieces(self.sets.features(group), rows, size, group.place)
                piece = self.sets.kept.piece((self.id, place), number, count, reader)
                parts.append(piece[max(0, low - number * size) : high - number * size])
        return parts[1] if len(parts) == 2 else torch.cat(parts)
