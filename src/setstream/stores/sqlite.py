"""Rows in one SQLite file.

WAL mode: readers and one writer at a time, and a commit that has returned survives a crash. There is one writer for the
whole file, so a transaction locks every id; other processes that write wait. Reads use a separate connection and
do not wait for writers.
"""

import sqlite3
import threading
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from setstream.errors import StoreError
from setstream.stores.backend import Rows, Transaction

# Bytes per page: states have thousands, and SQLite reads, writes and checks them page by page.
PAGE = 2**14
# KiB of pages that a connection keeps. A transaction that changes more of them than fit writes some of them twice.
CACHE = 2**16
# Prepared statements that a connection keeps. Those for thousands of rows take half a megabyte, and differ in how many rows.
STATEMENTS = 16
# What SQLite raises for a damaged file, whose texts and error messages need not be valid UTF-8.
BROKEN = (sqlite3.Error, UnicodeError)


class SqliteRows(Rows):
    """Rows in one file; `wait`: seconds to wait for another process's transaction before giving up."""

    # Not for tables of states: such rows fill whole pages of their own beyond a quarter of a page.
    options = " WITHOUT ROWID"

    def __init__(self, path: Path, wait: float) -> None:
        self._writing, self._reading = threading.RLock(), threading.RLock()
        self.path, self.wait = path, wait
        self._writer: sqlite3.Connection | None = None
        self._reader: sqlite3.Connection | None = None
        super().__init__(str(path), self._writing, self._reading)
        if path.is_dir():
            raise StoreError(f"{path}: is a folder, and a store is a file: give {path / 'states.db'}, for example")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise StoreError(f"{path}: its folder does not exist and cannot be made: {error}") from error

    def query(self, statement: str, *values: Any) -> list[Any]:
        with self._reading:
            if self._reader is None:
                self._reader = self._connect()
            try:
                rows = self._reader.execute(statement.replace("%s", "?"), values).fetchall()
                if any(None in row for row in rows):
                    raise sqlite3.DatabaseError("malformed row: a value is missing")
                return rows
            except BROKEN as error:
                raise self._wrong(error, "read") from error

    @contextmanager
    def transaction(self, ids: Collection[str]) -> Iterator[Transaction]:
        with self._writing:
            if self._writer is None:
                self._writer = self._connect()
            database = self._writer
            try:
                database.execute("BEGIN IMMEDIATE")
                yield Transaction(self, database, "?")
                database.execute("COMMIT")
            except BaseException as error:
                with suppress(*BROKEN):
                    if database.in_transaction:
                        database.execute("ROLLBACK")
                if isinstance(error, BROKEN):  # a full disk, for one
                    raise self._wrong(error, "written") from error
                raise

    def close(self) -> None:
        with self._writing, self._reading:
            for connection in filter(None, (self._writer, self._reader)):
                connection.close()
            self._writer = self._reader = None

    def _connect(self) -> sqlite3.Connection:
        database: sqlite3.Connection | None = None
        try:
            database = sqlite3.connect(
                self.path, timeout=self.wait, isolation_level=None, check_same_thread=False, cached_statements=STATEMENTS
            )
            database.execute(f"PRAGMA page_size = {PAGE}")  # of a new file
            database.execute(f"PRAGMA cache_size = -{CACHE}")
            database.execute("PRAGMA journal_mode = WAL")
            database.execute("PRAGMA synchronous = FULL")  # a commit that returned is on the disk
        except BROKEN as error:
            if database is not None:
                database.close()
            raise self._wrong(error, "opened") from error
        return database

    def _wrong(self, error: Exception, done: str) -> StoreError:
        """The error to raise for one of SQLite's, with what to do about it."""
        text = str(error)
        if "locked" in text:
            reason = f"another process held it for more than {self.wait:.0f} s"
        elif "not a database" in text:
            reason = f"is not a store of states: {text}. Give another file; a new one is made where there is none."
        elif isinstance(error, UnicodeError) or any(word in text for word in ("malformed", "no such", "decode")):
            reason = f"is damaged: {text}. Restore a backup, or save what is left with `sqlite3 {self.path.name} .recover`."
        else:
            reason = f"cannot be {done}: {text}. Is there room on the disk, and may this user write there?"
        return StoreError(f"{self.place}: {reason}")
