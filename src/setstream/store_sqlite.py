"""Rows in one SQLite file.

WAL mode: readers and a writer at a time, and a commit that has returned survives a crash. There is one writer for the
whole file, so a transaction locks every id; another process that wants to write waits. Readers have a connection of their
own and wait for nobody.
"""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from setstream.errors import StoreError
from setstream.store_rows import Rows, Work


class SqliteRows(Rows):
    """One file. wait: seconds to wait for another process's transaction before giving up."""

    schema = (Rows.schema[0], Rows.schema[1] + " WITHOUT ROWID")

    def __init__(self, path: Path, wait: float) -> None:
        super().__init__(str(path))
        self.path, self.wait = path, wait
        self._writing, self._reading = threading.RLock(), threading.RLock()
        self._writer: sqlite3.Connection | None = None
        self._reader: sqlite3.Connection | None = None
        path.parent.mkdir(parents=True, exist_ok=True)

    def query(self, statement: str, *values: Any) -> list[Any]:
        """The rows that a statement finds, as they are committed."""
        with self._reading:
            if self._reader is None:
                self._reader = self._connect()
            return self._reader.execute(statement.replace("%s", "?"), values).fetchall()

    @contextmanager
    def transaction(self, ids: Collection[str]) -> Iterator[Work]:
        """All or nothing, and no other writer meanwhile."""
        with self._writing:
            if self._writer is None:
                self._writer = self._connect()
            database = self._writer
            try:
                database.execute("BEGIN IMMEDIATE")
            except sqlite3.OperationalError as error:
                if "locked" not in str(error):
                    raise StoreError(f"{self.place}: cannot be written: {error}") from error
                raise StoreError(f"{self.place}: another process held it for more than {self.wait:.0f} s") from error
            try:
                yield Work(
                    self.states,
                    lambda statement, values: database.execute(statement.replace("%s", "?"), values),
                    lambda statement, rows: database.executemany(statement.replace("%s", "?"), rows),
                )
                database.execute("COMMIT")
            except BaseException as error:
                if database.in_transaction:
                    database.execute("ROLLBACK")
                if isinstance(error, sqlite3.OperationalError):  # a full disk, for one
                    raise StoreError(f"{self.place}: cannot be written: {error}") from error
                raise

    def close(self) -> None:
        """Close the file."""
        with self._writing, self._reading:
            for connection in (self._writer, self._reader):
                if connection is not None:
                    connection.close()
            self._writer = self._reader = None

    def before_fork(self) -> None:
        """Wait until no thread is at work, and close."""
        self._writing.acquire()
        self._reading.acquire()
        self.close()

    def after_fork(self) -> None:
        """Let threads work again."""
        self._reading.release()
        self._writing.release()

    def _connect(self) -> sqlite3.Connection:
        database = sqlite3.connect(self.path, timeout=self.wait, isolation_level=None, check_same_thread=False)
        try:
            database.execute("PRAGMA journal_mode = WAL")
        except sqlite3.DatabaseError as error:
            database.close()
            raise StoreError(f"{self.place}: is no store of states: {error}") from error
        database.execute("PRAGMA synchronous = FULL")  # a commit that returned is on the disk
        return database
