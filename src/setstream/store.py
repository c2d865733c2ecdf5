"""StateStore: states of many sets, by id, on disk.

    store.update(id, elements)       state[id] <- state[id] + absorb(elements)       one transaction
    store.predict(id)                head(finalize(state[id]))

SQLite in WAL mode: embedded, readers and a writer at a time, and a commit that has returned survives a crash. Elements become
a state before the transaction begins, so the lock is held for a merge of two small states only; two processes that update the
same set wait for each other and lose nothing.
"""

from __future__ import annotations

import os
import sqlite3
import threading
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from setstream.encoder import SetEncoder
from setstream.errors import ConfigurationError, MismatchError, StoreError
from setstream.layout import Sets
from setstream.model import SetModel
from setstream.state import State

VERSION = 1
SCHEMA = """
CREATE TABLE IF NOT EXISTS meta (key TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS states (id TEXT PRIMARY KEY, count INTEGER NOT NULL, state BLOB NOT NULL) WITHOUT ROWID;
"""


# SQLite must not be carried through a fork: a child with its parent's locks takes none, and updates get lost. Connections are
# closed before one, when no thread is at work with them, and open again when they are needed.
_stores: weakref.WeakSet[StateStore] = weakref.WeakSet()


def _before_fork() -> None:
    for store in _stores:
        store._lock.acquire()
        store.close()


def _after_fork() -> None:
    for store in _stores:
        store._lock.release()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before_fork, after_in_parent=_after_fork, after_in_child=_after_fork)


