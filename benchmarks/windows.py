"""Windows, ranges and keys: merges, times per update and query, and what tiles and keys cost a store.

    python benchmarks/windows.py                   windows of 10 to 1,000 tiles; ranges of 10,000 tiles; 40 batches of changes
    python benchmarks/windows.py --tiles 100000    one length of window

A window of n tiles gets one element per tile, and its prediction is asked for each time. The plain way keeps the states of the
last n tiles in a deque and adds them all for each prediction. Times are CPU time, medians and 99th percentiles, in one process
and one thread; ways that are compared take turns, so a busy machine slows all of them.
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

import setstream as ss
from setstream.stores.store import Change
from setstream.tasks.loading import open_model

HOUR = 3600


def timed(work: Callable[[], Any]) -> float:
    """CPU milliseconds of a call."""
    begin = time.process_time()
    work()
    return 1000 * (time.process_time() - begin)


def shown(times: list[float]) -> str:
    return f"{statistics.median(times):.2f} / {statistics.quantiles(times, n=100)[98]:.2f}"


@contextmanager
def counted() -> Iterator[list[int]]:
    """Counts the merges of two states."""
    count, add = [0], ss.State.__add__

    def counting(a: ss.State, b: ss.State) -> ss.State:
        count[0] += 1
        return add(a, b)

    ss.State.__add__ = counting  # type: ignore[method-assign]
    try:
        yield count
    finally:
        ss.State.__add__ = add  # type: ignore[method-assign]


@torch.no_grad()
def windows(model: ss.SetModel, tiles: int) -> list[str]:
    """A row: a window of so many tiles, against adding a deque of states."""
    steps, plain_steps = max(300, 2 * tiles), min(100, max(5, 30_000 // tiles))
    x = torch.randn(1, steps + tiles, 2)
    window, last = model.window(span=tiles, tile=1), deque[ss.State](maxlen=tiles)
    for number in range(tiles):
        last.append(model.encoder.update(None, x[:, number : number + 1]))
    window.update(x[:, :tiles], time=torch.arange(tiles))
    updates, queries, plain = [], [], []
    with counted() as merges:
        for number in range(tiles, tiles + steps):
            element = x[:, number : number + 1]
            updates.append(timed(lambda element=element, number=number: window.update(element, time=number)))  # type: ignore[misc]
            queries.append(timed(window.predict))
        per_tile = merges[0] / steps
    for number in range(plain_steps):
        last.append(model.encoder.update(None, x[:, number : number + 1]))
        plain.append(timed(lambda: model.finalize(sum(list(last)[1:], last[0]))))
    row = [f"{tiles:,}", f"{per_tile:.2f}", shown(updates), shown(queries)]
    return [*row, f"{statistics.median(plain):.2f}", f"{statistics.median(plain) / statistics.median(queries):.1f}"]


def ranges(model: ss.SetModel, folder: str, tiles: int = 10_000) -> str:
    """Predictions for random and for the most expensive ranges of hourly tiles."""
    rng = random.Random(0)
    with ss.StateStore(f"{folder}/ranges.db", model, tile=HOUR) as store:
        for start in range(0, tiles, 500):
            store.update("a", torch.randn(500, 2), time=torch.arange(start, start + 500) * HOUR)
        pairs = [sorted(rng.sample(range(tiles), 2)) for _ in range(100)]
        times = [timed(lambda a=a, b=b: store.predict("a", since=a * HOUR, until=b * HOUR)) for a, b in pairs]  # type: ignore[misc]
        worst = [timed(lambda: store.predict("a", since=HOUR, until=(tiles - 17) * HOUR)) for _ in range(100)]
    return f"ranges of {tiles:,} tiles, p50 / p99: random {shown(times)} ms, of the most rows {shown(worst)} ms"


@torch.no_grad()
def changes(model: ss.SetModel, folder: str, rounds: int = 40, size: int = 128) -> list[tuple[str, float]]:
    """CPU milliseconds per change of a plain store, with keys, and with tiles: batches as a busy server makes them."""
    stores = {name: ss.StateStore(f"{folder}/{name}.db", model, tile=HOUR if name == "tiles" else None) for name in WAYS}
    spent: dict[str, list[float]] = {name: [] for name in WAYS}
    for turn in range(rounds):
        parts = list(model.encoder.update(None, torch.randn(size, 10, 2)))
        for name, store in stores.items():
            key, tiles = (lambda n: f"{turn}-{n}") if name == "keys" else (lambda n: None), name == "tiles"  # noqa: B023
            batch = [
                Change(f"set-{n}", part, tiles={400_000 + turn // 10: part} if tiles else None, key=key(n), digest="d")
                for n, part in enumerate(parts)
            ]
            spent[name].append(timed(lambda store=store, batch=batch: store.apply(batch)) / size)  # type: ignore[misc]
    for store in stores.values():
        store.close()
    return [(name, statistics.median(times)) for name, times in spent.items()]


WAYS = ("plain", "keys", "tiles")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiles", type=int, nargs="+", default=[10, 168, 1000])
    parser.add_argument("--model", default="umbc+set-transformer")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = open_model(options.model).eval()
    titles = ("tiles", "merges per tile", "update p50 / p99, ms", "prediction p50 / p99, ms", "deque, ms", "times as long")
    print(f"| {' | '.join(titles)} |\n|{'---|' * len(titles)}")
    for tiles in options.tiles:
        print(f"| {' | '.join(windows(model, tiles))} |", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        print(f"\n{ranges(model, folder)}\n", flush=True)
        spent = changes(model, folder)
        print("| store | CPU per change, ms | compared with plain |\n|---|---|---|")
        for name, milliseconds in spent:
            print(f"| {name} | {milliseconds:.3f} | {milliseconds / spent[0][1]:.2f} |")


if __name__ == "__main__":
    main()
