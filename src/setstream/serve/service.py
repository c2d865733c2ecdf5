"""What the routes ask for: a store, the thread that writes to it, threads that read, and those who watch."""

import asyncio
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import torch
from torch import Tensor

from setstream.errors import DataError, SetstreamError, ShapeError, StoreError
from setstream.serve.answers import as_json
from setstream.serve.bodies import parse_elements
from setstream.serve.live import Watchers
from setstream.serve.log import logger
from setstream.serve.metrics import Metrics
from setstream.serve.options import Options
from setstream.serve.writer import Writer
from setstream.states.state import State
from setstream.stores.store import Changed, StateStore

# Bodies up to this size are parsed where they arrive: handing them to a thread would take longer.
SMALL = 2**14
# Seconds after which a server counts the sets anew: others may share its store.
RECOUNT = 10.0
# Seconds that the store has to show that it is there.
PULSE = 2.0

T = TypeVar("T")


class Service:
    """A model and its store, without HTTP. Made on the event loop that it works for."""

    def __init__(self, store: StateStore, options: Options, metrics: Metrics) -> None:
        self.store, self.options, self.metrics = store, options, metrics
        self.watchers = Watchers()
        self.visitors = 0  # of the playground, now
        self.writer = Writer(store, options.max_sets, metrics, self.watchers.ring)
        self._readers = ThreadPoolExecutor(max(2, os.cpu_count() or 1), "setstream-reader")
        self._guests = ThreadPoolExecutor(1, "setstream-playground")
        self._pulse = ThreadPoolExecutor(1, "setstream-health")
        self._checking: asyncio.Future[Any] | None = None
        self._counting = asyncio.create_task(self._recount())

    async def close(self) -> None:
        """Finish every change that waits, then close the store."""
        self._counting.cancel()
        await asyncio.to_thread(self.writer.close)
        self._guests.shutdown(wait=False, cancel_futures=True)
        self._pulse.shutdown(wait=False, cancel_futures=True)
        self._readers.shutdown()
        self.store.close()

    async def run_in_reader(self, work: Callable[..., T], *values: Any) -> T:
        """Do something that takes time in a thread, so that the event loop goes on."""
        return await asyncio.get_running_loop().run_in_executor(self._readers, work, *values)

    async def beside(self, work: Callable[..., T], *values: Any) -> T:
        """The same for visitors of the playground, one after another: they must not hold up who asks about sets."""
        return await asyncio.get_running_loop().run_in_executor(self._guests, work, *values)

    # -- changes ------------------------------------------------------------------------------------------------------

    async def append(self, id: str, kind: str, body: bytes) -> Changed:
        """Add the elements in a body to a set."""
        given = kind, body, self.options.max_elements
        elements: Tensor = parse_elements(*given) if len(body) <= SMALL else await self.run_in_reader(parse_elements, *given)
        try:
            done = await self.writer.submit(id, elements)
        except ShapeError as error:
            width = self.store.encoder.width()
            if width is None:
                raise
            came = f"lists of shape {tuple(elements.shape[1:])}" if elements.dim() > 1 else "single numbers"
            raise DataError(
                f"each element must be {width} numbers, as in [[...], [...]]; those that came are {came}"
            ) from error
        self.metrics.elements.inc(len(elements))
        return done

    async def upload(self, id: str, body: bytes, replace: bool) -> Changed:
        """Add a state that was made elsewhere, or put it in the place of a set's."""
        return await self.writer.submit(id, await self.run_in_reader(self._state_in, body), replace)

    async def merge(self, id: str, other: str) -> Changed:
        """Add another set of the store."""
        return await self.writer.submit(id, other)

    async def forget(self, id: str) -> bool:
        """Drop a set."""
        was_there = await self.run_in_reader(self.store.forget, id)
        if was_there:
            self.writer.count_sets(-1)
            self.watchers.ring([id])
        return was_there

    async def check_store(self) -> None:
        """Raise StoreError unless the store answers soon. One question at a time, in a thread where nothing else waits."""
        if self._checking is None or self._checking.done():
            ask = self.store.rows.query
            self._checking = asyncio.get_running_loop().run_in_executor(self._pulse, ask, "SELECT 1")
        checking = self._checking
        done, _ = await asyncio.wait({checking}, timeout=PULSE)
        if not done:
            raise StoreError(f"the store has not answered for {PULSE:g} s")
        if (error := checking.exception()) is not None:
            raise StoreError(f"the store does not answer: {error}") from error

    # -- questions ----------------------------------------------------------------------------------------------------

    async def predict(self, id: str) -> tuple[int, Any]:
        """How many elements a set has, and what the model says about it."""
        return await self.run_in_reader(self._predict, id)

    def _predict(self, id: str) -> tuple[int, Any]:
        state = self.store.get(id)
        return int(state.count), as_json(self.store.finalize(state))

    def _state_in(self, body: bytes) -> State:
        state = State.from_bytes(body).to(self.store.encoder.device or "cpu")
        with torch.no_grad():
            self.store.check(state)
        return state

    async def _recount(self) -> None:
        pause = RECOUNT
        while True:
            await asyncio.sleep(pause)
            began = time.monotonic()
            try:
                await self.run_in_reader(self.writer.recount)
            except SetstreamError as error:  # it cannot be reached now
                logger.warning("recount", extra={"facts": {"problem": str(error)}})
            pause = max(RECOUNT, 20 * (time.monotonic() - began))  # to count a million sets may take a second
