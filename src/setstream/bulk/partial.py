"""Partial states: what each engine computes from some of the elements.

    blocks of a share  ->  {set id: state of the share's elements}          in any process, in any order

States of one set add up, wherever they were made; they are finalised once. A run keeps them in a journal: what is done, and the
position it belongs to, committed together. Whenever the process is killed, the next run finds them as one commit left them.
"""

import json
import sqlite3
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from setstream.data.collection import Block, Ids, SetCollection, Share, Skip
from setstream.errors import ConfigurationError, DataError, NonFiniteError, ShapeError
from setstream.models.encoder import SetEncoder
from setstream.pools.base import AVERAGE
from setstream.sets.layout import Packed
from setstream.sets.partition import runs
from setstream.states.state import State

MERGED_TOGETHER = 256  # sets whose states are merged in one step: states of this many are in memory twice
Earlier = Callable[[str], State | None]
Encoded = tuple[dict[str, State], dict[str, str]]
BAD = (DataError, NonFiniteError, ShapeError)  # errors of a single set
TABLES = """
CREATE TABLE IF NOT EXISTS meta (key TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS states (id TEXT PRIMARY KEY, place INTEGER NOT NULL, count INTEGER NOT NULL, state BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS skipped (name TEXT PRIMARY KEY, reason TEXT NOT NULL);
"""


class PartialStates:
    """The states of sets, to which blocks of elements are added; `encoder` is in eval mode, `chunks` as in its `update`.

    `skip` is called with a set that cannot be read or encoded, and the reason; its entry in `states` is then invalid.
    `earlier` gives the state that a set has before its first elements here; None if there is none.
    """

    @torch.no_grad()
    def __init__(
        self, encoder: SetEncoder, chunk_size: int, skip: Skip, chunks: str | None = AVERAGE, earlier: Earlier | None = None
    ) -> None:
        self.encoder, self.chunk_size, self.skip, self.chunks, self.earlier = encoder, chunk_size, skip, chunks, earlier
        self.states: dict[str, State] = {}
        self.device = encoder.device or torch.device("cpu")
        self._blank = encoder.empty(1)
        self._context = encoder.pool.prepare(self._blank)

    def add(self, block: Block) -> None:
        """Add the elements of a block; sets whose elements cannot be read or encoded go to `skip`."""
        ids, elements = block.ids, block.elements
        if isinstance(elements, DataError):
            for name in ids.names:
                self.skip(name, f"set {name!r}: {elements}")
            if not ids.names:
                self.skip(ids.place, f"{elements} (sets with rows there lack them)")
            return
        try:
            self.add_rows(ids, elements)
        except BAD:  # find the set: add one by one
            order, position = ids.order(), 0
            place = f"{ids.place}, " if ids.place else ""
            for name, length in zip(order.names, order.lengths, strict=True):
                rows = slice(position, position + length)
                alone = elements[rows] if order.rows is None else elements[torch.from_numpy(order.rows[rows])]
                try:
                    self.add_rows(Ids.all(name, length), alone)
                except BAD as error:
                    self.skip(name, f"{place}set {name!r}: {error}")
                position += length

    @torch.no_grad()
    def add_rows(self, ids: Ids, elements: Tensor) -> None:
        """Add elements (n, ...) of several sets, or none if it raises; small sets are encoded and merged together."""
        encoder, order = self.encoder, ids.order()
        if len(order.names) == 1:  # without `State.cat`: a file is read in blocks of one set
            state = self._before(order.names[0])
            for chunk in elements.split(self.chunk_size) if len(elements) else ():
                state = encoder.update(state, chunk.unsqueeze(0).to(self.device), chunks=self.chunks)
            self.states[order.names[0]] = state
            return
        rows = None if order.rows is None else torch.from_numpy(order.rows)

        def absorb(start: int, lengths: list[int]) -> State:
            stop = start + sum(lengths)
            chunk = elements[start:stop] if rows is None else elements.index_select(0, rows[start:stop])
            return encoder.absorb(self._blank, self._context, Packed(chunk.to(self.device), lengths))

        position = merged = 0
        waiting: list[State] = []
        changed: dict[str, State] = {}
        for run in runs(order.lengths, self.chunk_size):
            lengths, last = order.lengths[run], run.stop
            if len(lengths) == 1:  # a large set by itself, chunk by chunk
                if lengths[0] > self.chunk_size and encoder.pool.refuse_chunks(self.chunks):
                    raise encoder.pool.inconsistent()
                starts = range(0, lengths[0], self.chunk_size)
                parts = (absorb(position + start, [min(self.chunk_size, lengths[0] - start)]) for start in starts)
                waiting.append(sum(parts, self._blank))
            else:
                waiting.append(absorb(position, lengths))
            position += sum(lengths)
            if last - merged >= MERGED_TOGETHER or last == len(order.names):
                names, merged = order.names[merged:last], last
                before = State.cat([self._before(name) for name in names])
                changed.update(zip(names, encoder.merge(before, State.cat(waiting), chunks=self.chunks), strict=True))
                waiting = []
        self.states.update(changed)

    def _before(self, name: str) -> State:
        if name in self.states:
            return self.states[name]
        state = None if self.earlier is None else self.earlier(name)
        return self._blank if state is None else state.to(self.device)


def encode_share(encoder: SetEncoder, data: SetCollection, share: Share, chunk_size: int) -> Encoded:
    """The states of the sets that a share has elements of; and the sets that cannot be encoded, with the reason."""
    problems: dict[str, str] = {}
    partial = PartialStates(encoder, chunk_size, lambda name, reason: problems.update({name: problems.get(name, reason)}))
    for block in data.read_share(share, chunk_size):
        partial.add(block)
    return {name: state for name, state in partial.states.items() if name not in problems}, problems


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
