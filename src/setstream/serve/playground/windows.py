"""The tab of events: a window of the last seconds slides over a stream of events, for pools that cannot subtract.

    live       ss.Window: the window ends at the newest second           Σ states of its seconds
    the past   StateStore with tiles: since <= t < until                 Σ few rows
    scratch    the model on the events of the window alone               what both must equal
    subtract   state of all events before `until`, less those before `since`: what only a mean can always do

An event is a machine's report of its load: (load, one-hot of the machine), at a time. Attention looks at the highest loads,
with weights exp(SHARPNESS · load); its answer, the maximum's and the mean's are a load and a number for each machine.
"""

import weakref
from collections.abc import Sequence
from contextlib import ExitStack
from functools import cache
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import torch
from pydantic import Field, validate_call
from torch import Tensor, nn

from setstream.errors import DataError, PrecisionError, RemovalError
from setstream.models.encoder import SetEncoder
from setstream.models.model import SetModel
from setstream.models.window import Window
from setstream.pools.base import Pool
from setstream.pools.deepsets import DeepSets
from setstream.pools.parallel import Parallel
from setstream.pools.umbc import UMBC
from setstream.serve.playground.tabs import Seed
from setstream.states.state import State
from setstream.stores.store import StateStore

SECONDS, LONGEST, MACHINES = 120, 60, 4
SHARPNESS = 25.0
MOST_EVENTS = 2048
#: Of a simulated stream: reports of low loads, incidents, and reports of each.
QUIET, INCIDENTS, REPORTS = 500, 8, 16
#: The set's id in the visitor's own store.
ID = "events"
Second = Annotated[int, Field(ge=0, le=SECONDS)]
Length = Annotated[int, Field(ge=1, le=LONGEST)]
Time = Annotated[float, Field(ge=0, lt=SECONDS, allow_inf_nan=False)]
Load = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]
Event = tuple[Time, Load, Annotated[int, Field(ge=0, lt=MACHINES)]]


class Features(nn.Module):
    """An event (load, machine) as (load, machine, load · machine)."""

    def forward(self, event: Tensor) -> Tensor:
        load, machine = event[..., :1], event[..., 1:]
        return torch.cat([load, machine, load * machine], dim=-1)


class Answers(nn.Module):
    """What each pool says, (B, 3, 1 + MACHINES): a load, and for each machine its share of the weight, or its highest load."""

    def forward(self, z: dict[str, Tensor]) -> Tensor:
        highest = torch.cat([z["maximum"][:, :1], z["maximum"][:, 1 + MACHINES :]], dim=1)
        return torch.stack([z["attention"][:, 0, : 1 + MACHINES], highest, z["mean"][:, : 1 + MACHINES]], dim=1)


def sharp_attention(width: int, sharpness: float) -> UMBC:
    """One slot that weighs features by exp(sharpness · first feature), and returns their mean."""
    pool = UMBC(width, num_slots=1, slot_norm=False, bias=False)
    with torch.no_grad():
        for linear in (pool.query, pool.key, pool.value):
            linear.weight.copy_(torch.eye(width))
        pool.slots.mean.copy_(torch.eye(width)[:1] * sharpness * width**0.5)
    return pool


@cache
def load() -> tuple[SetModel, dict[str, SetModel]]:
    """The model of all three pools, and a model of each alone."""
    pools: dict[str, Pool] = {"attention": sharp_attention(1 + 2 * MACHINES, SHARPNESS)}
    pools |= {"maximum": DeepSets("max"), "mean": DeepSets("mean")}
    alone = {name: SetModel(SetEncoder(Features(), pool), nn.Identity()).eval() for name, pool in pools.items()}
    return SetModel(SetEncoder(Features(), Parallel(**pools)), Answers()).eval(), alone


def simulate(seed: int) -> list[Event]:
    """Reports of machines at random times: low loads, and incidents that begin at once, are reported often, and fade away."""
    generator = torch.Generator().manual_seed(seed)

    def uniform(low: float, high: float, *shape: int) -> Tensor:
        return low + (high - low) * torch.rand(*shape, generator=generator, dtype=torch.float64)

    begins, fades, heights = uniform(2, SECONDS - 2, INCIDENTS), uniform(1, 4, INCIDENTS), uniform(0.5, 1, INCIDENTS)
    later = fades[:, None] * uniform(0, 2, INCIDENTS, REPORTS)
    loads = heights[:, None] * torch.exp(-later / fades[:, None]) + uniform(-0.06, 0.06, INCIDENTS, REPORTS)
    struck = torch.randint(MACHINES, (INCIDENTS, 1), generator=generator).expand(-1, REPORTS)
    times = torch.cat([uniform(0, SECONDS, QUIET), (begins[:, None] + later).flatten()])
    loads = torch.cat([uniform(0.03, 0.22, QUIET), loads.flatten()]).clamp(0.03, 1).float()
    machines = torch.cat([torch.randint(MACHINES, (QUIET,), generator=generator), struck.flatten()])
    order = [place for place in times.argsort().tolist() if times[place] < SECONDS]
    return list(zip(times[order].tolist(), loads[order].tolist(), machines[order].tolist(), strict=True))


