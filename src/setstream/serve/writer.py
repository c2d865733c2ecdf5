"""One thread that encodes and commits, for all requests.

    take everything that waits  ->  one encoder.update over all of it  ->  one transaction  ->  answer all

A commit that is on the disk costs milliseconds, and a small update of a network costs as much as one of a hundred sets. So
requests that arrive while the writer is at work wait together, and share the next round: nobody waits for a timer, and the
busier the server, the cheaper a request. Nothing is answered before its commit has returned. Changes of one set are made one
after another, in the order in which they came.
"""

import asyncio
import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from setstream.errors import SetstreamError, ShapeError, StoreError
from setstream.serve.metrics import Metrics
from setstream.states.state import State
from setstream.stores.store import Change, Changed, StateStore

# The most that shares a round: a larger one is hardly cheaper, and the first in it waits for the last.
ROUND_CHANGES, ROUND_ELEMENTS = 256, 2**16

Answer = Changed | BaseException


@dataclass
class Asked:
    """A change that waits: elements to encode, a state, or the id of another set."""

    id: str
    part: Tensor | State | str
    replace: bool
    future: asyncio.Future[Changed]

    @property
    def elements(self) -> int:
        """How many elements are to be encoded for it."""
        return len(self.part) if isinstance(self.part, Tensor) else 0


class Writer:
    """The thread. `changed` is called on the event loop with the ids of each round, after its commit."""

    def __init__(
        self, store: StateStore, max_sets: int, metrics: Metrics, changed: Callable[[Sequence[str]], None] | None = None
    ) -> None:
        self.store, self.max_sets, self.metrics, self.changed = store, max_sets, metrics, changed
        self.sets = len(store)
        self._waiting: queue.SimpleQueue[Asked | None] = queue.SimpleQueue()
        self._sets_lock = threading.Lock()
        self._loop = asyncio.get_running_loop()
        self._thread = threading.Thread(target=self._work, name="setstream-writer", daemon=True)
        self._thread.start()

    async def submit(self, id: str, part: Tensor | State | str, replace: bool = False) -> Changed:
        """Make a change; returns when it is committed."""
        future: asyncio.Future[Changed] = self._loop.create_future()
        self._waiting.put(Asked(id, part, replace, future))
        return await future

    def count_sets(self, change: int) -> None:
        """Keep the number of sets in step with what this server does; several servers each count anew now and then."""
        with self._sets_lock:
            self.sets = max(0, self.sets + change)

    def recount(self) -> None:
        """Ask the store how many sets there are."""
        self.sets = len(self.store)

    def close(self) -> None:
        """Finish what waits, and stop."""
        self._waiting.put(None)
        self._thread.join()

    # -- in the thread ------------------------------------------------------------------------------------------------

    def _work(self) -> None:
        going = True
        while going:
            first = self._waiting.get()
            if first is None:
                return
            asked, elements = [first], first.elements
            while len(asked) < ROUND_CHANGES and elements < ROUND_ELEMENTS:
                try:
                    more = self._waiting.get_nowait()
                except queue.Empty:
                    break
                if more is None:
                    going = False
                    break
                asked.append(more)
                elements += more.elements
            answers = self._round(asked)
            self.metrics.rounds.observe(len(asked))
            self._loop.call_soon_threadsafe(self._answer, asked, answers)

    def _round(self, asked: list[Asked]) -> list[Answer]:
        answers: list[Answer | None] = [None] * len(asked)
        try:
            changes: list[tuple[int, Change]] = []
            for place, part in enumerate(encode_all(self.store, [own.part for own in asked])):
                if isinstance(part, SetstreamError):
                    answers[place] = part
                else:
                    changes.append((place, Change(asked[place].id, part, asked[place].replace)))
            if changes:
                done = self.store.apply([change for _, change in changes], room=self.max_sets - self.sets)
                self.count_sets(sum(isinstance(own, Changed) and own.began for own in done))
                for (place, _), own in zip(changes, done, strict=True):
                    answers[place] = own
        except BaseException as error:  # the thread lives on, and every request gets its answer
            answers = [own or error for own in answers]
        return [own or StoreError("no answer") for own in answers]

    def _answer(self, asked: list[Asked], answers: list[Answer]) -> None:
        for own, answer in zip(asked, answers, strict=True):
            if own.future.done():  # its client went away; the change is made all the same
                continue
            if isinstance(answer, BaseException):
                own.future.set_exception(answer)
            else:
                own.future.set_result(answer)
        if self.changed is not None:
            self.changed([own.id for own, answer in zip(asked, answers, strict=True) if isinstance(answer, Changed)])


def encode_all(store: StateStore, parts: Sequence[Tensor | State | str]) -> list[State | str | SetstreamError]:
    """Elements as states, those of one shape and type in one update; an error in the place of what cannot be encoded."""
    encoded: dict[int, State | SetstreamError] = {}
    groups: dict[tuple[object, ...], dict[int, Tensor]] = {}
    for place, part in enumerate(parts):
        if isinstance(part, Tensor) and len(part):
            groups.setdefault((part.dtype, part.shape[1:]), {})[place] = part
        elif isinstance(part, Tensor):
            encoded[place] = store.encoder.empty(1)
    for group in groups.values():
        states = _encode(store, list(group.values()))
        if isinstance(states[0], SetstreamError):  # at least one of them is bad
            states = [_encode(store, [tensor])[0] for tensor in group.values()]
        encoded |= zip(group, states, strict=True)
    return [part if not isinstance(part, Tensor) else encoded[place] for place, part in enumerate(parts)]


@torch.no_grad()
def _encode(store: StateStore, tensors: list[Tensor]) -> Sequence[State | SetstreamError]:
    """A state for each tensor, or one error."""
    device = store.encoder.device
    try:
        return list(store.encoder.update(None, [tensor.to(device) if device else tensor for tensor in tensors]))
    except SetstreamError as error:
        return [error]
    except (RuntimeError, IndexError, ValueError, TypeError) as error:  # of phi, for elements that it cannot read
        shape, kind = tuple(tensors[0].shape[1:]), str(tensors[0].dtype).removeprefix("torch.")
        reason = str(error).partition("\n")[0]
        return [ShapeError(f"the model cannot read elements of shape {shape} and type {kind}: {reason}")]
