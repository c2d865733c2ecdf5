"""Which WebSockets watch which set, and what they are sent.

Changes while a prediction is computed or sent count as one: a slow client misses steps in between, never the last.
"""

import asyncio
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from fastapi import WebSocket

PROTOCOL = "setstream"


async def accept(socket: WebSocket) -> None:
    """Accept a WebSocket, with our protocol if the client offers it (browsers send their token as another one)."""
    await socket.accept(PROTOCOL if PROTOCOL in socket.scope.get("subprotocols", []) else None)


class Watchers:
    """An event for each open WebSocket, by set. Everything here happens on the event loop."""

    def __init__(self, compute: Callable[[str], Coroutine[Any, Any, str]]) -> None:
        self._compute = compute
        self._events: dict[str, set[asyncio.Event]] = {}
        self._messages: dict[str, asyncio.Task[str]] = {}

    @contextmanager
    def watch(self, id: str) -> Iterator[asyncio.Event]:
        """An event that is set when the set changes, and at the start for its current value."""
        event = asyncio.Event()
        event.set()
        self._events.setdefault(id, set()).add(event)
        try:
            yield event
        finally:
            self._events[id].discard(event)
            if not self._events[id]:
                del self._events[id]

    async def message(self, id: str) -> str:
        """The message for all clients that watch a set: computed once between two changes."""
        task = self._messages.get(id)
        if task is None:
            task = self._messages[id] = asyncio.create_task(self._compute(id))
            task.add_done_callback(lambda done: self._messages.pop(id) if self._messages.get(id) is done else None)
        return await asyncio.shield(task)

    def notify(self, ids: Sequence[str]) -> None:
        """These sets have changed."""
        if self._events:
            for id in set(ids):
                self._messages.pop(id, None)  # it may have been read before the change
                for event in self._events.get(id, ()):
                    event.set()
