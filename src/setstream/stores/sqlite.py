"""Rows in one SQLite file.

WAL mode: readers and a writer at a time, and a commit that has returned survives a crash. There is one writer for the
whole file, so a transaction locks every id; another process that wants to write waits. Readers have a connection of their
own and wait for nobody.
"""

import sqlite3
import threading
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from setstream.errors import StoreError
from setstream.stores.backend import Rows, Work

# What comes of a damaged file: its texts, error messages among them, need not be text.
BROKEN = (sqlite3.Error, UnicodeError)


class SqliteRows(Rows):
    """One file. wait: seconds to wait for another process's transaction before giving up."""

    schema = (Rows.schema[0], Rows.schema[1] + " WITHOUT ROWID")

    def __init__(self, path: Path, wait: float) -> None:
        super().__init__(str(path))
        self.path, self.wait = path, wait
        self._writing, self._reading = threading.RLock(), threading.RLock()
        self._writer: sqlite3.Connection | None = None
        self._reader: sqlite3.Connection | None = None
        if path.is_dir():
            raise StoreError(f"{path}: is a folder, and a store is a file in one: give {path / 'states.db'}, for example")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise StoreError(f"{path}: there is no folder for it, and none can be made: {error}") from error

    def query(self, statement: str, *values: Any) -> list[Any]:
        """The rows that a statement finds, as they are committed."""
        with self._reading:
            if self._reader is None:
                self._reader = self._connect()
            try:
                return self._reader.execute(statement.replace("%s", "?"), values).fetchall()
            except BROKEN as error:
                raise self._wrong(error, "read") from error

    @contextmanager
    def transaction(self, ids: Collection[str]) -> Iterator[Work]:
        """All or nothing, and no other writer meanwhile."""
        with self._writing:
            if self._writer is None:
                self._writer = self._connect()
            database = self._writer
            try:
                database.execute("BEGIN IMMEDIATE")
            except BROKEN as error:
                raise self._wrong(error, "written") from error
            try:
                yield Work(
                    self.states,
                    lambda statement, values: database.execute(statement.replace("%s", "?"), values),
                    lambda statement, rows: database.executemany(statement.replace("%s", "?"), rows),
                )
                database.execute("COMMIT")
            except BaseException as error:
                with suppress(*BROKEN):
                    if database.in_transaction:
                        database.execute("ROLLBACK")
                if isinstance(error, BROKEN):  # a full disk, for one
                    raise self._wrong(error, "written") from error
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
        database: sqlite3.Connection | None = None
        try:
            database = sqlite3.connect(self.path, timeout=self.wait, isolation_level=None, check_same_thread=False)
            database.execute("PRAGMA journal_mode = WAL")
            database.execute("PRAGMA synchronous = FULL")  # a commit that returned is on the disk
        except BROKEN as error:
            if database is not None:
                database.close()
            raise self._wrong(error, "opened") from error
        return database

    def _wrong(self, error: Exception, done: str) -> StoreError:
        """What to do about an error of SQLite's."""
        if "locked" in str(error):
            return StoreError(f"{self.place}: another process held it for more than {self.wait:.0f} s")
        if "not a database" in str(error):
            return StoreError(
                f"{self.place}: is no store of states: {error}. Give another file; a new one is made where there is none."
            )
        if isinstance(error, UnicodeError) or any(word in str(error) for word in ("malformed", "no such", "decode")):
            return StoreError(
                f"{self.place}: is damaged: {error}. Put a backup in its place, or save what is left with "
                f"`sqlite3 {self.path.name} .recover`."
            )
        return StoreError(f"{self.place}: cannot be {done}: {error}. Is there room on the disk, and may this user write there?")
