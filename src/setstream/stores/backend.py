"""Where a StateStore keeps its rows: (id, count, bytes), by id, in a database.

    rows.query(statement, values)               read what is committed
    with rows.transaction(ids) as transaction:  all or nothing, and no other writer of these ids meanwhile
        transaction.read(ids)                   {id: bytes} of those that are there
        transaction.write([(id, count, bytes)])
        transaction.delete(id)

There are two databases: SQLite in one file, PostgreSQL by URL. They differ in how they connect and how they lock; the
statements are the same, with %s where a value goes.
"""

import os
import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable
from contextlib import AbstractContextManager, ExitStack
from typing import Any

Row = tuple[str, int, bytes]


class Transaction:
    """What can be done in a transaction, through the cursor of a database whose statements have `mark` where a value goes."""

    def __init__(self, table: str, cursor: Any, mark: str = "%s") -> None:
        self.table, self.cursor, self.mark = table, cursor, mark

    def execute(self, statement: str, values: Iterable[Any] = ()) -> Any:
        return self.cursor.execute(statement.replace("%s", self.mark), list(values))

    def read(self, ids: Collection[str]) -> dict[str, bytes]:
        """The bytes of those ids that exist."""
        marks = ", ".join(["%s"] * len(ids))
        rows = self.execute(f"SELECT id, state FROM {self.table} WHERE id IN ({marks})", ids).fetchall()
        return {name: state if isinstance(state, bytes) else b"" for name, state in rows}  # another type: a damaged file

    def write(self, rows: Iterable[Row]) -> None:
        """Insert rows, or replace those of the same ids."""
        insert = f"INSERT INTO {self.table} (id, count, state) VALUES (%s, %s, %s) ON CONFLICT (id) DO "
        update = "UPDATE SET count = excluded.count, state = excluded.state"
        self.cursor.executemany((insert + update).replace("%s", self.mark), list(rows))

    def delete(self, id: str) -> bool:
        """Delete a row; returns whether it existed."""
        return bool(self.execute(f"DELETE FROM {self.table} WHERE id = %s", [id]).rowcount > 0)


class Rows(ABC):
    """Rows in one database.

    Connections must not be carried through a fork: a child with its parent's SQLite locks takes none, and two processes
    that write to one socket garble it. They are closed before a fork, while no thread uses them, and opened again when they
    are needed. A lock that another thread holds during a fork would never be free in the child, so all are taken before it.

    `place` is the database's name in messages; its connections are used under `locks`, which are taken in this order.
    """

    #: The tables' names.
    states, meta = "states", "meta"
    schema = (
        "CREATE TABLE IF NOT EXISTS {meta} (key TEXT PRIMARY KEY, value TEXT NOT NULL)",
        "CREATE TABLE IF NOT EXISTS {states} (id TEXT PRIMARY KEY, count BIGINT NOT NULL, state BLOB NOT NULL)",
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
                transaction.execute(statement.format(meta=self.meta, states=self.states))
            known = dict(transaction.execute(f"SELECT key, value FROM {self.meta}").fetchall())
            for fact in () if known else facts.items():
                transaction.execute(f"INSERT INTO {self.meta} VALUES (%s, %s)", fact)
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
