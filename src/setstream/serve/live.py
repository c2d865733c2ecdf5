"""Who watches which set: a WebSocket waits for its bell, and sends the newest prediction when it rings.

Bells that ring while a prediction is computed or sent are one ring: a slow watcher misses steps in between, never the last.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager


class Watchers:
    """The bells of all open WebSockets, by set. Everything here happens on the event loop."""

    def __init__(self) -> None:
        self._bells: dict[str, set[asyncio.Event]] = {}

    @contextmanager
    def watch(self, id: str) -> Iterator[asyncio.Event]:
        """A bell that rings when the set changes; it has rung once, for what is there already."""
        bell = asyncio.Event()
        bell.set()
        self._bells.setdefault(id, set()).add(bell)
        try:
            yield bell
        finally:
            self._bells[id].discard(bell)
            if not self._bells[id]:
                del self._bells[id]

    def ring(self, ids: Sequence[str]) -> None:
        """These sets have changed."""
        if self._bells:
            for id in set(ids):
                for bell in self._bells.get(id, ()):
                    bell.set()
