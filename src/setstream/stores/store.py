"""StateStore: states of many sets, by id, on disk.

    store.update(id, elements)             state[id] <- state[id] + absorb(elements)       one transaction
    store.predict(id)                      head(finalize(state[id]))
    store.predict(id, since=, until=)      head(finalize(Σ tiles of the range))            with tile= (`tiles.py`)

The states are in one SQLite file, or in PostgreSQL where several machines share them (`backend.py`). Elements become
a state before the transaction begins, so a lock is held for a merge of small states only; two processes that update the
same set wait for each other, and no update is lost.
"""

from __future__ import annotations

import time as clock
import warnings
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from setstream.errors import ConfigurationError, SetstreamError
from setstream.models.encoder import SetEncoder
from setstream.models.model import SetModel
from setstream.models.tiling import Times, states_by_tile, tile_number, tile_numbers
from setstream.sets.layout import pack
from setstream.states.fingerprint import Origin
from setstream.states.state import State
from setstream.stores import checks
from setstream.stores.backend import Rows, Transaction
from setstream.stores.batch import Batch, Results
from setstream.stores.cache import StateCache
from setstream.stores.checks import Change, Changed, stack
from setstream.stores.ledger import Cursor, Position, Replays, expire_keys, lock_of, move, record
from setstream.stores.postgres import PostgresRows
from setstream.stores.reader import StateReader
from setstream.stores.sqlite import SqliteRows
from setstream.stores.tiles import merge_rows, open_tiles
from setstream.stores.tiling import Retention, check_tiles

__all__ = ["Change", "Changed", "Cursor", "StateStore"]


