"""What the routes call: a store, the thread that writes to it, threads that read, and the WebSockets that watch.

Changes while a prediction is computed or sent count as one: a slow watcher misses steps in between, never the last.
"""

import asyncio
import hashlib
import os
import time as clock
from collections.abc import Callable, Coroutine, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

from fastapi import WebSocket

from setstream.errors import ConfigurationError, DataError, SetstreamError, ShapeError, StoreError, UnknownSetError
from setstream.serve.answers import InProgress, Prediction, PredictionRequest, Predictions, Problem, as_json, message_of
from setstream.serve.bodies import parse_elements
from setstream.serve.guard import Metrics, logger
from setstream.serve.options import Options
from setstream.serve.writer import Request, Writer
from setstream.stores.store import Changed, StateStore

# Bodies up to this size are parsed on the event loop: passing them to a thread would take longer.
SMALL = 2**14
# Seconds after which a server counts the sets anew: others may share its store.
RECOUNT = 10.0
# Seconds, at least, between two runs of `StateStore.expire`: at the start, then once per tile, and at least once per hour.
EXPIRE = 60.0
# Seconds within which the store must answer a health check.
PULSE = 2.0

PROTOCOL = "setstream"
T = TypeVar("T")


async def accept(socket: WebSocket) -> None:
    """Accept a WebSocket, with our protocol if the client offers it (browsers send their token as another one)."""
    await socket.accept(PROTOCOL if PROTOCOL in socket.scope.get("subprotocols", []) else None)


class Watchers:
    """An event for each open WebSocket, by set. Everything here happens on the event loop."""

    def __init__(self, compute: Callable[[str, float | None], Coroutine[Any, Any, str]]) -> None:
        self._compute = compute
        self._events: dict[str, set[asyncio.Event]] = {}
        self._messages: dict[tuple[str, float | None], asyncio.Task[str]] = {}

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

    async def message(self, id: str, last: float | None) -> str:
        """The message for all clients that watch a set, or its last seconds: computed once between two changes."""
        key = id, last
        task = self._messages.get(key)
        if task is None:
            task = self._messages[key] = asyncio.create_task(self._compute(id, last))
            task.add_done_callback(lambda done: self._messages.pop(key) if self._messages.get(key) is done else None)
        return await asyncio.shield(task)

    def notify(self, ids: Sequence[str]) -> None:
        """These sets have changed."""
        if self._events:
            changed = set(ids)
            for key in [key for key in self._messages if key[0] in changed]:
                del self._messages[key]  # it may have been read before the change
            for id in changed:
                for event in self._events.get(id, ()):
                    event.set()


