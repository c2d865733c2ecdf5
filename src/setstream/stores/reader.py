"""What can be read from a store: states and predictions by id and range of time, counts, ids."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch

from setstream.errors import ConfigurationError, MismatchError, SetstreamError, UnknownSetError
from setstream.models.encoder import SetEncoder
from setstream.models.model import SetModel
from setstream.states.state import State
from setstream.stores import checks
from setstream.stores.backend import Rows
from setstream.stores.cache import StateCache
from setstream.stores.ledger import Position, read_positions
from setstream.stores.tiles import TileRows


class StateReader:
    """The part of a `StateStore` that changes nothing."""

    model: SetModel | SetEncoder
    encoder: SetEncoder
    chunks: str | None
    rows: Rows
    narrow: bool
    tiles: TileRows | None
    _cache: StateCache

    def get(self, id: str, *, since: float | None = None, until: float | None = None) -> State:
        """The state of a set, or, in a store with tiles, of its elements with since <= t < until, as in `predict`."""
        if since is None and until is None:
            return self.parse(self.get_bytes(id))
        return self._tiled("since= and until=").state(checks.checked_id(id), since, until)

    def get_bytes(self, id: str) -> bytes:
        """The state of a set as it is stored: what `State.from_bytes` reads."""
        return bytes(self._columns(id, "state")[0])

    @torch.no_grad()
    def parse(self, data: bytes) -> State:
        """The state of one set in bytes that `State.to_bytes` wrote, checked and on the encoder's device."""
        state = State.from_bytes(data).to(self.encoder.device or torch.device("cpu"))
        self.check(state)
        return state.widened()  # after the check: what is widened has the right accumulators and types

    @torch.no_grad()
    def parse_batch(self, data: Sequence[bytes]) -> State:
        """`parse` of several, as one batch: they are read and checked together."""
        batch = checks.parse_batch(data).to(self.encoder.device or torch.device("cpu"))
        self.encoder.check_state(batch)
        return batch.widened()

    def describe(self, id: str) -> tuple[int, int]:
        """How many elements a set has seen, and how many bytes its state takes."""
        count, size = self._columns(id, "count, LENGTH(state)")
        return int(count), int(size)

    def predict(self, id: str, *, since: float | None = None, until: float | None = None) -> Any:
        """The model's prediction for a set now: the head's output, or z where the store has an encoder without a head.

        Args:
            id: The set.
            since: In a store with tiles: only elements with since <= t < until, in seconds since 1970; None: no bound. The
                range is widened to whole tiles, of the size that is kept at that time. Elements without a time are in no range.
            until: The end of the range, which is not part of it.
        """
        return self.count_and_prediction(id, since=since, until=until)[1]

    def count_and_prediction(self, id: str, *, since: float | None = None, until: float | None = None) -> tuple[int, Any]:
        """How many elements a set has seen, in a range as in `predict`, and the model's prediction for them."""
        whole = since is None and until is None
        state = self.parsed(id, self.get_bytes(id), keep=True) if whole else self.get(id, since=since, until=until)
        return int(state.count), self.finalize(state)

    @torch.no_grad()
    def finalize(self, state: State) -> Any:
        """The model's prediction for a state of this store."""
        return self.model.finalize(state, chunks=self.chunks)

    def parsed(self, name: str, data: bytes, keep: bool = False) -> State:
        """The state in the bytes of a set's row, from the cache if it is there; `keep`: put it there."""
        state = self._cache.get(name, data)
        if state is None:
            state = self.parse(data)
            self._cache.keep([(name, data, state)] if keep else [])
        return state

    def known(self, rows: Mapping[str, bytes]) -> dict[str, State]:
        """The states in the bytes of rows, from the cache or parsed together; those that cannot be read are left out."""
        states = {name: self._cache.get(name, data) for name, data in rows.items()}
        if unknown := [name for name, state in states.items() if state is None]:
            with suppress(SetstreamError):
                states |= zip(unknown, self.parse_batch([rows[name] for name in unknown]), strict=True)
        return {name: state for name, state in states.items() if state is not None}

    def check(self, part: State) -> None:
        """Raise MismatchError unless this is the state of one set, made by the store's encoder (`SetEncoder.check_state`)."""
        self.encoder.check_state(part)
        if len(part) != 1:
            raise MismatchError(f"a store takes the state of one set at a time; got one of {len(part)} sets")

    def position(self, source: str, partition: str = "") -> Position | None:
        """Where a consumer goes on: what the last `apply` with a cursor of this partition committed. None: there was none."""
        return self.positions(source).get(partition)

    def positions(self, source: str) -> dict[str, Position]:
        """The `position` of each partition of a source."""
        return read_positions(self.rows, source)

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

    def _tiled(self, what: str) -> TileRows:
        """The tiles, which `what` needs."""
        if self.tiles is None:
            raise ConfigurationError(f"{what} needs a store with tiles: open it with tile=, in seconds (3600 for hours)")
        return self.tiles

    def _columns(self, id: str, columns: str) -> Any:
        rows = self.rows.query(f"SELECT {columns} FROM {self.rows.states} WHERE id = %s", checks.checked_id(id))
        if not rows:
            raise self.unknown(id)
        return rows[0]

    def unknown(self, id: str) -> UnknownSetError:
        """The error for a set that is not there."""
        return UnknownSetError(f"{self.rows.place}: there is no set {id!r}")
