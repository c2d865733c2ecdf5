"""Windows, ranges and keys: merges, times per update and query, and what tiles and keys cost a store.

    python benchmarks/windows.py                   windows of 10 to 1,000 tiles; ranges of 10,000 tiles; 40 batches of changes
    python benchmarks/windows.py --tiles 10000 100000    longer windows: minutes, and 10 GB of memory
    python benchmarks/windows.py --rolling 10 100000    a rolling mean, beside torchmetrics and river (pip install them)

A window of n tiles gets one element per tile, and its prediction is asked for each time. One prediction in n makes the sums of
n tiles: the longest. The plain way keeps the states of the last n tiles in a deque and adds them all for each prediction. Times
are CPU time, medians and 99th percentiles, in one process and one thread; ways that are compared take turns, so a busy machine
slows all of them.
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
from torch import nn

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
    return f"{statistics.median(times):,.2f} / {statistics.quantiles(times, n=100, method='inclusive')[98]:,.2f}"


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
    steps, plain_steps = max(300, min(2 * tiles, 10_000)), min(100, max(5, 100_000 // tiles))
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
            if number == tiles:
                first = merges[0]  # the sums of all tiles, which are made once in `tiles` steps
        per_tile = first / max(tiles, steps) + (merges[0] - first) / steps
    for number in range(plain_steps):
        last.append(model.encoder.update(None, x[:, number : number + 1]))
        plain.append(timed(lambda: model.finalize(sum(list(last)[1:], last[0]))))
    row = [f"{tiles:,}", f"{per_tile:.2f}", shown(updates), shown(queries), f"{max(queries):,.0f}"]
    return [*row, shown(plain), f"{statistics.median(plain) / statistics.median(queries):,.1f}"]


def rolling(length: int, steps: int = 1000) -> list[list[str]]:
    """Rows of a mean over the last so many numbers: a window, a deque, and what other libraries have for it."""
    from river import stats, utils
    from torchmetrics import MeanMetric
    from torchmetrics.wrappers import Running

    encoder = ss.SetEncoder(nn.Identity(), ss.DeepSets("mean", in_dim=1))
    window, last = ss.SetModel(encoder, nn.Identity()).eval().window(count=length, tile=1), deque[float](maxlen=length)
    metric, mean = Running(MeanMetric(), window=length), utils.Rolling(stats.Mean, window_size=length)
    ways: dict[str, tuple[Callable[[float], Any], Callable[[], Any]]] = {
        "setstream": (lambda x: window.update(torch.tensor([[[x]]])), window.predict),
        "deque, added anew": (last.append, lambda: sum(last) / len(last)),
        "torchmetrics `Running`": (metric.update, metric.compute),
        "river `Rolling`": (mean.update, mean.get),
    }
    if length > 1000:  # it copies the metric once per number, and its compute grows with them
        del ways["torchmetrics `Running`"]
    rows, numbers, answers = [], [random.gauss(1, 1) for _ in range(length + steps)], []
    for name, (update, query) in ways.items():
        if name == "setstream":
            window.update(torch.tensor(numbers[:length]).view(1, -1, 1))
        else:
            for x in numbers[:length]:
                update(x)
        updates, queries = [], []
        for x in numbers[length:]:
            updates.append(1000 * timed(lambda: update(x)))  # noqa: B023
            queries.append(1000 * timed(query))
        answers.append(float(query()))
        rows.append([f"{length:,}", name, shown(updates), shown(queries)])
    assert max(answers) - min(answers) < 1e-5, answers
    return rows


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
    parser.add_argument("--rolling", type=int, nargs="+")
    parser.add_argument("--model", default="umbc+set-transformer")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    if options.rolling:
        print("| last | way | update p50 / p99, µs | mean p50 / p99, µs |\n|---|---|---|---|")
        for row in (row for length in options.rolling for row in rolling(length)):
            print(f"| {' | '.join(row)} |", flush=True)
        return
    model = open_model(options.model).eval()
    titles = ["tiles", "merges per tile", "update p50 / p99, ms", "prediction p50 / p99, ms", "longest, ms"]
    titles += ["deque p50 / p99, ms", "times as long"]
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