class Service:
    """A model and its store, without HTTP. Must be created on its event loop."""

    def __init__(self, store: StateStore, options: Options, metrics: Metrics, name: str) -> None:
        self.store, self.options, self.metrics, self.name = store, options, metrics, name
        classes = store.model.options.get("classes")
        self.classes: list[Any] | None = classes if isinstance(classes, list) else None
        self.watchers = Watchers(self._message)
        self._in_progress: set[tuple[str, str]] = set()  # ids and keys of changes
        self.visitors = 0  # of the playground, now
        self.writer = Writer(store, options.max_sets, metrics, self.watchers.notify)
        self._readers = ThreadPoolExecutor(max(2, os.cpu_count() or 1), "setstream-reader")
        # Visitors of the playground are answered one after another: they must not delay requests about sets.
        self.playground = ThreadPoolExecutor(1, "setstream-playground")
        self._health = ThreadPoolExecutor(1, "setstream-health")
        self._checking: asyncio.Future[Any] | None = None
        tile = 3600.0 if store.tiles is None else store.tiles.tiling.tile
        self._repeated = [
            asyncio.create_task(self._repeat("recount", self.writer.recount, RECOUNT, RECOUNT)),
            asyncio.create_task(self._repeat("expire", store.expire, 0.0, min(3600.0, max(EXPIRE, tile)))),
        ]

    async def close(self) -> None:
        """Finish all waiting changes, then close the store."""
        for task in self._repeated:
            task.cancel()
        await asyncio.to_thread(self.writer.close)
        for pool in (self.playground, self._health):
            pool.shutdown(wait=False, cancel_futures=True)
        self._readers.shutdown()
        self.store.close()

    async def run_in_reader(self, work: Callable[..., T], *values: Any) -> T:
        """Run a slow function in a thread, so that the event loop goes on."""
        return await asyncio.get_running_loop().run_in_executor(self._readers, work, *values)

    async def append(self, id: str, kind: str, body: bytes, key: str | None = None, time: float | None = None) -> Changed:
        """Add the elements in a body to a set."""
        parse = partial(parse_elements, kind, body, self.options.max_elements)
        elements = parse() if len(body) <= SMALL else await self.run_in_reader(parse)
        try:
            result = await self.submit(Request(id, elements, tile=self.tile(time, now=True)), key, kind, body, time)
        except ShapeError as error:
            if (width := self.store.encoder.width()) is None:
                raise
            shape = f"lists of shape {tuple(elements.shape[1:])}" if elements.dim() > 1 else "single numbers"
            raise DataError(f"each element must be {width} numbers, as in [[...], [...]]; got {shape}") from error
        self.metrics.elements.inc(0 if result.replayed else len(elements))
        return result

    async def upload(self, id: str, body: bytes, replace: bool, key: str | None = None, time: float | None = None) -> Changed:
        """Add a state that was made elsewhere, or replace the set by it."""
        part = await self.run_in_reader(self.store.parse, body)
        kind = "replacement" if replace else "state"
        return await self.submit(Request(id, part, replace, self.tile(time)), key, kind, body, time)

    async def submit(self, request: Request, key: str | None, kind: str, body: bytes, time: float | None = None) -> Changed:
        """Make a change; with a key, once: the contents are recognised by their kind, bytes and time."""
        if key is None:
            return await self.writer.submit(request)
        if (request.id, key) in self._in_progress:
            raise InProgress(f"a request with the key {key!r} is in progress: wait for its answer, or repeat it later")
        self._in_progress.add((request.id, key))
        try:
            digest = hashlib.blake2b(repr((kind, time)).encode() + body, digest_size=16).hexdigest()
            return await self.writer.submit(request._replace(key=key, digest=digest))
        finally:
            self._in_progress.discard((request.id, key))

    def tile(self, time: float | None, now: bool = False) -> int | None:
        """The tile of a time. Without one: of now, where elements are added; none, where a state is."""
        tiles = self.store.tiles
        if tiles is None and time is not None:
            raise ConfigurationError("this server keeps no times: leave them out, or start it with --tile 3600")
        if tiles is None or (time is None and not now):
            return None
        return tiles.tiling.number(time)

    async def delete(self, id: str) -> None:
        """Delete a set."""
        if not await self.run_in_reader(self.store.delete, id):
            raise UnknownSetError(f"store: there is no set {id!r}")
        self.writer.count_sets(-1)
        self.watchers.notify([id])

    async def check_store(self) -> None:
        """Raise StoreError unless the store answers soon. One query at a time, in a thread that does nothing else."""
        if self._checking is None or self._checking.done():
            self._checking = asyncio.wrap_future(self._health.submit(self.store.rows.query, "SELECT 1"))
        done, _ = await asyncio.wait({checking := self._checking}, timeout=PULSE)
        if not done:
            raise StoreError(f"the store has not answered within {PULSE:g} s")
        if (error := checking.exception()) is not None:
            raise StoreError(f"the store does not answer: {error}") from error

    async def predict(self, id: str, since: float | None = None, until: float | None = None) -> Prediction:
        """The model's prediction for a set, or for a range of time."""
        return await self.run_in_reader(self._predict, id, since, until)

    def state(self, id: str, since: float | None, until: float | None) -> bytes:
        """The state of a set, or of a range of time, as bytes."""
        whole = since is None and until is None
        return self.store.get_bytes(id) if whole else self.store.get(id, since=since, until=until).to_bytes()

    async def predict_all(self, wanted: PredictionRequest) -> Predictions:
        """The model's predictions for several sets."""
        found = await self.run_in_reader(lambda: [self._known(id, wanted.since, wanted.until) for id in wanted.ids])
        return Predictions(predictions=found)

    def _known(self, id: str, since: float | None = None, until: float | None = None) -> Prediction:
        """The prediction for a set; null if there is no such set."""
        try:
            return self._predict(id, since, until)
        except UnknownSetError:
            return Prediction(id=id, count=0, prediction=None)

    def _predict(self, id: str, since: float | None, until: float | None) -> Prediction:
        count, output = self.store.count_and_prediction(id, since=since, until=until)
        return Prediction(id=id, count=count, prediction=as_json(output), classes=self.classes)

    async def _message(self, id: str, last: float | None) -> str:
        """What a WebSocket is sent about a set, or about its last seconds."""
        try:
            since = None if last is None else clock.time() - last
            answer: Prediction | Problem = await self.run_in_reader(self._known, id, since)
        except SetstreamError as error:
            answer = Problem(detail=message_of(error))
        return answer.model_dump_json()

    async def _repeat(self, name: str, work: Callable[[], Any], pause: float, seconds: float) -> None:
        """Do some work after a pause and again and again, at most a twentieth of the time: a million sets may take a second."""
        while True:
            await asyncio.sleep(pause)
            began = clock.monotonic()
            try:
                await self.run_in_reader(work)
            except SetstreamError as error:  # the store cannot be reached now
                logger.warning(name, extra={"facts": {"problem": str(error)}})
            pause = max(seconds, 20 * (clock.monotonic() - began))
