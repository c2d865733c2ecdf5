"""StateStore: states of many sets, by id, on disk.

    store.update(id, elements)       state[id] <- state[id] + absorb(elements)       one transaction
    store.predict(id)                head(finalize(state[id]))

The states lie in one SQLite file, or in PostgreSQL where several machines share them (`store_rows.py`). Elements become
a state before the transaction begins, so a lock is held for a merge of small states only; two processes that update the
same set wait for each other and lose nothing.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from setstream.encoder import SetEncoder
from setstream.errors import ConfigurationError, MismatchError, SetstreamError, StoreError, StoreFullError, UnknownSetError
from setstream.fingerprint import Origin
from setstream.layout import Sets
from setstream.model import SetModel
from setstream.state import State
from setstream.store_rows import Work, open_rows

VERSION = 1
# Larger counts are no longer exact in JSON, and soon not in 64 bits.
MOST_ELEMENTS = 2**53
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
        self.rows = open_rows(place, wait)
        self._parsed: OrderedDict[str, tuple[bytes, State]] = OrderedDict()
        self._parsed_bytes = 0
        self._keeping = threading.Lock()
        place = self.rows.place
        origin = Origin(self.encoder)
        fingerprint = origin.fingerprint
        known = self.rows.remember({"version": str(VERSION), "fingerprint": fingerprint})
        if known and not {"version", "fingerprint"} <= set(known):
            raise StoreError(f"{place}: is a database, and no store of states")
        if known and int(known["version"]) > VERSION:
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
        with self.rows.transaction([id]) as work:
            rest = self._stored(work, id) - part
            work.write([_row(id, rest)])
        return int(rest.count)

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
        with self.rows.transaction([id]) as work:
            return work.delete(id)

    def decay(self, id: str, factor: float) -> None:
        """Let what a set has seen so far weigh less: its state times a factor."""
        with self.rows.transaction([id]) as work:
            work.write([_row(id, self._stored(work, id) * factor)])

    # -- many sets ----------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def apply(self, changes: Sequence[Change], room: int | None = None) -> list[Changed | SetstreamError]:
        """Many changes in one transaction, in their order; gives what became of each, or the error that kept it out.

        A change that cannot be made leaves the others be: one commit serves many callers. `room` sets may begin, no more.
        """
        done: list[Changed | SetstreamError] = []
        ids = {change.id for change in changes} | {change.part for change in changes if isinstance(change.part, str)}
        origin = self.encoder.empty(1).origin  # one look at the weights for all parts that were just made with them
        with self.rows.transaction(ids) as work:
            stored = work.read(ids)
            states: dict[str, State] = {}

            def state_of(id: str) -> State | None:
                if id not in states and id in stored:
                    known = self._parsed.get(id)
                    states[id] = known[1] if known is not None and known[0] == stored[id] else self._parse(stored[id])
                return states.get(id)

            changed: set[str] = set()
            fresh: set[str] = set()  # sums, in memory of their own
            for change in changes:
                began = change.id not in stored and change.id not in changed
                try:
                    if began and room is not None and room < 1:
                        raise StoreFullError(f"{self.rows.place}: no more sets can begin; forget some")
                    part = change.part if isinstance(change.part, State) else state_of(change.part)
                    if part is None:
                        raise self._unknown(str(change.part))
                    if part.origin is not origin or len(part) != 1:
                        self._check(part)
                    before = None if change.replace else state_of(change.id)
                    if before is not None and int(before.count) and int(part.count) and self._one_chunk:
                        raise self.encoder.pool.inconsistent()
                    whole = part if before is None else _sum(before, part)
                    (fresh.discard if before is None else fresh.add)(change.id)
                    count = int(whole.count)
                    if count > MOST_ELEMENTS:
                        raise ConfigurationError(f"a set can count {MOST_ELEMENTS} elements; {change.id!r} would have {count}")
                except SetstreamError as error:
                    done.append(error)
                    continue
                states[change.id] = whole
                changed.add(change.id)
                room = None if room is None else room - began
                done.append(Changed(count, began))
            rows = [_row(id, states[id]) for id in sorted(changed)]
            work.write(rows)
        self._keep([(id, data, states[id]) for id, _, data in rows if id in fresh])
        return done

    def fill(self, states: Iterable[tuple[str, State]]) -> None:
        """Write many states in one transaction, replacing those of the same ids."""
        with self.rows.transaction([]) as work:
            for name, state in states:
                work.write([_row(name, state)])

    def __len__(self) -> int:
        return int(self.rows.query(f"SELECT COUNT(*) FROM {self.rows.states}")[0][0])

    def __contains__(self, id: object) -> bool:
        return bool(self.rows.query(f"SELECT 1 FROM {self.rows.states} WHERE id = %s", str(id)))

    def ids(self) -> list[str]:
        """The ids of all sets, in order."""
        return [row[0] for row in self.rows.query(f"SELECT id FROM {self.rows.states} ORDER BY id")]

    def counts(self, after: str = "", limit: int = 100) -> list[tuple[str, int]]:
        """The ids that follow `after`, in order, and how many elements each has: page by page through all sets."""
        statement = f"SELECT id, count FROM {self.rows.states} WHERE id > %s ORDER BY id LIMIT %s"
        return [(name, int(count)) for name, count in self.rows.query(statement, after, limit)]

    def count(self, id: str) -> int:
        """How many elements a set has seen; zero if there is no such set."""
        rows = self.rows.query(f"SELECT count FROM {self.rows.states} WHERE id = %s", id)
        return int(rows[0][0]) if rows else 0

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

    def _check(self, part: State) -> None:
        self.encoder.check_state(part)
        if len(part) != 1:
            raise MismatchError(f"a store takes the state of one set at a time; got one of {len(part)} sets")

    def _parse(self, data: bytes) -> State:
        return State.from_bytes(data).to(self.encoder.home() or torch.device("cpu"))

    def _columns(self, id: str, columns: str) -> tuple[Any, ...]:
        rows = self.rows.query(f"SELECT {columns} FROM {self.rows.states} WHERE id = %s", id)
        if not rows:
            raise self._unknown(id)
        return tuple(rows[0])

    def _stored(self, work: Work, id: str) -> State:
        found = work.read([id])
        if id not in found:
            raise self._unknown(id)
        return self._parse(found[id])

    def _unknown(self, id: str) -> UnknownSetError:
        return UnknownSetError(f"{self.rows.place}: there is no set {id!r}")


def _row(id: str, state: State) -> tuple[str, int, bytes]:
    return id, int(state.count), state.to_bytes()


def _sum(before: State, part: State) -> State:
    try:
        return before + part
    except RuntimeError as error:  # tensors of other shapes, from a state that was edited
        raise MismatchError(f"the state does not fit the set's: {error}") from error
