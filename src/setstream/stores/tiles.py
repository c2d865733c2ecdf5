"""The rows of a store by tile of time: what a change adds to them, the sum of a range, removal of a range, retention.

    change of set id, part at tile k       rows[id, level, k // sizes[level]] += part       for each level (`tiling.py`)
    state of a range                       Σ of few rows, in one merge
    removal of a range                     delete its rows; sum the blocks that it cuts anew; sum the set anew

No subtraction is involved, so all of it works for every pool. All rows of a transaction are merged together.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from setstream.errors import ConfigurationError, LateError, SetstreamError
from setstream.states.state import State
from setstream.stores import checks
from setstream.stores.backend import TileKey, Transaction, as_bytes
from setstream.stores.checks import Change, Changed, stack
from setstream.stores.tiling import FIRST, LAST, NO_TIME, Kept, Range, Retention, Tiling

if TYPE_CHECKING:
    from setstream.stores.reader import StateReader

KEPT = "kept"
# Sets that are looked up at a time when old tiles are dropped.
PAGE = 100
# Rows that are merged and written at a time: more need more memory, and take no less time.
TOGETHER = 512


def merge_rows(batch: State, owner: Sequence[int]) -> State:
    """The states of a batch, merged: row i belongs to set owner[i] of the result."""
    sets = max(owner) + 1
    accumulators = {name: one.merge_rows(owner, sets) for name, one in batch.accumulators.items()}
    count = batch.count.new_zeros(sets).index_add_(0, torch.tensor(owner, device=batch.device), batch.count)
    return State(accumulators, count, batch.origin)


def open_tiles(
    store: StateReader, facts: Mapping[str, str], tile: float | None, retention: Retention | None
) -> TileRows | None:
    """The tiles of a store; they are added to one without, if `tile` is given: its sets have no time."""
    if "tile" not in facts and tile is not None:
        with store.rows.transaction([]) as transaction:
            facts = transaction.facts()
            if "tile" not in facts:  # another process may have been faster
                facts |= {"version": checks.TILED} | Tiling.plan(tile, retention).facts()
                transaction.remember(facts)
                sets = f"SELECT id, {NO_TIME[0]}, {NO_TIME[1]}, count, state FROM {store.rows.states}"
                transaction.execute(f"INSERT INTO {store.rows.tiles} (id, level, tile, count, state) {sets}")
    if "tile" not in facts:
        if retention is not None:
            raise ConfigurationError("retention= is for a store with tiles: give tile=, in seconds (3600 for hours)")
        return None
    tiling = Tiling.from_facts(facts)
    if tile not in (None, tiling.tile):
        raise ConfigurationError(f"{store.rows.place}: its tiles are of {tiling.tile:g} s, not of {tile:g} s: leave tile= out")
    return TileRows(store, tiling, retention)


class TileRows:
    """The tiles of a store's sets."""

    def __init__(self, store: StateReader, tiling: Tiling, retention: Retention | None) -> None:
        self.store, self.rows, self.tiling, self.retention = store, store.rows, tiling, retention
        if retention is not None:
            tiling.keep(retention, 0.0, Kept())  # raises the error for an invalid one

    def late(self, transaction: Transaction, changes: Iterable[Change]) -> dict[int, SetstreamError]:
        """The parts of changes that are older than what is kept, by `id(part)`, with the error."""
        dropped = self._kept(transaction.facts()).dropped
        message = f"these elements are from before {dropped * self.tiling.tile:g}, which is no longer kept: leave them out"
        return {id(one.part): LateError(message) for one in changes if one.tiles and min(one.tiles) < dropped}

    @torch.no_grad()
    def add(self, transaction: Transaction, changes: Iterable[tuple[Change, Changed | SetstreamError]]) -> None:
        """Add the parts of the changes that were made to their rows."""
        kept = self._kept(transaction.facts())
        parts: dict[TileKey, list[State]] = {}
        for change, result in changes:
            if not isinstance(result, Changed):
                continue
            if change.replace:
                parts = {key: states for key, states in parts.items() if key[0] != change.id}
                transaction.execute(f"DELETE FROM {self.rows.tiles} WHERE id = %s", [change.id])
            if isinstance(change.part, str):  # its rows are added to those of the same times
                self._write(transaction, parts)
                other = self._all(transaction, change.part)
                parts = {(change.id, level, tile): [state] for (_, level, tile), state in other.items()}
            else:
                timed = [(self.tiling.rows_of(number, kept), part) for number, part in (change.tiles or {}).items()]
                for rows, part in timed or [([NO_TIME], change.part)]:
                    for level, tile in rows:
                        parts.setdefault((change.id, level, tile), []).append(part)
        self._write(transaction, parts)

    def state(self, id: str, since: float | None, until: float | None) -> State:
        """The state of the elements with since <= t < until, widened to whole tiles."""
        while True:
            kept = self._known_kept()
            statement, values = self._select(id, self.tiling.ranges(*self.tiling.whole(since, until, kept)))
            found = self.rows.query(statement, *values)
            if self._known_kept() == kept:  # otherwise rows may have been rolled up in between
                break
        if found:
            return self._sum([row[-1] for row in found])
        if id not in self.store:
            raise self.store.unknown(id)
        return self.store.encoder.empty(1)

    def remove(self, transaction: Transaction, id: str, since: float | None, until: float | None) -> State:
        """Remove the elements with since <= t < until, whole tiles; returns the state of what is left."""
        kept, tile = self._kept(transaction.facts()), self.tiling.tile
        start, stop = self.tiling.whole(since, until, kept)
        if (since is not None and start * tile != since) or (until is not None and stop * tile != until):
            raise ConfigurationError(
                f"whole tiles can be removed, of {tile:g} s or as they were rolled up; got since={since}, until={until}: give "
                f"since={start * tile:.0f}, until={stop * tile:.0f}"
            )
        return self._remove(transaction, id, start, stop)

    def change(self, transaction: Transaction, id: str, change: Callable[[State], State]) -> None:
        """Change each row of a set."""
        self._write(transaction, {key: [change(state)] for key, state in self._all(transaction, id).items()}, add=False)

    def subtract(self, transaction: Transaction, id: str, parts: Mapping[int, State]) -> None:
        """Remove elements that were added at these tiles."""
        kept = self._kept(transaction.facts())
        for number, part in parts.items():
            keys = [(id, *row) for row in self.tiling.rows_of(number, kept)]
            stored = transaction.read_tiles(keys)
            rows = {key: self.store.parse(stored[key]) if key in stored else self.store.encoder.empty(1) for key in keys}
            self._write(transaction, {key: [state - part] for key, state in rows.items()}, add=False)

    def expire(self, retention: Retention, now: float) -> int:
        """Drop and roll up what is older than the retention says, in one short transaction per set; returns for how many."""
        with self.rows.transaction([]) as transaction:
            kept = self.tiling.keep(retention, now, self._kept(transaction.facts()))
            transaction.remember({KEPT: json.dumps(kept)})
        old = [(level, kept.first(level) // size) for level, size in enumerate(self.tiling.sizes)]
        conditions = " OR ".join(["(level = %s AND tile < %s)"] * len(old))
        exists = f"EXISTS (SELECT 1 FROM {self.rows.tiles} t WHERE t.id = s.id AND ({conditions}))"
        statement = f"SELECT s.id FROM {self.rows.states} s WHERE s.id > %s AND {exists} ORDER BY s.id LIMIT {PAGE}"
        after, sets = "", 0
        while names := [row[0] for row in self.rows.query(statement, after, *(value for pair in old for value in pair))]:
            for name in names:
                with self.rows.transaction([name]) as transaction:
                    self._expire(transaction, name, kept)
            after, sets = names[-1], sets + len(names)
        return sets

    def _expire(self, transaction: Transaction, id: str, kept: Kept) -> None:
        """Drop and roll up the tiles of a set; a set that has no elements left is deleted."""
        outdated = transaction.execute(*self._select(id, self.tiling.ranges(FIRST, kept.dropped))).fetchall()
        for level, size in enumerate(self.tiling.sizes[:-1]):
            delete = f"DELETE FROM {self.rows.tiles} WHERE id = %s AND level = %s AND tile < %s"
            transaction.execute(delete, [id, level, max(FIRST, kept.rolled[level]) // size])
        if outdated:
            rest = self._remove(transaction, id, FIRST, kept.dropped)
            if int(rest.count):
                transaction.write(checks.to_rows([(id, rest)], self.store.narrow))
            else:
                transaction.delete(id)

    def _remove(self, transaction: Transaction, id: str, start: int, stop: int) -> State:
        for level, size in enumerate(self.tiling.sizes):
            delete = f"DELETE FROM {self.rows.tiles} WHERE id = %s AND level = %s AND tile >= %s AND tile < %s"
            transaction.execute(delete, [id, level, -(-start // size), stop // size])
            for block in {end // size for end in (start, stop) if end % size}:  # what the range cuts
                smaller = self.tiling.sizes[level - 1]
                children = Range(level - 1, block * size // smaller, (block + 1) * size // smaller)
                transaction.execute(delete, [id, level, block, block + 1])
                found = transaction.execute(*self._select(id, [children])).fetchall()
                if found:
                    self._write(transaction, {(id, level, block): [self._sum([row[-1] for row in found])]}, add=False)
        everything = [*self.tiling.ranges(FIRST, LAST), Range(NO_TIME[0], NO_TIME[1], NO_TIME[1] + 1)]
        left = transaction.execute(*self._select(id, everything)).fetchall()
        return self._sum([row[-1] for row in left]) if left else self.store.encoder.empty(1)

    def _write(self, transaction: Transaction, parts: dict[TileKey, list[State]], add: bool = True) -> None:
        """Write rows, each the sum of its parts and, with `add`, of what is there. Many are merged at once."""
        everything = sorted(parts)
        for start in range(0, len(everything), TOGETHER):
            keys = everything[start : start + TOGETHER]
            stored = transaction.read_tiles(keys) if add else {}
            states = [part for key in keys for part in parts[key]]
            owner = [place for place, key in enumerate(keys) for _ in parts[key]]
            there = [place for place, key in enumerate(keys) if key in stored]
            batch = stack(states)
            if there:
                batch = stack([batch, self.store.parse_batch([stored[keys[place]] for place in there])])
            merged = merge_rows(batch, owner + there) if len(batch) > len(keys) else batch
            rows = zip(keys, merged.count.tolist(), checks.dump_rows(merged, self.store.narrow), strict=True)
            transaction.write_tiles((*key, count, data) for key, count, data in rows)

    def _all(self, transaction: Transaction, id: str) -> dict[TileKey, State]:
        """All rows of a set."""
        select = f"SELECT level, tile, state FROM {self.rows.tiles} WHERE id = %s"
        found = transaction.execute(select, [id]).fetchall()
        states = self._parse([as_bytes(state) for *_, state in found]) if found else []
        return {(id, level, tile): state for (level, tile, _), state in zip(found, states, strict=True)}

    def _select(self, id: str, ranges: Sequence[Range]) -> tuple[str, list[object]]:
        """The statement that selects the states of ranges, and its values."""
        select = f"SELECT state FROM {self.rows.tiles} WHERE id = %s AND level = %s AND tile >= %s AND tile < %s"
        statement = " UNION ALL ".join([select] * len(ranges)) or f"SELECT state FROM {self.rows.tiles} WHERE 1 = 0"
        return statement, [value for some in ranges for value in (id, *some)]

    @torch.no_grad()
    def _sum(self, rows: Sequence[object]) -> State:
        """The sum of the states in rows' bytes."""
        return merge_rows(self.store.parse_batch([as_bytes(row) for row in rows]), [0] * len(rows))

    def _parse(self, data: Sequence[bytes]) -> list[State]:
        return list(self.store.parse_batch(data))

    def _known_kept(self) -> Kept:
        return self._kept(dict(self.rows.query(f"SELECT key, value FROM {self.rows.meta} WHERE key = %s", KEPT)))

    def _kept(self, facts: dict[str, str]) -> Kept:
        dropped, rolled = json.loads(facts.get(KEPT, "null")) or (FIRST, ())
        return Kept(dropped, tuple(rolled))