class Events:
    """One visitor's events, and the states of what has arrived: all events before the second `now`."""

    def __init__(self) -> None:
        self.model, self.alone = load()
        left = ExitStack()  # what is cleaned up when the visitor has left
        folder = left.enter_context(TemporaryDirectory(prefix="setstream-playground-"))
        self.store = left.enter_context(StateStore(f"{folder}/states.db", self.model, tile=1))
        weakref.finalize(self, left.close)
        self.simulate()

    @validate_call
    def simulate(self, seed: Seed = 0) -> dict[str, Any]:
        """Begin a stream of events, (time, load, machine), of which none has arrived."""
        events = simulate(seed)
        self.times, self.elements = _tensors(events)
        self.now, self.window = 0, self._new_window()
        self.store.delete(ID)
        return {"events": events, "seconds": SECONDS}

    @validate_call
    def report(self, events: Annotated[list[Event], Field(min_length=1, max_length=MOST_EVENTS)]) -> dict[str, Any]:
        """Add events. Those of seconds that have passed arrive now, late; answers how many these are."""
        if len(self.times) + len(events) > MOST_EVENTS:
            raise DataError(f"a stream has at most {MOST_EVENTS} events here")
        times, elements = _tensors(events)
        late = times < self.now
        if late.any():
            self.window.update(elements[late][None], times[late])
            self.store.update(ID, elements[late], time=times[late])
        self.times, self.elements = torch.cat([self.times, times]), torch.cat([self.elements, elements])
        return {"late": int(late.sum())}

    @validate_call
    def advance(self, to: Second, length: Length) -> dict[str, Any]:
        """Let events arrive, second by second; answers what the window said at the end of each."""
        if to <= self.now:
            raise DataError(f"events have arrived up to second {self.now}: a stream goes on from there; got {to}")
        states, arrive = self._slide(self.window, self.now, to, length), self._between(self.now, to)
        if arrive.any():
            self.store.update(ID, self.elements[arrive], time=self.times[arrive])
        self.now = to
        return {"now": to, "arrived": int(self._between(0, to).sum()), "curve": self._answers(states)}

    @validate_call
    def look(self, length: Length, until: Second) -> dict[str, Any]:
        """What the models say about the seconds before `until`, whether that is what the events alone give, and each weight."""
        if not 0 < until <= self.now:
            raise DataError(f"events have arrived up to second {self.now}: a window ends in second 1 to there; got {until}")
        since = max(0, until - length)
        inside = self._between(since, until)
        answer = {"since": since, "until": until, "live": until == self.now, "count": 0, "models": {}, "weights": []}
        if not inside.any():
            return answer
        state = self.window.last(length) if until == self.now else self.store.get(ID, since=since, until=until)
        chunk = self.elements[inside][None]
        with torch.no_grad():
            said, scratch = self.model.finalize(state)[0], self.model(chunk)[0]
            weights = self.model.encoder.attention(chunk, state)["attention"].flatten()
        apart = (said - scratch).abs().amax(1)
        models = {
            name: {"answer": said[row].tolist(), "apart": float(apart[row]), "subtracted": self._subtract(name, since, until)}
            for row, name in enumerate(self.alone)
        }
        places = inside.nonzero().flatten().tolist()
        weighed = list(zip(places, weights.tolist(), strict=True))
        return answer | {"count": int(state.count), "models": models, "weights": weighed}

    @validate_call
    def sweep(self, length: Length) -> dict[str, Any]:
        """The answers of a window at the end of every second so far, and how far recomputing each is from them."""
        states = self._slide(self._new_window(), 0, self.now, length)
        filled = [end for end, state in enumerate(states, 1) if int(state.count)]
        curve, apart = self._answers(states), 0.0
        if filled:
            with torch.no_grad():
                scratch = self.model([self.elements[self._between(end - length, end)] for end in filled])
            apart = float((scratch - torch.tensor([curve[end - 1] for end in filled])).abs().max())
        return {"curve": curve, "apart": apart}

    def _new_window(self) -> Window:
        return self.model.window(span=SECONDS, tile=1)

    def _between(self, since: int, until: int) -> Tensor:
        return (self.times >= since) & (self.times < until)

    def _slide(self, window: Window, start: int, stop: int, length: int) -> list[State]:
        """The last seconds' state at the end of each second."""
        states = []
        for second in range(start, stop):
            arrive = self._between(second, second + 1)
            if arrive.any():
                window.update(self.elements[arrive][None], self.times[arrive])
            window.advance(second)
            states.append(window.last(length))
        return states

    @torch.no_grad()
    def _answers(self, states: Sequence[State]) -> list[Any]:
        """The model's answer to each state; None where there were no events."""
        filled = [state for state in states if int(state.count)]
        answers = iter(self.model.finalize(State.cat(filled)).tolist() if filled else [])
        return [next(answers) if int(state.count) else None for state in states]

    def _subtract(self, name: str, since: int, until: int) -> dict[str, Any]:
        """How far subtracting what is too old is from the truth; or why a model refuses to."""
        old, model = self._between(0, since), self.alone[name]
        if not old.any():
            return {"apart": None}
        stream = model.stream()
        stream.update(self.elements[self._between(0, until)][None])
        try:
            stream.remove(self.elements[old][None])
        except (RemovalError, PrecisionError) as error:
            return {"refused": type(error).__name__}
        with torch.no_grad():
            truth = model(self.elements[self._between(since, until)][None])
        return {"apart": float((stream.predict() - truth).abs().max())}


def _tensors(events: Sequence[Event]) -> tuple[Tensor, Tensor]:
    """Times (n,) float64 and elements (n, 1 + MACHINES)."""
    times, loads, machines = zip(*events, strict=True)
    element = torch.cat([torch.tensor(loads)[:, None], torch.eye(MACHINES)[list(machines)]], dim=1)
    return torch.tensor(times, dtype=torch.float64), element
