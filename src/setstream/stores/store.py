"""StateStore: states of many sets, by id, on disk.

    store.update(id, elements)       state[id] <- state[id] + absorb(elements)       one transaction
    store.predict(id)                head(finalize(state[id]))

The states lie in one SQLite file, or in PostgreSQL where several machines share them (`backend.py`). Elements become
a state before the transaction begins, so a lock is held for a merge of small states only; two processes that update the
same set wait for each other and lose nothing.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from setstream.errors import (
    ConfigurationError,
    MismatchError,
    NonFiniteError,
    SetstreamError,
    StateFormatError,
    StoreError,
    StoreFullError,
    UnknownSetError,
)
from setstream.models.encoder import SetEncoder, all_finite
from setstream.models.model import SetModel
from setstream.pools.base import named_tensors
from setstream.sets.layout import Sets
from setstream.states.fingerprint import Origin
from setstream.states.state import MOST_ELEMENTS, State
from setstream.stores.backend import Rows, at_forks
from setstream.stores.postgres import PostgresRows
from setstream.stores.sqlite import SqliteRows

VERSION = 1
# Bytes of the states that are kept parsed, with about as much again for their tensors.
KEPT_BYTES = 2**25


@dataclass(frozen=True)
class Change:
    """What is asked of one set: to add a part (a state, or another set of the store), or to become it."""

    id: str
    part: State | str
    replace: bool = False


@dataclass(frozen=True)
class Changed:
    """What became of it: how many elements the set has now, and whether it began with this change."""

    count: int
    began: bool


class StateStore:
    """The states of many sets in one place, for one model (or encoder) in eval mode.

    place: a file, or the URL of a PostgreSQL database: postgresql://user@host/name.
    wait: seconds to wait for another process's transaction before giving up.
    chunks: "average" lets a model that is not consistent add to a set that has elements; otherwise a ConsistencyError.

    >>> import tempfile, torch, setstream as ss
    >>> encoder = ss.SetEncoder(torch.nn.Linear(3, 8), ss.UMBC(8, num_slots=2)).eval()
    >>> model = ss.SetModel(encoder, torch.nn.Linear(8, 1)).eval()
    >>> with tempfile.TemporaryDirectory() as folder, ss.StateStore(f"{folder}/states.db", model) as store:
    ...     for day in range(3):
    ...         seen = store.update("customer-7", torch.randn(50, 3))
    ...     seen, store.predict("customer-7").shape
    (150, torch.Size([1, 2, 1]))
    """

    def __init__(
        self, place: str | Path, model: SetModel | SetEncoder, *, wait: float = 60.0, chunks: str | None = None
    ) -> None:
        self.model, self.chunks = model, chunks
        self.encoder: SetEncoder = model.encoder if isinstance(model, SetModel) else model
        if self.encoder.training:
            raise ConfigurationError("a store keeps states over time, and a model in training mode changes: call model.eval()")
        self._one_chunk = self.encoder.pool.refuse_chunks(chunks)
        self.rows = _open(place, wait)
        self._parsed: OrderedDict[str, tuple[bytes, State]] = OrderedDict()
        self._parsed_bytes = 0
        self._keeping = threading.Lock()
        self._largest = 0.0  # of the encodings that the head is known to read
        at_forks(self)
        place = self.rows.place
        origin = Origin(self.encoder)
        fingerprint = origin.fingerprint
        known = self.rows.remember({"version": str(VERSION), "fingerprint": fingerprint})
        if known and not {"version", "fingerprint"} <= set(known):
            raise StoreError(f"{place}: is a database, and no store of states")
        if known and known["version"] != str(VERSION):
            raise StoreError(f"{place}: was written by a newer setstream (version {known['version']} of the store)")
        if known and not Origin(None, known["fingerprint"]).same_as(origin):
            raise MismatchError(
                f"{place}: holds states of another encoder (fingerprint {known['fingerprint']}) than this model's "
                f"({fingerprint}): load the weights that made them, or begin a new store in another place"
            )

    # -- one set ------------------------------------------------------------------------------------------------------

    def update(self, id: str, elements: Tensor) -> int:
        """Add elements (n, ...) to a set, which begins with them if it is new; gives how many it has now."""
        return self.merge(id, self._state_of(elements))

    def remove(self, id: str, elements: Tensor) -> int:
        """Take elements out of a set again; gives how many are left."""
        part = self._state_of(elements)
        return self._replace(id, lambda state: state - part)

    def merge(self, id: str, other: State | str) -> int:
        """Add a state, or another set of the store, to a set; gives how many elements it has now. The other set stays."""
        (done,) = self.apply([Change(id, other)])
        if isinstance(done, SetstreamError):
            raise done
        return done.count

    def get(self, id: str) -> State:
        """The state of a set."""
        return self._parse(self.get_bytes(id))

    def get_bytes(self, id: str) -> bytes:
        """The state of a set as it is kept: what `State.from_bytes` reads."""
        return bytes(self._columns(id, "state")[0])

    def describe(self, id: str) -> tuple[int, int]:
        """How many elements a set has seen, and how many bytes its state takes."""
        count, size = self._columns(id, "count, LENGTH(state)")
        return int(count), int(size)

    def predict(self, id: str) -> Any:
        """What the model says about a set now: the head's output, or z of an encoder alone."""
        return self.finalize(self.get(id))

    @torch.no_grad()
    def finalize(self, state: State) -> Any:
        """What the model says about a state of this store."""
        return self.model.finalize(state, chunks=self.chunks)

    def forget(self, id: str) -> bool:
        """Drop a set; says whether it was there."""
        with self.rows.transaction([_text(id)]) as work:
            return work.delete(id)

    def decay(self, id: str, factor: float) -> None:
        """Let what a set has seen so far weigh less: its state times a factor."""
        self._replace(id, lambda state: state * factor)

    @torch.no_grad()
    def _replace(self, id: str, change: Callable[[State], State]) -> int:
        with self.rows.transaction([_text(id)]) as work:
            found = work.read([id])
            if id not in found:
                raise self._unknown(id)
            state = change(self._parse(found[id]))
            self._must_be_readable([state])
            work.write([_row(id, state)])
        return int(state.count)

    # -- many sets ----------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def apply(self, changes: Sequence[Change], room: int | None = None) -> list[Changed | SetstreamError]:
        """Many changes in one transaction, in their order; gives what became of each, or the error that kept it out.

        A change that cannot be made leaves the others be: one commit serves many callers. `room` sets may begin, no more.
        A part that the model cannot read, alone or in its set, is kept out: no later element could make up for it.
        """
        ids = {id for change in changes for id in (change.id, change.part) if isinstance(id, str) and _is_text(id)}
        with self.rows.transaction(ids) as work:
            stored = work.read(ids)
            done, states, parts = self._changed(changes, stored, room)
            try:
                self._must_be_readable([*parts, *states.values()])
            except SetstreamError:  # one of them is bad: look at each
                done, states, _ = self._changed(changes, stored, room, look=True)
            rows = [_row(id, states[id]) for id in sorted(states)]
            work.write(rows)
        own = {id(part) for part in parts}  # a part is its caller's, or shares memory with others; sums are the store's
        self._keep([(name, data, states[name]) for name, _, data in rows if id(states[name]) not in own])
        return done

    def _changed(
        self, changes: Sequence[Change], stored: dict[str, bytes], room: int | None, look: bool = False
    ) -> tuple[list[Changed | SetstreamError], dict[str, State], list[State]]:
        """What becomes of each change, the new states by id, and the parts in them; `look` whether the model reads each."""
        done: list[Changed | SetstreamError] = []
        known: dict[str, State] = {}
        states: dict[str, State] = {}
        parts: list[State] = []
        origin = self.encoder.empty(1).origin  # one look at the weights for all parts that were just made with them

        def state_of(id: str) -> State | None:
            if id not in known and id in stored:
                kept = self._parsed.get(id)
                known[id] = kept[1] if kept is not None and kept[0] == stored[id] else self._parse(stored[id])
            return states.get(id, known.get(id))

        for change in changes:
            try:
                name = _text(change.id)
                began = name not in stored and name not in states
                if began and room is not None and room < 1:
                    raise StoreFullError(f"{self.rows.place}: no more sets can begin; forget some")
                if change.part == name:
                    raise ConfigurationError(f"a set cannot be merged into itself: {name!r} would count every element twice")
                part = change.part if isinstance(change.part, State) else state_of(_text(change.part))
                if part is None:
                    raise self._unknown(str(change.part))
                if part.origin is not origin or len(part) != 1:
                    self.check(part)
                before = None if change.replace else state_of(name)
                if before is not None and int(before.count) and int(part.count) and self._one_chunk:
                    raise self.encoder.pool.inconsistent()
                whole = part if before is None else before + part
                count = int(whole.count)
                if count > MOST_ELEMENTS:
                    raise ConfigurationError(f"a set can count {MOST_ELEMENTS} elements; {name!r} would have {count}")
                if look:
                    self._must_be_readable([part, whole])
            except SetstreamError as error:
                done.append(error)
                continue
            states[name] = whole
            parts.append(part)
            room = None if room is None else room - began
            done.append(Changed(count, began))
        return done, states, parts

    def check(self, part: State) -> None:
        """Raise unless this is the state of one set, made by the store's encoder; see `SetEncoder.check_state`."""
        self.encoder.check_state(part)
        if len(part) != 1:
            raise MismatchError(f"a store takes the state of one set at a time; got one of {len(part)} sets")

    def fill(self, states: Iterable[tuple[str, State]]) -> None:
        """Write many states in one transaction, replacing those of the same ids."""
        with self.rows.transaction([]) as work:
            for name, state in states:
                self.check(state)
                work.write([_row(_text(name), state)])

    def __len__(self) -> int:
        return int(self.rows.query(f"SELECT COUNT(*) FROM {self.rows.states}")[0][0])

    def __contains__(self, id: object) -> bool:
        return bool(self.rows.query(f"SELECT 1 FROM {self.rows.states} WHERE id = %s", _text(id)))

    def ids(self) -> list[str]:
        """The ids of all sets, in order."""
        return [row[0] for row in self.rows.query(f"SELECT id FROM {self.rows.states} ORDER BY id")]

    def counts(self, after: str = "", limit: int = 100) -> list[tuple[str, int]]:
        """The ids that follow `after`, in order, and how many elements each has: page by page through all sets."""
        statement = f"SELECT id, count FROM {self.rows.states} WHERE id > %s ORDER BY id LIMIT %s"
        return [(name, int(count)) for name, count in self.rows.query(statement, _text(after), limit)]

    def count(self, id: str) -> int:
        """How many elements a set has seen; zero if there is no such set."""
        rows = self.rows.query(f"SELECT count FROM {self.rows.states} WHERE id = %s", _text(id))
        return int(rows[0][0]) if rows else 0

    def before_fork(self) -> None:
        """Let no thread be at work with what is kept parsed."""
        self._keeping.acquire()

    def after_fork(self) -> None:
        """Let threads work again."""
        self._keeping.release()

    def close(self) -> None:
        """Close the file, or the connections; another call opens them again."""
        self.rows.close()

    def __enter__(self) -> StateStore:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- helpers ------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def _state_of(self, elements: Tensor) -> State:
        sets: Sets = [elements]
        return self.encoder.update(None, sets)

    def _keep(self, rows: Iterable[tuple[str, bytes, State]]) -> None:
        """Remember what the latest bytes stand for, as they will be read again soon. Other bytes are parsed."""
        with self._keeping:
            for id, data, state in rows:
                self._parsed_bytes += len(data) - len(self._parsed.pop(id, (b"",))[0])
                self._parsed[id] = (data, state)
            while self._parsed_bytes > KEPT_BYTES:
                self._parsed_bytes -= len(self._parsed.popitem(last=False)[1][0])

    def _must_be_readable(self, states: Sequence[State]) -> None:
        """Raise NonFiniteError unless the model has a finite answer to each; MismatchError where it has none at all.

        The head looks only at encodings with larger numbers than it has been shown: it may be large, and what it cannot read
        are numbers too large for it.
        """
        seen = [state for state in states if int(state.count)]
        if not seen:
            return
        try:
            whole = State.cat(seen)
            whole.checked()  # as it will be read again
            z = self.encoder.finalize(whole, chunks=self.chunks)
            largest = max(float(tensor.abs().max()) for _, tensor in named_tensors(z))
            finite = isfinite(largest)
            if finite and largest > self._largest and isinstance(self.model, SetModel):
                y = self.model.head(z)
                named = y.named() if hasattr(y, "named") else y
                finite = all(all_finite(tensor) for _, tensor in named_tensors(named) if isinstance(tensor, Tensor))
        except (NonFiniteError, StateFormatError):
            finite = False
        except (RuntimeError, ValueError, TypeError, LookupError) as error:
            if isinstance(error, SetstreamError):
                raise
            raise MismatchError(f"the model cannot read this state: {error}") from error
        if not finite:
            raise NonFiniteError("with these elements the model's answer is NaN or infinity: they are too large for it")
        self._largest = max(self._largest, largest)

    def _parse(self, data: bytes) -> State:
        state = State.from_bytes(data).to(self.encoder.device or torch.device("cpu"))
        self.encoder.check_state(state)
        return state

    def _columns(self, id: str, columns: str) -> tuple[Any, ...]:
        rows = self.rows.query(f"SELECT {columns} FROM {self.rows.states} WHERE id = %s", _text(id))
        if not rows:
            raise self._unknown(id)
        return tuple(rows[0])

    def _unknown(self, id: str) -> UnknownSetError:
        return UnknownSetError(f"{self.rows.place}: there is no set {id!r}")


def _open(place: str | Path, wait: float) -> Rows:
    """The rows at a path (SQLite) or at a URL that begins with postgresql://."""
    if str(place).startswith(("postgresql://", "postgres://")):
        return PostgresRows(str(place), wait)
    return SqliteRows(Path(place), wait)


def _row(id: str, state: State) -> tuple[str, int, bytes]:
    return id, int(state.count), state.to_bytes()


def _text(id: object) -> str:
    """An id, which is text that a database can hold. A number would be found under one key and kept under another."""
    if not isinstance(id, str):
        raise ConfigurationError(f"the id of a set is a str; got {type(id).__name__} {id!r}: use str(id)")
    if not _is_text(id):
        raise ConfigurationError(f"the id of a set is text; {id!r} holds half of a surrogate pair")
    return id


def _is_text(id: str) -> bool:
    return not any("\ud800" <= letter <= "\udfff" for letter in id)
