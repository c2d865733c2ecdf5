"""States that are kept parsed, so that a set that is read or changed again is not parsed again."""

from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import Any

from setstream.states.serialization import header_of
from setstream.states.state import State

# Bytes of the states that are kept parsed: the latest half, and the half before it.
CACHE_BYTES = 2**26


class StateCache:
    """Parsed states by id; `lock` guards them. States that were summed or read together share memory: they leave together."""

    def __init__(self, lock: AbstractContextManager[Any]) -> None:
        self._lock = lock
        self._new: dict[str, tuple[bytes, State]] = {}
        self._old, self._bytes = self._new, 0

    def keep(self, rows: Iterable[tuple[str, bytes, State]]) -> None:
        """Keep states with the bytes that they were parsed from, or became."""
        with self._lock:
            for name, data, state in rows:
                self._new[name] = header_of(data), state
                self._bytes += len(data)
            if self._bytes > CACHE_BYTES // 2:
                self._old, self._new, self._bytes = self._new, {}, 0

    def get(self, name: str, data: bytes) -> State | None:
        """The state in a row's bytes, if one with the same header, which holds a checksum, is kept."""
        with self._lock:
            header, state = self._new.get(name) or self._old.get(name) or (b"", None)
        return state if header == header_of(data) else None
