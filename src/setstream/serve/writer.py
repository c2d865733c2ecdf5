"""One thread that encodes and commits, for all requests.

    take everything that waits  ->  one encoder.update over all of it  ->  one transaction  ->  answer all

A commit that is on the disk costs milliseconds, and a small update of a network costs as much as one of a hundred sets. So
requests that arrive while the writer is busy wait together, and share the next round: no timer is involved, and the
busier the server, the cheaper a request. Nothing is answered before its commit has returned. Changes of one set are made one
after another, in the order in which they arrived.
"""

import asyncio
import queue
import threading
from collections.abc import Callable, Sequence
from itertools import compress
from typing import NamedTuple

from torch import Tensor

from setstream.errors import SetstreamError
from setstream.serve.guard import Metrics
from setstream.states.state import State
from setstream.stores.encoding import encode_all
from setstream.stores.store import Change, Changed, StateStore

# The limits of a round: a larger one is hardly cheaper, and its first change waits for the last.
ROUND_CHANGES, ROUND_ELEMENTS = 256, 2**16


class Request(NamedTuple):
    """A change that a client asks for: elements to encode, a state, or the id of another set; see `Change`."""

    id: str
    part: Tensor | State | str
    replace: bool = False
    tile: int | None = None  # where it goes, in a store with tiles
    key: str | None = None
    digest: str = ""

    def change(self, part: State | str) -> Change:
        """The change, with its elements encoded."""
        tiles = {self.tile: part} if self.tile is not None and isinstance(part, State) else None
        return Change(self.id, part, self.replace, tiles, self.key, self.digest)


class Pending(NamedTuple):
    """A request that waits for its commit."""

    request: Request
    future: asyncio.Future[Changed]
    elements: int  # that it has to encode


class Writer:
    """The thread. `changed` is called on the event loop with the ids of each round, after its commit."""

    def __init__(self, store: StateStore, max_sets: int, metrics: Metrics, changed: Callable[[Sequence[str]], None]) -> None:
        self.store, self.max_sets, self.metrics, self.changed = store, max_sets, metrics, changed
        self.sets = len(store)
        self._waiting: queue.SimpleQueue[Pending | None] = queue.SimpleQueue()
        self._sets_lock = threading.Lock()
        self._loop = asyncio.get_running_loop()
        self._thread = threading.Thread(target=self._work, name="setstream-writer", daemon=True)
        self._thread.start()

    async def submit(self, request: Request) -> Changed:
        """Make a change; returns its result when it is committed."""
        future: asyncio.Future[Changed] = self._loop.create_future()
        self._waiting.put(Pending(request, future, len(request.part) if isinstance(request.part, Tensor) else 0))
        return await future

    def count_sets(self, change: int) -> None:
        """Count the sets that this server creates and deletes; `recount` adds the changes of other servers."""
        with self._sets_lock:
            self.sets = max(0, self.sets + change)

    def recount(self) -> None:
        """Ask the store how many sets there are."""
        self.sets = len(self.store)

    def close(self) -> None:
        """Finish all waiting changes, and stop."""
        self._waiting.put(None)
        self._thread.join()

    def _work(self) -> None:
        while (pending := self._waiting.get()) is not None:
            changes, elements = [pending], pending.elements
            while len(changes) < ROUND_CHANGES and elements < ROUND_ELEMENTS and not self._waiting.empty():
                pending = self._waiting.get()
                if pending is None:  # this round first
                    self._waiting.put(None)
                    break
                changes.append(pending)
                elements += pending.elements
            results = self._round(changes)
            self.metrics.rounds.observe(len(changes))
            self._loop.call_soon_threadsafe(self._answer, changes, results)

    def _round(self, pending: list[Pending]) -> Sequence[Changed | BaseException]:
        results: dict[int, Changed | BaseException] = {}
        changes: dict[int, Change] = {}
        try:
            for place, part in enumerate(encode_all(self.store, [one.request.part for one in pending])):
                if isinstance(part, SetstreamError):
                    results[place] = part
                else:
                    changes[place] = pending[place].request.change(part)
            applied = self.store.apply(list(changes.values()), room=self.max_sets - self.sets) if changes else []
            self.count_sets(sum(isinstance(result, Changed) and result.began for result in applied))
            results |= zip(changes, applied, strict=True)
            return [results[place] for place in range(len(pending))]
        except BaseException as error:  # the thread goes on, and every request gets its answer
            return [results.get(place, error) for place in range(len(pending))]

    def _answer(self, pending: list[Pending], results: Sequence[Changed | BaseException]) -> None:
        for change, result in zip(pending, results, strict=True):
            if change.future.done():  # its client left; the change is still made
                continue
            if isinstance(result, Changed):
                change.future.set_result(result)
            else:
                change.future.set_exception(result)
        made = [isinstance(result, Changed) and not result.replayed for result in results]
        self.changed([change.request.id for change in compress(pending, made)])
