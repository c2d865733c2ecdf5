"""StateStore: states of many sets, by id, on disk.

    store.update(id, elements)       state[id] <- state[id] + absorb(elements)       one transaction
    store.predict(id)                head(finalize(state[id]))

The states are in one SQLite file, or in PostgreSQL where several machines share them (`backend.py`). Elements become
a state before the transaction begins, so a lock is held for a merge of small states only; two processes that update the
same set wait for each other, and no update is lost.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from setstream.errors import ConfigurationError, MismatchError, SetstreamError, UnknownSetError
from setstream.models.encoder import SetEncoder
from setstream.models.model import SetModel
from setstream.states.fingerprint import Origin
from setstream.states.state import State
from setstream.stores import checks
from setstream.stores.backend import Row, Rows
from setstream.stores.batch import Batch
from setstream.stores.cache import StateCache
from setstream.stores.checks import Change, Changed
from setstream.stores.postgres import PostgresRows
from setstream.stores.sqlite import SqliteRows

__all__ = ["Change", "Changed", "StateStore"]

VERSION = 1


class StateStore(AbstractContextManager["StateStore"]):
    """The states of many sets in one place, for one model (or encoder) in eval mode.

    A change after which the model's prediction would be NaN or infinity raises NonFiniteError and is not made.

    Args:
        place: A file, or the URL of a PostgreSQL database: postgresql://user@host/name.
        model: The model whose encoder makes the states, in eval mode.
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
        self, place: str | Path, model: SetModel | SetEncoder, *, wait: float = 60.0, chunks: str | None = None
    ) -> None:
        self.model, self.chunks = model, chunks
        self.encoder = model.encoder if isinstance(model, SetModel) else model
        if self.encoder.training:
            raise ConfigurationError("a store keeps states over time, and a model in training mode changes: call model.eval()")
        self.one_chunk = self.encoder.pool.refuse_chunks(chunks)
        is_url = str(place).startswith(("postgresql://", "postgres://"))
        self.rows: Rows = PostgresRows(str(place), wait) if is_url else SqliteRows(Path(place), wait)
        self._cache = StateCache(self.rows.cache_lock)
        origin = Origin(self.encoder)
        facts = self.rows.remember({"version": str(VERSION), "fingerprint": origin.fingerprint})
        checks.check_facts(facts, self.rows.place, VERSION, origin)

    @torch.no_grad()
    def update(self, id: str, elements: Tensor) -> int:
        """Add elements (n, ...) to a set, which is created if it is new; returns how many it has now."""
        return self.merge(id, self.encoder.update(None, [elements]))

    @torch.no_grad()
    def remove(self, id: str, elements: Tensor) -> int:
        """Remove elements from a set; returns how many are left."""
        part = self.encoder.update(None, [elements])
        return self._replace(id, lambda state: state - part)

    def merge(self, id: str, other: State | str) -> int:
        """Add a state, or another set of the store, to a set; returns its count. The other set stays."""
        (result,) = self.apply([Change(id, other)])
        if isinstance(result, SetstreamError):
            raise result
        return result.count

    def decay(self, id: str, factor: float) -> None:
        """Multiply the state of a set by a factor: its elements so far weigh less."""
        self._replace(id, lambda state: state * factor)

    def delete(self, id: str) -> bool:
        """Delete a set; returns whether it existed."""
        with self.rows.transaction([checks.checked_id(id)]) as transaction:
            return transaction.delete(id)

    def forget(self, id: str) -> bool:
        """Deprecated: the former name of `delete`."""
        warnings.warn("StateStore.forget(id) is now called delete(id)", DeprecationWarning, stacklevel=2)
        return self.delete(id)

    def get(self, id: str) -> State:
        """The state of a set."""
        return self.parse(self.get_bytes(id))

    def get_bytes(self, id: str) -> bytes:
        """The state of a set as it is stored: what `State.from_bytes` reads."""
        return bytes(self._columns(id, "state")[0])

    @torch.no_grad()
    def parse(self, data: bytes) -> State:
        """The state of one set in bytes that `State.to_bytes` wrote, checked and on the encoder's device."""
        state = State.from_bytes(data).to(self.encoder.device or torch.device("cpu"))
        self.check(state)
        return state

    def describe(self, id: str) -> tuple[int, int]:
        """How many elements a set has seen, and how many bytes its state takes."""
        count, size = self._columns(id, "count, LENGTH(state)")
        return int(count), int(size)

    def predict(self, id: str) -> Any:
        """The model's prediction for a set now: the head's output, or z where the store has an encoder without a head."""
        return self.count_and_prediction(id)[1]

    def count_and_prediction(self, id: str) -> tuple[int, Any]:
        """How many elements a set has seen, and the model's prediction for them."""
        state = self.parsed(id, self.get_bytes(id), keep=True)
        return int(state.count), self.finalize(state)

    @torch.no_grad()
    def finalize(self, state: State) -> Any:
        """The model's prediction for a state of this store."""
        return self.model.finalize(state, chunks=self.chunks)

    @torch.no_grad()
    def _replace(self, id: str, change: Callable[[State], State]) -> int:
        with self.rows.transaction([checks.checked_id(id)]) as transaction:
            stored = transaction.read([id])
            if id not in stored:
                raise self.unknown(id)
            state = change(self.parse(stored[id]))
            checks.must_be_readable(self.finalize, [state])
            transaction.write([_row(id, state)])
        return int(state.count)

    @torch.no_grad()
    def apply(self, changes: Sequence[Change], room: int | None = None) -> list[Changed | SetstreamError]:
        """Make many changes in one transaction, in their order; returns for each its result, or the error that prevented it.

        A change that fails does not affect the others: one commit serves many callers. A part that the model cannot read, alone
        or in its set, is an error: later elements would not repair the set. At most `room` sets are created.
        """
        ids = {id for change in changes for id in (change.id, change.part) if isinstance(id, str) and checks.is_text(id)}
        with self.rows.transaction(ids) as transaction:
            batch = Batch(self, changes, transaction.read(ids), room)
            rows = [_row(name, batch.states[name]) for name in sorted(batch.states)]
            transaction.write(rows)
        given = {id(part) for part in batch.parts}  # these belong to callers, or share memory; sums belong to the store
        self._cache.keep((name, data, batch.states[name]) for name, _, data in rows if id(batch.states[name]) not in given)
        return batch.results

    def parsed(self, name: str, data: bytes, keep: bool = False) -> State:
        """The state in the bytes of a set's row, from the cache if it is there; `keep`: put it there."""
        state = self._cache.get(name, data)
        if state is None:
            state = self.parse(data)
            self._cache.keep([(name, data, state)] if keep else [])
        return state

    def check(self, part: State) -> None:
        """Raise MismatchError unless this is the state of one set, made by the store's encoder (`SetEncoder.check_state`)."""
        self.encoder.check_state(part)
        if len(part) != 1:
            raise MismatchError(f"a store takes the state of one set at a time; got one of {len(part)} sets")

    @torch.no_grad()
    def fill(self, states: Iterable[tuple[str, State]], skip: Callable[[str, str], None] | None = None) -> None:
        """Write pairs of an id and a state in one transaction, replacing those of the same ids.

        States that the model cannot read go to `skip`, with the reason, and are left out; without it, they are an error.
        """
        with self.rows.transaction([]) as transaction:
            pairs = iter(states)
            while batch := list(islice(pairs, checks.CHECKED_TOGETHER)):
                for _, state in batch:
                    self.check(state)
                bad = checks.unreadable(self.finalize, [state for _, state in batch])
                for name, state in batch:
                    if id(state) in bad:
                        reason = f"set {name!r}: {bad[id(state)]}"
                        if skip is None:
                            raise type(bad[id(state)])(reason)
                        skip(name, reason)
                transaction.write(_row(checks.checked_id(name), state) for name, state in batch if id(state) not in bad)

    def __len__(self) -> int:
        return int(self.rows.query(f"SELECT COUNT(*) FROM {self.rows.states}")[0][0])

    def __contains__(self, id: object) -> bool:
        return bool(self.rows.query(f"SELECT 1 FROM {self.rows.states} WHERE id = %s", checks.checked_id(id)))

    def ids(self) -> list[str]:
        """The ids of all sets, in order."""
        return [row[0] for row in self.rows.query(f"SELECT id FROM {self.rows.states} ORDER BY id")]

    def counts(self, after: str = "", limit: int = 100) -> list[tuple[str, int]]:
        """The ids that follow `after`, in order, with their counts: page by page through all sets."""
        statement = f"SELECT id, count FROM {self.rows.states} WHERE id > %s ORDER BY id LIMIT %s"
        return [(name, int(count)) for name, count in self.rows.query(statement, checks.checked_id(after), limit)]

    def count(self, id: str) -> int:
        """How many elements a set has seen; zero if there is no such set."""
        rows = self.rows.query(f"SELECT count FROM {self.rows.states} WHERE id = %s", checks.checked_id(id))
        return int(rows[0][0]) if rows else 0

    def close(self) -> None:
        """Close the file, or the connections; another call opens them again."""
        self.rows.close()

    def __exit__(self, *_: object) -> None:
        self.close()

    def _columns(self, id: str, columns: str) -> Any:
        rows = self.rows.query(f"SELECT {columns} FROM {self.rows.states} WHERE id = %s", checks.checked_id(id))
        if not rows:
            raise self.unknown(id)
        return rows[0]

    def unknown(self, id: str) -> UnknownSetError:
        """The error for a set that is not there."""
        return UnknownSetError(f"{self.rows.place}: there is no set {id!r}")


def _row(id: str, state: State) -> Row:
    return id, int(state.count), state.to_bytes()
