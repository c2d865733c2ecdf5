"""Where a StateStore keeps its rows in a database: (id, count, bytes) by id, and by id, level and tile.

    rows.query(statement, values)               read what is committed
    with rows.transaction(ids) as transaction:  all or nothing, and no other writer of these ids meanwhile
        transaction.read(ids)                   {id: bytes} of those that are there
        transaction.write([(id, count, bytes)])
        transaction.read_tiles(keys)            the same by key: (id, level, tile)
        transaction.write_tiles([(id, level, tile, count, bytes)])
        transaction.delete(id)

There are two databases: SQLite in one file, PostgreSQL by URL. They differ in how they connect and how they lock; the
statements are the same, with %s where a value goes.
"""

import os
import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import Any

Row = tuple[str, int, bytes]
TileKey = tuple[str, int, int]  # id, level, tile
TileRow = tuple[str, int, int, int, bytes]
# Keys of one statement: databases limit the values in it.
KEYS = 2000


class Transaction:
    """What can be done in a transaction, through the cursor of a database whose statements have `mark` where a value goes."""

    def __init__(self, rows: "Rows", cursor: Any, mark: str = "%s") -> None:
        self.rows, self.cursor, self.mark = rows, cursor, mark

    def execute(self, statement: str, values: Iterable[Any] = ()) -> Any:
        return self.cursor.execute(statement.replace("%s", self.mark), list(values))

    def read(self, ids: Collection[str]) -> dict[str, bytes]:
        """The bytes of those ids that exist."""
        marks = ", ".join(["%s"] * len(ids))
        rows = self.execute(f"SELECT id, state FROM {self.rows.states} WHERE id IN ({marks})", ids).fetchall()
        return {name: as_bytes(state) for name, state in rows}

    def write(self, rows: Iterable[Row]) -> None:
        """Insert rows, or replace those of the same ids."""
        insert = f"INSERT INTO {self.rows.states} (id, count, state) VALUES (%s, %s, %s) ON CONFLICT (id) DO "
        update = "UPDATE SET count = excluded.count, state = excluded.state"
        self.cursor.executemany((insert + update).replace("%s", self.mark), list(rows))

    def read_tiles(self, keys: Sequence[TileKey]) -> dict[TileKey, bytes]:
        """The bytes of those tiles that exist."""
        found: dict[TileKey, bytes] = {}
        for start in range(0, len(keys), KEYS):
            some = keys[start : start + KEYS]
            values = ", ".join(["(CAST(%s AS TEXT), CAST(%s AS BIGINT), CAST(%s AS BIGINT))"] * len(some))
            # CROSS JOIN: SQLite then looks up each key. It would read the whole table for `IN (VALUES ...)`.
            select = f"SELECT t.id, t.level, t.tile, t.state FROM k CROSS JOIN {self.rows.tiles} t"
            statement = f"WITH k(id, level, tile) AS (VALUES {values}) {select} WHERE t.id = k.id AND t.level = k.level"
            rows = self.execute(f"{statement} AND t.tile = k.tile", [value for key in some for value in key]).fetchall()
            found |= {(name, level, tile): as_bytes(state) for name, level, tile, state in rows}
        return found

    def write_tiles(self, rows: Iterable[TileRow]) -> None:
        """Insert tiles, or replace them."""
        insert = f"INSERT INTO {self.rows.tiles} (id, level, tile, count, state) VALUES (%s, %s, %s, %s, %s) ON CONFLICT "
        update = "(id, level, tile) DO UPDATE SET count = excluded.count, state = excluded.state"
        self.cursor.executemany((insert + update).replace("%s", self.mark), list(rows))

    def delete(self, id: str) -> bool:
        """Delete a set; returns whether it existed."""
        self.execute(f"DELETE FROM {self.rows.tiles} WHERE id = %s", [id])
        return bool(self.execute(f"DELETE FROM {self.rows.states} WHERE id = %s", [id]).rowcount > 0)

    def facts(self) -> dict[str, str]:
        """What the database remembers of its store."""
        return dict(self.execute(f"SELECT key, value FROM {self.rows.meta}").fetchall())

    def remember(self, facts: Mapping[str, str]) -> None:
        """Write facts, or replace those of the same names."""
        insert = f"INSERT INTO {self.rows.meta} VALUES (%s, %s) ON CONFLICT (key) DO UPDATE SET value = excluded.value"
        self.cursor.executemany(insert.replace("%s", self.mark), list(facts.items()))


def as_bytes(state: object) -> bytes:
    """The state of a row; nothing if it has another type, as in a damaged file."""
    return state if isinstance(state, bytes) else b""


NAMES = ("meta", "states", "tiles", "text", "blob", "options")


class Rows(ABC):
    """Rows in one database.

    Connections must not be carried through a fork: a child with its parent's SQLite locks takes none, and two processes
    that write to one socket garble it. They are closed before a fork, while no thread uses them, and opened again when they
    are needed. A lock that another thread holds during a fork would never be free in the child, so all are taken before it.

    `place` is the database's name in messages; its connections are used under `locks`, which are taken in this order.
    """

    #: The tables' names.
    states, meta, tiles = "states", "meta", "tiles"
    #: The types of ids and states, and what follows a table's columns.
    text, blob, options = "TEXT", "BLOB", ""
    schema = (
        "CREATE TABLE IF NOT EXISTS {meta} (key TEXT PRIMARY KEY, value TEXT NOT NULL)",
        "CREATE TABLE IF NOT EXISTS {states} (id {text} PRIMARY KEY, count BIGINT NOT NULL, state {blob} NOT NULL){options}",
        "CREATE TABLE IF NOT EXISTS {tiles} (id {text} NOT NULL, level BIGINT NOT NULL, tile BIGINT NOT NULL, "
        "count BIGINT NOT NULL, state {blob} NOT NULL, PRIMARY KEY (id, level, tile)){options}",
    )

    def __init__(self, place: str, *locks: AbstractContextManager[Any]) -> None:
        self.place = place
        #: Guards what a store keeps of its rows in memory.
        self.cache_lock = threading.RLock()
        self.locks = [*locks, self.cache_lock]
        _open_rows.add(self)

    def remember(self, facts: dict[str, str]) -> dict[str, str]:
        """Create the tables with these facts if there are none; returns the facts in the tables."""
        with self.transaction([]) as transaction:
            for statement in self.schema:
                transaction.execute(statement.format_map({name: getattr(self, name) for name in NAMES}))
            known = transaction.facts()
            if not known:
                transaction.remember(facts)
        return known or facts

    @abstractmethod
    def query(self, statement: str, *values: Any) -> list[Any]:
        """The rows that a statement selects, as they are committed."""

    @abstractmethod
    def transaction(self, ids: Collection[str]) -> AbstractContextManager[Transaction]:
        """A transaction that excludes other writers of these ids; without ids, other writers of facts."""

    @abstractmethod
    def close(self) -> None:
        """Close all connections; another call opens them again."""


_open_rows: weakref.WeakSet[Rows] = weakref.WeakSet()
_held = ExitStack()


def _before_fork() -> None:
    """Wait until no thread uses a connection, and close all."""
    for rows in list(_open_rows):
        for lock in rows.locks:
            _held.enter_context(lock)
        rows.close()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before_fork, after_in_parent=_held.close, after_in_child=_held.close)
