"""The journal of a run: what is done, and the position it belongs to, committed together, in SQLite.

    position      sets, rows of a table or shares that are done in this pass
    states        of all sets so far, by id

Whenever the process is killed, the next run finds them as one commit left them. A model with several passes reads the data
again for each: `next_pass` turns every state into the one with which the next pass over its set begins.
"""

import json
import sqlite3
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias, cast

import torch

from setstream.bulk.partial import SetStates, split_name
from setstream.errors import ConfigurationError, DataError, StateFormatError
from setstream.models.encoder import SetEncoder
from setstream.states.state import State
from setstream.stores.checks import Change, dump_rows, parse_batch
from setstream.stores.tiles import merge_rows

BATCH = 256  # states that are read or written at a time
TABLES = """
CREATE TABLE IF NOT EXISTS meta (key TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS states (id TEXT PRIMARY KEY, place INTEGER NOT NULL DEFAULT 0, state BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS skipped (name TEXT PRIMARY KEY, reason TEXT NOT NULL);
"""


def _faulty(state: State) -> bool:
    try:
        state.checked()
    except StateFormatError:
        return True
    return False


class Step(NamedTuple):
    """What an engine has added to the states: how many elements; where it can continue (None: not yet); what is done."""

    elements: int
    position: int | None
    units: int