class StateStore:
    """The states of many sets in one file, for one model (or encoder) in eval mode.

    wait: seconds to wait for another process's transaction before giving up.

    >>> import tempfile, torch, setstream as ss
    >>> encoder = ss.SetEncoder(torch.nn.Linear(3, 8), ss.UMBC(8, num_slots=2)).eval()
    >>> model = ss.SetModel(encoder, torch.nn.Linear(8, 1)).eval()
    >>> with tempfile.TemporaryDirectory() as folder, ss.StateStore(f"{folder}/states.db", model) as store:
    ...     for day in range(3):
    ...         seen = store.update("customer-7", torch.randn(50, 3))
    ...     seen, store.predict("customer-7").shape
    (150, torch.Size([1, 2, 1]))
    """

    def __init__(self, path: str | Path, model: SetModel | SetEncoder, *, wait: float = 60.0) -> None:
        self.path, self.model, self.wait = Path(path), model, wait
        self.encoder: SetEncoder = model.encoder if isinstance(model, SetModel) else model
        if self.encoder.training:
            raise ConfigurationError("a store keeps states over time, and a model in training mode changes: call model.eval()")
        self._lock = threading.RLock()
        self._connection: sqlite3.Connection | None = None
        _stores.add(self)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        fingerprint = self.encoder.empty(1).fingerprint
        with self._transaction() as database:
            for statement in SCHEMA.strip().split(";"):
                database.execute(statement)
            known = dict(database.execute("SELECT key, value FROM meta"))
            if not known:
                database.executemany("INSERT INTO meta VALUES (?, ?)", [("version", VERSION), ("fingerprint", fingerprint)])
        if known and not {"version", "fingerprint"} <= set(known):
            raise StoreError(f"{self.path}: is a database, and no store of states")
        if known and int(known["version"]) > VERSION:
            raise StoreError(f"{self.path}: was written by a newer setstream (version {known['version']} of the store)")
        if known and known["fingerprint"] != fingerprint:
            raise MismatchError(
                f"{self.path}: holds states of another encoder (fingerprint {known['fingerprint']}) than this one "
                f"({fingerprint}): load the weights that made it, or begin a new store"
            )

    # -- one set ------------------------------------------------------------------------------------------------------

    def update(self, id: str, elements: Tensor) -> int:
        """Add elements (n, ...) to a set, which begins with them if it is new; gives how many it has now."""
        return self.merge(id, self._state_of(elements))

    def remove(self, id: str, elements: Tensor) -> int:
        """Take elements out of a set again; gives how many are left."""
        part = self._state_of(elements)
        with self._transaction() as database:
            rest = self._read(database, id) - part
            self._write(database, id, rest)
        return int(rest.count)

    def merge(self, id: str, other: State | str) -> int:
        """Add a state, or another set of the store, to a set; gives how many elements it has now. The other set stays."""
        if isinstance(other, State):
            self.encoder.check_state(other)
            if len(other) != 1:
                raise MismatchError(f"a store takes the state of one set at a time; got one of {len(other)} sets")
        with self._transaction() as database:
            part = other if isinstance(other, State) else self._read(database, other)
            before = self._find(database, id)
            whole = part if before is None else before + part
            self._write(database, id, whole)
        return int(whole.count)

    def get(self, id: str) -> State:
        """The state of a set."""
        with self._lock:
            return self._read(self._database(), id)

    @torch.no_grad()
    def predict(self, id: str) -> Any:
        """What the model says about a set now: the head's output, or z of an encoder alone."""
        return self.model.finalize(self.get(id))

    def forget(self, id: str) -> bool:
        """Drop a set; says whether it was there."""
        with self._transaction() as database:
            return database.execute("DELETE FROM states WHERE id = ?", (id,)).rowcount > 0

    def decay(self, id: str, factor: float) -> None:
        """Let what a set has seen so far weigh less: its state times a factor."""
        with self._transaction() as database:
            self._write(database, id, self._read(database, id) * factor)

    # -- all sets -----------------------------------------------------------------------------------------------------

    def fill(self, states: Iterable[tuple[str, State]]) -> None:
        """Write many states in one transaction, replacing those of the same ids."""
        with self._transaction() as database:
            for name, state in states:
                self._write(database, name, state)

    def __len__(self) -> int:
        return int(self._query("SELECT COUNT(*) FROM states")[0][0])

    def __contains__(self, id: object) -> bool:
        return bool(self._query("SELECT 1 FROM states WHERE id = ?", str(id)))

    def ids(self) -> list[str]:
        """The ids of all sets, in order."""
        return [row[0] for row in self._query("SELECT id FROM states ORDER BY id")]

    def count(self, id: str) -> int:
        """How many elements a set has seen; zero if there is no such set."""
        rows = self._query("SELECT count FROM states WHERE id = ?", id)
        return int(rows[0][0]) if rows else 0

    def close(self) -> None:
        """Close the file; another call opens it again."""
        with self._lock:
            if self._connection is not None:
                self._connection.close()
            self._connection = None

    def __enter__(self) -> StateStore:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- helpers ------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def _state_of(self, elements: Tensor) -> State:
        sets: Sets = [elements]
        return self.encoder.update(None, sets)

    def _database(self) -> sqlite3.Connection:
        """The connection of this process."""
        if self._connection is None:
            database = sqlite3.connect(self.path, timeout=self.wait, isolation_level=None, check_same_thread=False)
            try:
                database.execute("PRAGMA journal_mode = WAL")
            except sqlite3.DatabaseError as error:
                database.close()
                raise StoreError(f"{self.path}: is no store of states: {error}") from error
            database.execute("PRAGMA synchronous = FULL")  # a commit that returned is on the disk
            self._connection = database
        return self._connection

    def _query(self, statement: str, *values: str) -> list[Any]:
        with self._lock:
            return self._database().execute(statement, values).fetchall()

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        """All or nothing, and no other writer meanwhile."""
        with self._lock:
            database = self._database()
            try:
                database.execute("BEGIN IMMEDIATE")
            except sqlite3.OperationalError as error:
                if "locked" not in str(error):
                    raise
                raise StoreError(f"{self.path}: another process held it for more than {self.wait:.0f} s") from error
            try:
                yield database
            except BaseException:
                database.execute("ROLLBACK")
                raise
            database.execute("COMMIT")

    def _find(self, database: sqlite3.Connection, id: str) -> State | None:
        row = database.execute("SELECT state FROM states WHERE id = ?", (id,)).fetchone()
        return None if row is None else State.from_bytes(row[0]).to(self.encoder.home() or torch.device("cpu"))

    def _read(self, database: sqlite3.Connection, id: str) -> State:
        found = self._find(database, id)
        if found is None:
            raise StoreError(f"{self.path}: there is no set {id!r}")
        return found

    @staticmethod
    def _write(database: sqlite3.Connection, id: str, state: State) -> None:
        row = (id, int(state.count), state.to_bytes())
        database.execute("INSERT INTO states VALUES (?, ?, ?) ON CONFLICT (id) DO UPDATE SET count = ?2, state = ?3", row)
