"""Events from Redis through `setstream consume` into a store with tiles: rate and memory; killed on the way, and counted.

    python benchmarks/consume.py --events 1000000 --sets 10000 --kills 2 --rate 500

It starts a Redis of its own (apt-get install redis-server) and SIGKILLs the consumer when a part of the events is in the store.
With --rate, so many events per second arrive for 30 s when the rest has been consumed: the lag is how many wait.
"""

import argparse
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import count, islice
from pathlib import Path
from typing import Any

import torch
from torch import nn

import setstream as ss
from setstream._utils.optional import need


def make() -> ss.SetModel:
    """The model: elements of 8 numbers."""
    torch.manual_seed(0)
    encoder = ss.SetEncoder(nn.Sequential(nn.Linear(8, 32), nn.ReLU()), ss.UMBC(32, num_slots=4, heads=4))
    return ss.SetModel(encoder, nn.Linear(32, 1)).eval()


def events(sets: int, total: int) -> Iterator[tuple[str, str]]:
    """Events of two days, without end: the set, and the line of JSON."""
    rng = random.Random(0)
    for number in count():
        id = f"set-{rng.randrange(sets)}"
        element = [round(rng.gauss(0, 1), 3) for _ in range(8)]
        yield id, json.dumps({"id": id, "element": element, "time": 1_700_000_000 + 172_800 * number / total})


def add(redis: Any, some: Iterable[tuple[str, str]], counts: Counter[str]) -> None:
    """Add events to the stream, and count them by set."""
    with redis.pipeline(transaction=False) as commands:
        for number, (id, line) in enumerate(some):
            counts[id] += 1
            commands.xadd("events", {"event": line})
            if number % 1000 == 999:
                commands.execute()
        commands.execute()


def waiting(redis: Any) -> int:
    """The lag: events that are not acknowledged yet."""
    group = redis.xinfo_groups("events")[0]
    return int(group["lag"]) + int(group["pending"])


def memory(process: subprocess.Popen[bytes]) -> float:
    """The resident memory of a process, in MB."""
    lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
    return next((int(line.split()[1]) / 1000 for line in lines if line.startswith("VmRSS")), 0.0)


def cpu(process: subprocess.Popen[bytes]) -> float:
    """The CPU seconds of a process."""
    fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def consume_until(redis: Any, command: Sequence[str], left: int) -> subprocess.Popen[bytes]:
    """Start a consumer, and return it when so many events are left; prints what it did."""
    process = subprocess.Popen(command, env=os.environ | {"OMP_NUM_THREADS": "1"}, stderr=subprocess.DEVNULL)
    first, began, before, sizes = None, 0.0, 0.0, list[float]()
    while first is None or waiting(redis) > left:
        time.sleep(0.5)
        if process.poll() is not None:
            raise SystemExit(f"the consumer ended with {process.returncode}")
        if not redis.xinfo_groups("events"):
            continue
        if first is None:  # it has started
            first = started = waiting(redis)
        elif first == started > waiting(redis):  # and committed
            first, began, before = waiting(redis), time.monotonic(), cpu(process)
        elif began:
            sizes.append(memory(process))
    done, seconds = first - waiting(redis), max(time.monotonic() - began, 1e-9)
    parts = [max(part) for n in range(5) if (part := sizes[len(sizes) * n // 5 : len(sizes) * (n + 1) // 5])]
    shown = ", ".join(f"{part:.0f}" for part in parts)
    rates = f"{done / seconds:,.0f} per second, {done / max(cpu(process) - before, 1e-9):,.0f} per second of its CPU time"
    print(f"{done:,} events: {rates}; largest memory in each fifth of the time: {shown} MB", flush=True)
    return process


def live(redis: Any, source: Iterator[tuple[str, str]], counts: Counter[str], rate: int, seconds: int) -> None:
    """Add events at a rate, and print the lag."""
    lags, began = [], time.monotonic()
    for tick in range(10 * seconds):
        time.sleep(max(0.0, began + tick / 10 - time.monotonic()))
        add(redis, islice(source, rate // 10), counts)
        lags.append(waiting(redis))
    middle, most = statistics.median(lags), max(lags)
    print(f"then {rate:,} new events per second: {middle:,.0f} wait in the median, at most {most:,} ({most / rate:.1f} s)")


def run(options: argparse.Namespace, folder: Path) -> None:
    library = need("redis", "redis", "this benchmark")
    url, states, counts = f"unix://{folder}/socket", folder / "states.db", Counter[str]()
    quiet = ["--port", "0", "--unixsocket", f"{folder}/socket", "--save", "", "--dir", str(folder)]
    server = subprocess.Popen(["redis-server", *quiet], stdout=subprocess.DEVNULL)
    try:
        while not (folder / "socket").exists():
            time.sleep(0.05)
        redis, source = library.Redis.from_url(url), events(options.sets, options.events)
        add(redis, islice(source, options.events), counts)
        command = [sys.executable, "-m", "setstream.cli", "consume", "benchmarks.consume:make", url, "--stream", "events"]
        command += ["--states", str(states), "--tile", "3600", "--batch", str(options.batch)]
        for kill in range(options.kills):
            process = consume_until(redis, command, options.events * (options.kills - kill) // (options.kills + 1))
            process.kill()
            process.wait()
        process = consume_until(redis, command, 0)
        if options.rate:
            live(redis, source, counts, options.rate, 30)
            while waiting(redis):
                time.sleep(0.5)
        process.send_signal(signal.SIGTERM)
        process.wait()
        with ss.StateStore(states, make()) as store:
            exact = dict(store.counts(limit=len(counts) + 1)) == counts
            tiled = store.rows.query("SELECT level, SUM(count) FROM tiles GROUP BY level")
            print(f"killed {options.kills} times; counts of {len(counts):,} sets exact: {exact}; in tiles, by level: {tiled}")
        print(f"{states.stat().st_size / len(counts):,.0f} bytes per set")
    finally:
        server.kill()
        server.wait()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("events", 100_000), ("sets", 10_000), ("kills", 2), ("batch", 5000), ("rate", 0)):
        parser.add_argument(f"--{name}", type=int, default=default)
    with tempfile.TemporaryDirectory() as temporary:
        run(parser.parse_args(), Path(temporary))