class Journal:
    """States of the sets so far, their position, and the sets that were left out.

    `run` identifies the run; `on_bad` is called with the reason for each set left out; without it, such sets are errors.
    tiled: the states are those of tiles of sets (`tile_name`).
    """

    def __init__(
        self,
        path: Path,
        encoder: SetEncoder,
        run: dict[str, Any],
        on_bad: Callable[[str], None] | None = None,
        tiled: bool = False,
    ) -> None:
        self.path, self.encoder, self.on_bad, self.tiled = path, encoder, on_bad, tiled
        self.database = sqlite3.connect(path, isolation_level=None)
        self.database.execute("PRAGMA journal_mode = WAL")
        self.database.executescript(TABLES)
        self.database.execute("INSERT OR IGNORE INTO meta VALUES ('job', ?)", (json.dumps(run),))
        if json.loads(before := self._meta("job", "")) != run:
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

    def _meta(self, key: str, default: str) -> str:
        row = self.database.execute("SELECT value FROM meta WHERE key = ?", (key,)).fetchone()
        return default if row is None else str(row[0])

    @property
    def position(self) -> int:
        """How much is done in this pass: sets, rows of a table, or shares."""
        return int(self._meta("position", "0"))

    @property
    def number(self) -> int:
        """The pass; the first is 1."""
        return int(self._meta("pass", "1"))

    def commit(self, states: SetStates, position: int) -> None:
        """Add states to those that are there, with how much is done after them and what was left out, all or nothing."""
        states.merge()
        added = states.names
        with self.database:  # rolls back after an error
            self.database.execute("BEGIN IMMEDIATE")
            for start in range(0, len(added), BATCH):
                known, state = self._read(added[start : start + BATCH])
                if state is not None:
                    states.add(known, state)
            states.merge()
            self._write(states.names, states.state)
            self.database.execute("INSERT OR REPLACE INTO meta VALUES ('position', ?)", (str(position),))
        states.clear()
        self._new = {}

    def _write(self, names: Sequence[str], states: State | None) -> None:
        """Write states, and what was left out; sets whose sums are not finite are left out, too."""
        if states is not None:
            for name, state in zip(names, states, strict=True) if _faulty(states) else ():
                name = self._tile(name)[1]
                if _faulty(state):
                    self.skip(name, f"set {name!r}: its elements are finite, and too large: NaN or infinity in its state")
            insert = "INSERT INTO states (id, state) VALUES (?1, ?2) ON CONFLICT (id) DO UPDATE SET state = ?2"
            self.database.executemany(insert, zip(names, dump_rows(states.to("cpu")), strict=True))
        self.database.executemany("INSERT OR IGNORE INTO skipped VALUES (?, ?)", self._new.items())
        name = "substr(id, instr(id, ' ') + 1)" if self.tiled else "id"
        self.database.execute(f"DELETE FROM states WHERE {name} IN (SELECT name FROM skipped)")

    def _read(self, names: Sequence[str]) -> tuple[list[str], State | None]:
        """Those of some sets that are there, and their states."""
        select = f"SELECT id, state FROM states WHERE id IN ({', '.join('?' * len(names))})"
        found = dict(self.database.execute(select, names).fetchall())
        known = [name for name in names if name in found]
        if not known:
            return [], None
        state = parse_batch([found[name] for name in known]).to(self.encoder.device or torch.device("cpu"))
        self.encoder.check_state(state)
        return known, state

    def begun(self, names: Sequence[str]) -> State:
        """The states without elements with which this pass over some sets begins; DataError if one is not there."""
        known, state = self._read(names)
        if state is None or len(known) < len(names):
            missing = sorted({*names} - {*known})
            raise DataError(f"the data have changed: {missing[:5]} had no elements in the pass before")
        empty = self.encoder.pool.empty_like(state, len(state), None)
        return State(state.accumulators | empty, torch.zeros_like(state.count), state.origin)

    @torch.no_grad()
    def next_pass(self) -> None:
        """Begin the next pass over the data, all or nothing."""
        number = self.number + 1
        with self.database:
            self.database.execute("BEGIN IMMEDIATE")
            for names, state in self._batches():
                self._write(names, self.encoder.next_pass(state))
            for key, value in (("pass", number), ("position", 0)):
                self.database.execute("INSERT OR REPLACE INTO meta VALUES (?, ?)", (key, str(value)))
        self._new = {}

    def arrange(self, order: Callable[[list[str]], list[str]]) -> None:
        """Put the sets into another order."""
        names = [str(row[0]) for row in self.database.execute("SELECT id FROM states ORDER BY id")]
        places = {name: place for place, name in enumerate(order([*{self._tile(name)[1] for name in names}]))}
        with self.database:
            self.database.execute("BEGIN IMMEDIATE")
            rows = [(places[self._tile(name)[1]], name) for name in names]
            self.database.executemany("UPDATE states SET place = ? WHERE id = ?", rows)

    def _tile(self, name: str) -> tuple[int, str]:
        return split_name(name) if self.tiled else (0, name)

    def _batches(self) -> Iterator[tuple[list[str], State]]:
        names = [row[0] for row in self.database.execute("SELECT id FROM states ORDER BY place, rowid").fetchall()]
        for start in range(0, len(names), BATCH):
            known, state = self._read(names[start : start + BATCH])
            if state is not None:
                yield known, state

    def states(self) -> Iterator[tuple[str, State]]:
        """All states, in the order in which their sets first appeared."""
        if self.tiled:
            yield from ((change.id, cast(State, change.part)) for change in self.changes())
            return
        for names, state in self._batches():
            yield from zip(names, state, strict=True)

    def changes(self) -> Iterator[Change]:
        """For each set, the change that writes its tiles into a store."""
        sets: dict[str, list[str]] = {}
        for row in self.database.execute("SELECT id FROM states ORDER BY place, rowid").fetchall():
            sets.setdefault(self._tile(row[0])[1], []).append(row[0])
        for name, some in sets.items():
            tiles: dict[int, State] = {}
            for start in range(0, len(some), BATCH):
                known, state = self._read(some[start : start + BATCH])
                tiles |= {self._tile(one)[0]: part for one, part in zip(known, state or (), strict=True)}
            whole = merge_rows(State.cat([*tiles.values()]), [0] * len(tiles))
            yield Change(name, whole, replace=True, tiles=tiles)

    def delete(self) -> None:
        self.database.close()
        for file in (self.path, *self.path.parent.glob(f"{self.path.name}-*")):
            file.unlink(missing_ok=True)


#: Reads all elements after the journal's position once, and adds them to the states.
Engine: TypeAlias = Callable[[Journal, SetStates], Iterator[Step]]
