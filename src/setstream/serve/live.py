"""Who watches which set: a WebSocket waits for its bell, and sends the newest prediction when it rings.

Bells that ring while a prediction is computed or sent are one ring: a slow watcher misses steps in between, never the last.
"""

import asyncio
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from typing import Any


class Watchers:
    """The bells of all open WebSockets, by set. Everything here happens on the event loop."""

    def __init__(self) -> None:
        self._bells: dict[str, set[asyncio.Event]] = {}
        self._messages: dict[str, asyncio.Task[str]] = {}

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

    async def message(self, id: str, compute: Callable[[str], Coroutine[Any, Any, str]]) -> str:
        """What all who watch a set are to be told: computed once for those who ask between two changes."""
        task = self._messages.get(id)
        if task is None:
            task = self._messages[id] = asyncio.create_task(compute(id))

            def forget(done: asyncio.Task[str]) -> None:
                if self._messages.get(id) is done:
                    del self._messages[id]

            task.add_done_callback(forget)
        return await asyncio.shield(task)

    def ring(self, ids: Sequence[str]) -> None:
        """These sets have changed."""
        if self._bells:
            for id in set(ids):
                self._messages.pop(id, None)  # what is being computed may have been read before the change
                for bell in self._bells.get(id, ()):
                    bell.set()
