"""Many sets as one collection: each in its own file, or all in the rows of tables.

    blocks(position, ...)        every element once, in order: blocks of rows, and the set of each row
    shares(size), read_share     the same elements in shares, which separate processes can read

`SetDataset` (a source for each set) and `ParquetSets` (tables with a column of set ids) are the two kinds. Bulk encoding, on
this machine and on Ray, uses this protocol only.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
from torch import Tensor

from setstream.errors import DataError
from setstream.sets.source import SetSource

# Called with the name of a set (or file) that cannot be used, and the reason; raises where that is not allowed.
Skip = Callable[[str, str], None]


class Order(NamedTuple):
    """Rows set by set: the sets, how many rows each has, and which (None: one set after another, as they are)."""

    names: list[str]
    lengths: list[int]
    rows: np.ndarray | None


@dataclass(frozen=True)
class Ids:
    """The set of each of n rows: names[codes[row]], each name held once; `place`: where they are, or where each set is."""

    names: list[str]
    codes: np.ndarray
    place: str | dict[str, str] = ""

    def __len__(self) -> int:
        return len(self.codes)

    @staticmethod
    def all(name: str, rows: int, place: str = "") -> "Ids":
        """All rows belong to one set."""
        return Ids([name], np.zeros(rows, np.int64), place)

    def order(self) -> Order:
        """Set by set: no reordering where the rows of each set are contiguous, else one stable sort."""
        if len(self.names) == 1:
            return Order(self.names, [len(self)], None)
        steps, lengths = np.diff(self.codes), np.bincount(self.codes, minlength=len(self.names)).tolist()
        if steps.min(initial=0) >= 0:
            return Order(self.names, lengths, None)
        changes = np.flatnonzero(steps) + 1
        if len(changes) + 1 == len(self.names):
            bounds = np.array([0, *changes, len(self)])
            return Order([self.names[code] for code in self.codes[bounds[:-1]]], np.diff(bounds).tolist(), None)
        codes = self.codes.astype(np.uint16) if len(self.names) <= 2**16 else self.codes  # sorted by counting
        return Order(self.names, lengths, np.argsort(codes, kind="stable"))


class Block(NamedTuple):
    """Some rows: the set of each, the elements (n, ...), or why they cannot be read, and their times, if there are any."""

    ids: Ids
    elements: Tensor | DataError
    position: int | None = None  # reading can continue here after this block
    times: Tensor | None = None  # (n,), in seconds


@dataclass(frozen=True)
class Share:
    """Some elements of a collection: where they are, how many, and how much of `total()` is done with them."""

    where: Any
    elements: int
    units: int


class SetCollection(ABC):
    """Many sets that can be read from beginning to end, or in shares by several processes."""

    unit: ClassVar[str]  #: what positions and `total` count
    time_column: str | None = None  #: the column of the elements' times, of a table

    @abstractmethod
    def __iter__(self) -> Iterator[SetSource]:
        """The sets one by one."""

    def check(self, skip_bad: bool = False) -> tuple["SetCollection", list[str]]:
        """Check what can be checked before reading. Returns the good sets and what is wrong with the others."""
        return self, []

    @abstractmethod
    def facts(self) -> list[Any]:
        """What identifies the data (files with their sizes and times), as JSON values."""

    @abstractmethod
    def total(self) -> int:
        """The position after the last element, as far as it is known before reading."""

    @abstractmethod
    def blocks(self, position: int, chunk_size: int, decode_ahead: int, skip: Skip) -> Iterator[Block]:
        """Every element after a `Block.position` (or 0), once and in order; `skip` is called for what cannot be opened."""

    @abstractmethod
    def shares(self, size: int, skip: Skip) -> list[Share]:
        """All elements in shares of about `size`; `skip` is called for what cannot be opened."""

    @abstractmethod
    def read_share(self, share: Share, chunk_size: int, decode_ahead: int) -> Iterator[Block]:
        """The blocks of one share."""

    @abstractmethod
    def share_ids(self, share: Share) -> list[str]:
        """The sets that have elements in a share, as far as they can be read."""

    def output_order(self, names: list[str]) -> list[str]:
        """The names of sets, in the order in which their rows are written after shares were read in any order."""
        return sorted(names)


def file_facts(path: Path) -> list[Any]:
    """What distinguishes a file from its later versions: its path, size and time."""
    status = [path.stat().st_size, path.stat().st_mtime_ns] if path.exists() else []
    return [str(path.resolve()), *status]