class StateStore(StateReader, AbstractContextManager["StateStore"]):
    """The states of many sets in one place, for one model (or encoder) in eval mode.

    A change after which the model's prediction would be NaN or infinity raises NonFiniteError and is not made.

    Args:
        place: A file, or the URL of a PostgreSQL database: postgresql://user@host/name.
        model: The model whose encoder makes the states, in eval mode.
        tile: Seconds of a tile: states are kept by tile of event time, too, so that any range of tiles can be asked for. A
            store with tiles needs no `tile` when it is opened again. One without gets them; what it holds already has no time.
        retention: Seconds after which `expire` drops tiles; or, by size of tiles, after which it rolls them up into the next
            larger: {3600: 7 * 86_400, 86_400: 365 * 86_400, 30 * 86_400: math.inf} keeps hours for a week, days for a year.
        dtype: torch.float32 keeps the sums of states in about half the bytes, with a small error (docs/sizing.md). The store
            remembers it. What a store holds already changes its type when it is written next. None: as it was, or float64.
        key_retention: Seconds after which `expire` deletes the keys of changes: a repetition is then a new change.
        wait: Seconds to wait for another process's transaction before raising StoreError.
        chunks: "average" lets a model that is not consistent add to a set that has elements; otherwise a ConsistencyError.

    Example:
        >>> import tempfile, torch, setstream as ss
        >>> encoder = ss.SetEncoder(torch.nn.Linear(3, 8), ss.UMBC(8, num_slots=2)).eval()
        >>> model = ss.SetModel(encoder, torch.nn.Linear(8, 1)).eval()
        >>> with tempfile.TemporaryDirectory() as folder, ss.StateStore(f"{folder}/states.db", model) as store:
        ...     for day in range(3):
        ...         count = store.update("customer-7", torch.randn(50, 3))
        ...     count, store.predict("customer-7").shape
        (150, torch.Size([1, 2, 1]))
    """

    def __init__(
        self,
        place: str | Path,
        model: SetModel | SetEncoder,
        *,
        tile: float | None = None,
        retention: Retention | None = None,
        dtype: torch.dtype | None = None,
        key_retention: float = 7 * 86_400.0,
        wait: float = 60.0,
        chunks: str | None = None,
    ) -> None:
        self.model, self.chunks, self.key_retention = model, chunks, key_retention
        self.encoder = model.encoder if isinstance(model, SetModel) else model
        if self.encoder.training:
            raise ConfigurationError("a store keeps states over time, and a model in training mode changes: call model.eval()")
        self.encoder.check_one_pass("a store, which keeps states and not elements")
        self.one_chunk = self.encoder.pool.refuse_chunks(chunks)
        if tile is not None:
            check_tiles(tile, retention)  # before there is a file
        is_url = str(place).startswith(("postgresql://", "postgres://"))
        self.rows: Rows = PostgresRows(str(place), wait) if is_url else SqliteRows(Path(place), wait)
        self._cache = StateCache(self.rows.cache_lock)
        origin = Origin(self.encoder)
        facts = self.rows.remember({"version": checks.PLAIN, "fingerprint": origin.fingerprint})
        checks.check_facts(facts, self.rows.place, (checks.PLAIN, checks.TILED), origin)
        self.narrow = checks.choose_dtype(self.rows, facts, dtype) == torch.float32
        #: The tiles, if the store has them.
        self.tiles = open_tiles(self, facts, tile, retention)

    @torch.no_grad()
    def update(self, id: str, elements: Tensor, *, key: str | None = None, time: Times | None = None) -> int:
        """Add elements (n, ...) to a set, which is created if it is new; returns how many it has now.

        Args:
            id: The set.
            elements: The elements.
            key: Add them once: a repetition with the same key changes nothing, and returns the first count. Keys are kept in
                the transaction of the change, by set, for as long as `key_retention` says.
            time: In a store with tiles, when they happened, in seconds since 1970: one time, or one per element (float64 or
                integers). None: now.

        Raises:
            LateError: If elements are older than what is kept (`retention`).
            KeyReusedError: If the key came with other elements, or other times, before.
        """
        return self._apply_one(self.encode(id, elements, time), key, (elements, time))

    @torch.no_grad()
    def encode(self, id: str, elements: Tensor, time: Times | None = None) -> Change:
        """The change that `update` makes, for `apply`."""
        if self.tiles is None and time is None:
            return Change(id, self.encoder.update(None, [elements]))
        tile, packed = self._tiled("time=").tiling.tile, pack([elements])
        numbers = tile_numbers(clock.time() if time is None else time, tile, packed)
        if not len(numbers):
            return Change(id, self.encoder.update(None, [elements]))
        tiles = states_by_tile(self.encoder, packed, numbers)
        states = list(tiles.values())
        return Change(id, states[0] if len(states) == 1 else merge_rows(stack(states), [0] * len(states)), tiles=tiles)

    @torch.no_grad()
    def remove(
        self,
        id: str,
        elements: Tensor | None = None,
        *,
        time: Times | None = None,
        since: float | None = None,
        until: float | None = None,
    ) -> int:
        """Remove elements from a set, or a range of its tiles; returns how many are left.

        Args:
            id: The set.
            elements: Elements that were added before: they are subtracted, within the limits of `State.remove`.
            time: In a store with tiles, the times with which they were added.
            since: Instead of elements: remove all with since <= t < until. Both are multiples of the tile; None: no bound.
            until: The end of the range, which is not part of it.
        """
        if elements is None:
            if since is None and until is None:
                raise ConfigurationError("remove takes elements, or since= and until=; delete(id) deletes the whole set")
            tiles = self._tiled("since= and until=")
            return self._replace(id, lambda _, transaction: tiles.remove(transaction, id, since, until))
        if self.tiles is not None and time is None:
            raise ConfigurationError("in a store with tiles, elements are removed with the time= that they were added with")
        change = self.encode(id, elements, time)

        def subtract(state: State, transaction: Transaction) -> State:
            if self.tiles is not None:
                self.tiles.subtract(transaction, id, change.tiles or {})
            return state - cast(State, change.part)

        return self._replace(id, subtract)

    def merge(self, id: str, other: State | str, *, key: str | None = None, time: float | None = None) -> int:
        """Add a state, or another set of the store, to a set; returns its count. The other set stays.

        Args:
            id: The set.
            other: A state; or the id of a set, whose tiles are added to those of the same times.
            key: Merge once, as in `update`.
            time: In a store with tiles, the time of a state's elements; None: they have no time, and are in no range.
        """
        if time is not None and isinstance(other, str):
            raise ConfigurationError("a set is merged with the times of its elements: leave time= out")
        tiles = None if time is None else {tile_number(time, self._tiled("time=").tiling.tile): cast(State, other)}
        return self._apply_one(Change(id, other, tiles=tiles), key, (other, time))

    def decay(self, id: str, factor: float) -> None:
        """Multiply the state of a set by a factor: its elements so far weigh less."""

        def scale(state: State, transaction: Transaction) -> State:
            if self.tiles is not None:
                self.tiles.change(transaction, id, lambda row: row * factor)
            return state * factor

        self._replace(id, scale)

    def expire(self, now: float | None = None) -> int:
        """Drop tiles, or roll them up, as `retention` says, and delete old keys; returns how many sets lost or rolled up tiles.

        Each set has a short transaction of its own: writers do not wait for the others. Run it from time to time, such as once
        per tile; `setstream serve` does. A set without any elements left is deleted.

        Args:
            now: The time to count back from, in seconds since 1970; None: now.
        """
        now = clock.time() if now is None else now
        expire_keys(self.rows, now - self.key_retention)
        return 0 if self.tiles is None or self.tiles.retention is None else self.tiles.expire(self.tiles.retention, now)

    def delete(self, id: str) -> bool:
        """Delete a set; returns whether it existed."""
        with self.rows.transaction([checks.checked_id(id)]) as transaction:
            return transaction.delete(id)

    def forget(self, id: str) -> bool:
        """Deprecated: the former name of `delete`."""
        warnings.warn("StateStore.forget(id) is now called delete(id)", DeprecationWarning, stacklevel=2)
        return self.delete(id)

    @torch.no_grad()
    def _replace(self, id: str, change: Callable[[State, Transaction], State]) -> int:
        with self.rows.transaction([checks.checked_id(id)]) as transaction:
            stored = transaction.read([id])
            if id not in stored:
                raise self.unknown(id)
            state = change(self.parse(stored[id]), transaction)
            checks.must_be_readable(self.finalize, [state])
            transaction.write(checks.to_rows([(id, state)], self.narrow))
        return int(state.count)

    @torch.no_grad()
    def apply(
        self,
        changes: Sequence[Change],
        room: int | None = None,
        *,
        cursor: Cursor | tuple[str, str, Position] | None = None,
        before_commit: Callable[[Results], None] | None = None,
    ) -> Results:
        """Make many changes in one transaction, in their order; returns for each its result, or the error that prevented it.

        A change that fails does not affect the others: one commit serves many callers. A part that the model cannot read, alone
        or in its set, is an error: later elements would not repair the set. At most `room` sets are created.

        Args:
            changes: The changes.
            room: How many sets may be created.
            cursor: (source, partition, offset), or a `Cursor`: the position up to which a consumer has read. It is committed
                with the changes, so that a consumer that was killed goes on after what it brought: `position` returns it.
            before_commit: Called with the results. If it raises an error, nothing is changed.

        Raises:
            CursorError: If the store is at another position than the consumer believes: nothing is changed.
        """
        ids = {id for change in changes for id in (change.id, change.part) if isinstance(id, str) and checks.is_text(id)}
        with self.rows.transaction(ids | lock_of(cursor)) as transaction:
            if cursor is not None:
                move(transaction, cursor)
            replays = Replays(transaction, changes)
            fresh = replays.fresh
            late = self.tiles.late(transaction, fresh) if self.tiles is not None else {}
            batch = Batch(self, fresh, transaction.read(ids), room, late)
            rows = checks.to_rows(sorted(batch.states.items()), self.narrow)
            transaction.write(rows)
            if self.tiles is not None:
                self.tiles.add(transaction, zip(fresh, batch.results, strict=True))
            record(transaction, zip(fresh, batch.results, strict=True))
            results = replays.results(batch.results)
            if before_commit is not None:
                before_commit(results)
        if not self.narrow:  # otherwise the states are not what will be read
            given = {id(part) for part in batch.parts}  # these belong to callers, or share memory; sums belong to the store
            self._cache.keep((name, data, batch.states[name]) for name, _, data in rows if id(batch.states[name]) not in given)
        return results

    @torch.no_grad()
    def fill(self, states: Iterable[tuple[str, State] | Change], skip: Callable[[str, str], None] | None = None) -> None:
        """Write pairs of an id and a state, or changes with tiles, in one transaction, replacing those of the same ids.

        States that the model cannot read go to `skip`, with the reason, and are left out; without it, they are an error.
        """
        with self.rows.transaction([]) as transaction:
            changes = (one if isinstance(one, Change) else Change(*one, replace=True) for one in states)
            size = checks.CHECKED_TOGETHER if self.tiles is None else 16  # sets may have many tiles
            while batch := list(islice(changes, size)):
                pairs = [(checks.checked_id(change.id), cast(State, change.part)) for change in batch]
                for _, state in pairs:
                    self.check(state)
                bad = checks.unreadable(self.finalize, [state for _, state in pairs])
                for name, state in pairs:
                    if id(state) in bad:
                        reason = f"set {name!r}: {bad[id(state)]}"
                        if skip is None:
                            raise type(bad[id(state)])(reason)
                        skip(name, reason)
                transaction.write(checks.to_rows([pair for pair in pairs if id(pair[1]) not in bad], self.narrow))
                if self.tiles is not None:
                    self.tiles.add(transaction, [(one, Changed(0, False)) for one in batch if id(one.part) not in bad])

    def _apply_one(self, change: Change, key: str | None, contents: tuple[Any, ...]) -> int:
        if key is not None:
            change = replace(change, key=key, digest=checks.digest(contents))
        (result,) = self.apply([change])
        if isinstance(result, SetstreamError):
            raise result
        return result.count

    def close(self) -> None:
        """Close the file, or the connections; another call opens them again."""
        self.rows.close()

    def __exit__(self, *_: object) -> None:
        self.close()
