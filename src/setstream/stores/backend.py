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

    def put(self, table: str, columns: str, key: str | None, rows: Iterable[tuple[Any, ...]]) -> None:
        """Insert rows; those with the same `key`, some of the columns, are replaced. Without one, they must be new."""
        names = columns.split(", ")
        insert = f"INSERT INTO {table} ({columns}) VALUES ({', '.join([self.mark] * len(names))})"
        if key is not None:
            new = ", ".join(f"{name} = excluded.{name}" for name in names if name not in key.split(", "))
            insert += f" ON CONFLICT ({key}) DO UPDATE SET {new}"
        self.cursor.executemany(insert, list(rows))

    def read(self, ids: Collection[str]) -> dict[str, bytes]:
        """The bytes of those ids that exist."""
        marks = ", ".join(["%s"] * len(ids))
        rows = self.execute(f"SELECT id, state FROM {self.rows.states} WHERE id IN ({marks})", ids).fetchall()
        return {name: as_bytes(state) for name, state in rows}

    def write(self, rows: Iterable[Row]) -> None:
        """Insert rows, or replace those of the same ids."""
        self.put(self.rows.states, "id, count, state", "id", rows)

    def read_tiles(self, keys: Sequence[TileKey]) -> dict[TileKey, bytes]:
        """The bytes of those tiles that exist."""
        found = self._find(self.rows.tiles, {"id": "TEXT", "level": "BIGINT", "tile": "BIGINT"}, "state", keys)
        return {(id, level, tile): as_bytes(state) for id, level, tile, state in found}

    def write_tiles(self, rows: Iterable[TileRow]) -> None:
        """Insert tiles, or replace them."""
        self.put(self.rows.tiles, "id, level, tile, count, state", "id, level, tile", rows)

    def read_keys(self, keys: Sequence[tuple[str, str]]) -> dict[tuple[str, str], tuple[str, int]]:
        """The digest and the count of those keys of changes, (id, key), that are known."""
        found = self._find(self.rows.keys, {"id": "TEXT", "key": "TEXT"}, "digest, count", keys)
        return {(id, key): (digest, count) for id, key, digest, count in found}

    def write_keys(self, rows: Iterable[tuple[str, str, str, int, int]]) -> None:
        """Insert keys of changes: id, key, digest, count, time."""
        self.put(self.rows.keys, "id, key, digest, count, time", None, rows)

    def _find(self, table: str, types: Mapping[str, str], values: str, keys: Sequence[tuple[Any, ...]]) -> list[Any]:
        """The rows with these keys: the columns of the key, then the values."""
        found = []
        for start in range(0, len(keys), KEYS):
            some = keys[start : start + KEYS]
            one = ", ".join(f"CAST(%s AS {kind})" for kind in types.values())
            wanted = f"WITH wanted({', '.join(types)}) AS (VALUES {', '.join([f'({one})'] * len(some))})"
            same = " AND ".join(f"t.{name} = wanted.{name}" for name in types)
            columns = ", ".join(f"t.{name}" for name in [*types, *values.split(", ")])
            # CROSS JOIN: SQLite then looks up each key. It would read the whole table for `IN (VALUES ...)`.
            statement = f"{wanted} SELECT {columns} FROM wanted CROSS JOIN {table} t WHERE {same}"
            found += self.execute(statement, [value for key in some for value in key]).fetchall()
        return found

    def delete(self, id: str) -> bool:
        """Delete a set; returns whether it existed. Keys of its changes stay: they must not be made again."""
        self.execute(f"DELETE FROM {self.rows.tiles} WHERE id = %s", [id])
        return bool(self.execute(f"DELETE FROM {self.rows.states} WHERE id = %s", [id]).rowcount > 0)

    def facts(self) -> dict[str, str]:
        """What the database remembers of its store."""
        return dict(self.execute(f"SELECT key, value FROM {self.rows.meta}").fetchall())

    def remember(self, facts: Mapping[str, str]) -> None:
        """Write facts, or replace those of the same names."""
        self.put(self.rows.meta, "key, value", "key", facts.items())


def as_bytes(state: object) -> bytes:
    """The state of a row; nothing if it has another type, as in a damaged file."""
    return state if isinstance(state, bytes) else b""


NAMES = ("meta", "states", "tiles", "keys", "cursors", "text", "blob", "options")


class Rows(ABC):
    """Rows in one database.

    Connections must not be carried through a fork: a child with its parent's SQLite locks takes none, and two processes
    that write to one socket garble it. They are closed before a fork, while no thread uses them, and opened again when they
    are needed. A lock that another thread holds during a fork would never be free in the child, so all are taken before it.

    `place` is the database's name in messages; its connections are used under `locks`, which are taken in this order.
    """

    #: The tables' names.
    states, meta, tiles, keys, cursors = "states", "meta", "tiles", "keys", "cursors"
    #: The types of ids and states, and what follows the columns of a table of small rows.
    text, blob, options = "TEXT", "BLOB", ""
    schema = (
        "CREATE TABLE IF NOT EXISTS {meta} (key TEXT PRIMARY KEY, value TEXT NOT NULL)",
        "CREATE TABLE IF NOT EXISTS {states} (id {text} PRIMARY KEY, count BIGINT NOT NULL, state {blob} NOT NULL)",
        "CREATE TABLE IF NOT EXISTS {tiles} (id {text} NOT NULL, level BIGINT NOT NULL, tile BIGINT NOT NULL, "
        "count BIGINT NOT NULL, state {blob} NOT NULL, PRIMARY KEY (id, level, tile))",
        "CREATE TABLE IF NOT EXISTS {keys} (id {text} NOT NULL, key {text} NOT NULL, digest TEXT NOT NULL, "
        "count BIGINT NOT NULL, time BIGINT NOT NULL, PRIMARY KEY (id, key)){options}",
        "CREATE INDEX IF NOT EXISTS {keys}_by_time ON {keys} (time)",
        "CREATE TABLE IF NOT EXISTS {cursors} (source {text} NOT NULL, part {text} NOT NULL, position TEXT NOT NULL, "
        "PRIMARY KEY (source, part))",
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
