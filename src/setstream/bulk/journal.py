"""The journal of a bulk run: what is done, and the position it belongs to, committed together.

Whenever the process is killed, the next run finds states and position as one of its commits left them.
"""

import hashlib
import json
import sqlite3
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from setstream.data.collection import SetCollection
from setstream.errors import ConfigurationError, DataError
from setstream.states.state import State

TABLES = """
CREATE TABLE IF NOT EXISTS meta (key TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS states (id TEXT PRIMARY KEY, place INTEGER NOT NULL, count INTEGER NOT NULL, state BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS skipped (name TEXT PRIMARY KEY, reason TEXT NOT NULL);
"""


class Journal:
    """States of finished sets (or of all sets of a table so far), their position, and the sets that were left out.

    `run` identifies the run; `on_bad` is called with the reason for each set left out; without it, such sets are errors.
    """

    def __init__(self, path: Path, run: dict[str, Any], on_bad: Callable[[str], None] | None = None) -> None:
        self.path, self.on_bad = path, on_bad
        self.database = sqlite3.connect(path, isolation_level=None)
        self.database.execute("PRAGMA journal_mode = WAL")
        self.database.executescript(TABLES)
        self.database.execute("INSERT OR IGNORE INTO meta VALUES ('job', ?)", (json.dumps(run),))
        if json.loads(before := self._meta("job")) != run:
            raise ConfigurationError(f"{path} is the journal of another run ({before}); finish that run, or delete the journal")
        #: The sets that are left out, and why; and those since the last commit.
        self.skipped: dict[str, str] = dict(self.database.execute("SELECT name, reason FROM skipped ORDER BY rowid"))
        self._new: dict[str, str] = {}
        for reason in self.skipped.values():
            if on_bad is None:
                advice = "Leave them out again (on_bad, --skip-bad), or delete the journal beside the output to begin anew"
                raise DataError(f"an earlier run left out sets, like: {reason}. {advice}")
            on_bad(reason)

    def skip(self, name: str, reason: str) -> None:
        if self.on_bad is None:
            raise DataError(reason)
        if name not in self.skipped:
            self.on_bad(reason)
            self.skipped[name] = self._new[name] = reason

    def _meta(self, key: str) -> str:
        row = self.database.execute("SELECT value FROM meta WHERE key = ?", (key,)).fetchone()
        return "0" if row is None else str(row[0])

    def commit(self, states: Iterable[tuple[str, State]], position: int) -> None:
        """Write states, how much is done after them, and what was left out, all or nothing.

        States may be computed one by one while they are written, and leave out sets.
        """
        with self.database:  # rolls back after an error
            write = self.database.execute
            write("BEGIN IMMEDIATE")
            count = write("SELECT COUNT(*) FROM states").fetchone()[0]
            insert = "INSERT INTO states VALUES (?1, ?2, ?3, ?4) ON CONFLICT (id) DO UPDATE SET count = ?3, state = ?4"
            for number, (name, state) in enumerate(states, count):
                write(insert, (name, number, int(state.count), state.to_bytes()))
            self.database.executemany("INSERT OR IGNORE INTO skipped VALUES (?, ?)", self._new.items())
            write("DELETE FROM states WHERE id IN (SELECT name FROM skipped)")
            write("INSERT OR REPLACE INTO meta VALUES ('position', ?)", (str(position),))
        self._new = {}

    def arrange(self, order: Callable[[list[str]], list[str]]) -> None:
        names = [str(row[0]) for row in self.database.execute("SELECT id FROM states ORDER BY id")]
        with self.database:
            self.database.execute("BEGIN IMMEDIATE")
            self.database.executemany("UPDATE states SET place = ? WHERE id = ?", enumerate(order(names)))

    @property
    def position(self) -> int:
        """How many sets, or rows of a table, are done."""
        return int(self._meta("position"))

    def state(self, name: str) -> State | None:
        row = self.database.execute("SELECT state FROM states WHERE id = ?", (name,)).fetchone()
        return None if row is None else State.from_bytes(row[0])

    def states(self) -> Iterator[tuple[str, State]]:
        """All states, in the order in which their sets first appeared."""
        for name, blob in self.database.execute("SELECT id, state FROM states ORDER BY place"):
            yield name, State.from_bytes(blob)

    def delete(self) -> None:
        self.database.close()
        for file in (self.path, *self.path.parent.glob(f"{self.path.name}-*")):
            file.unlink(missing_ok=True)


def identity(data: SetCollection) -> str:
    """A digest of which files (or sets in memory) these are, so that a journal is never continued with others."""
    return hashlib.blake2b(json.dumps(data.facts()).encode(), digest_size=16).hexdigest()
