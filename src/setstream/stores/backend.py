"""Where a StateStore keeps its rows: (id, count, bytes), by id, in a database.

    rows.query(statement, values)        read what is committed
    with rows.transaction(ids) as work:  all or nothing, and no other writer of these ids meanwhile
        work.read(ids)                   {id: bytes} of those that are there
        work.write([(id, count, bytes)])
        work.delete(id)

Two databases speak this: SQLite in one file, PostgreSQL by URL. They differ in how they connect and how they lock; the
statements are the same, with %s where a value goes.
"""

import os
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

Execute = Callable[[str, Sequence[Any]], Any]
Row = tuple[str, int, bytes]


class Work:
    """What a transaction may do."""

    def __init__(self, table: str, execute: Execute, execute_many: Callable[[str, Sequence[Row]], Any]) -> None:
        self.table, self.execute, self._execute_many = table, execute, execute_many

    def read(self, ids: Collection[str]) -> dict[str, bytes]:
        """The bytes of those ids that are there."""
        places = ", ".join(["%s"] * len(ids))
        found = self.execute(f"SELECT id, state FROM {self.table} WHERE id IN ({places})", list(ids))
        return {name: bytes(state) for name, state in found.fetchall()}

    def write(self, rows: Iterable[Row]) -> None:
        """Insert rows, or replace those of the same ids."""
        change = "ON CONFLICT (id) DO UPDATE SET count = excluded.count, state = excluded.state"
        self._execute_many(f"INSERT INTO {self.table} (id, count, state) VALUES (%s, %s, %s) {change}", list(rows))

    def delete(self, id: str) -> bool:
        """Drop a row; says whether it was there."""
        return bool(self.execute(f"DELETE FROM {self.table} WHERE id = %s", [id]).rowcount > 0)


class Rows(ABC):
    """Rows in one database."""

    #: Whether other machines may write to it.
    shared = False
    #: The tables' names.
    states, meta = "states", "meta"
    #: The types that a database has for the three columns.
    schema = (
        "CREATE TABLE IF NOT EXISTS {meta} (key TEXT PRIMARY KEY, value TEXT NOT NULL)",
        "CREATE TABLE IF NOT EXISTS {states} (id TEXT PRIMARY KEY, count BIGINT NOT NULL, state BLOB NOT NULL)",
    )

    def __init__(self, place: str) -> None:
        self.place = place
        at_forks(self)

    def remember(self, facts: dict[str, str]) -> dict[str, str]:
        """Make the tables with these facts where there are none; gives the facts that were there, none if all is new."""
        with self.transaction([]) as work:
            for statement in self.schema:
                work.execute(statement.format(meta=self.meta, states=self.states), [])
            known = dict(work.execute(f"SELECT key, value FROM {self.meta}", []).fetchall())
            if not known:
                for key, value in facts.items():
                    work.execute(f"INSERT INTO {self.meta} VALUES (%s, %s)", [key, value])
        return known

    @abstractmethod
    def query(self, statement: str, *values: Any) -> list[Any]:
        """The rows that a statement finds."""

    @abstractmethod
    def transaction(self, ids: Collection[str]) -> AbstractContextManager[Work]:
        """All or nothing, and no other writer of these ids meanwhile; without ids, no other writer of facts."""

    @abstractmethod
    def close(self) -> None:
        """Give back what is open; another call opens it again."""

    @abstractmethod
    def before_fork(self) -> None:
        """Let no thread be at work, and no connection open."""

    @abstractmethod
    def after_fork(self) -> None:
        """Let threads work again."""


class Forks(Protocol):
    """What must stand still while a process forks."""

    def before_fork(self) -> None: ...
    def after_fork(self) -> None: ...


# A connection must not be carried through a fork: a child with its parent's SQLite locks takes none, and two processes
# that write to one socket garble it. Connections are closed before one, when no thread is at work with them, and open
# again when they are needed. A lock that another thread holds during a fork would never be free in the child.
_open: weakref.WeakSet[Forks] = weakref.WeakSet()
_still: list[Forks] = []


def at_forks(thing: Forks) -> None:
    """Call `before_fork` and `after_fork` of a thing, as long as it lives, around every fork."""
    _open.add(thing)


def _before_fork() -> None:
    _still[:] = list(_open)
    for thing in _still:
        thing.before_fork()


def _after_fork() -> None:
    for thing in _still:
        thing.after_fork()
    _still.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before_fork, after_in_parent=_after_fork, after_in_child=_after_fork)
