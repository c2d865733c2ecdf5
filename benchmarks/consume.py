"""Events from Redis through `setstream consume` into a store with tiles: rate and memory; killed on the way, and counted.

    python benchmarks/consume.py --events 1000000 --sets 10000 --kills 2

It starts a Redis of its own (apt-get install redis-server) and SIGKILLs the consumer when a part of the events is in the store.
"""

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import torch
from torch import nn

import setstream as ss
from setstream._utils.optional import need


def make() -> ss.SetModel:
    """The model: elements of 8 numbers."""
    torch.manual_seed(0)
    encoder = ss.SetEncoder(nn.Sequential(nn.Linear(8, 32), nn.ReLU()), ss.UMBC(32, num_slots=4, heads=4))
    return ss.SetModel(encoder, nn.Linear(32, 1)).eval()


def fill(redis: object, events: int, sets: int) -> Counter[str]:
    """Add events of two days to the stream; returns how many each set gets."""
    rng, counts = random.Random(0), Counter[str]()
    commands = redis.pipeline(transaction=False)  # type: ignore[attr-defined]
    for number in range(events):
        id = f"set-{rng.randrange(sets)}"
        counts[id] += 1
        element = [round(rng.gauss(0, 1), 3) for _ in range(8)]
        event = {"id": id, "element": element, "time": 1_700_000_000 + 172_800 * number / events}
        commands.xadd("events", {"event": json.dumps(event)})
        if number % 1000 == 999 or number == events - 1:
            commands.execute()
    return counts


def memory(process: subprocess.Popen[bytes]) -> float:
    """The resident memory of a process, in MB."""
    lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
    return next((int(line.split()[1]) / 1000 for line in lines if line.startswith("VmRSS")), 0.0)


def run(options: argparse.Namespace, folder: Path) -> None:
    library = need("redis", "redis", "this benchmark")
    url, states = f"unix://{folder}/socket", folder / "states.db"
    quiet = ["--port", "0", "--unixsocket", f"{folder}/socket", "--save", "", "--dir", str(folder)]
    server = subprocess.Popen(["redis-server", *quiet], stdout=subprocess.DEVNULL)
    try:
        while not (folder / "socket").exists():
            time.sleep(0.05)
        counts = fill(library.Redis.from_url(url), options.events, options.sets)
        command = [sys.executable, "-m", "setstream.cli", "consume", "benchmarks.consume:make", url, "--stream", "events"]
        command += ["--states", str(states), "--tile", "3600", "--batch", str(options.batch)]
        ends = [options.events * (kill + 1) // (options.kills + 1) for kill in range(options.kills + 1)]
        with ss.StateStore(states, make(), tile=3600) as store:
            for end in ends:
                process = subprocess.Popen(command, env=os.environ | {"OMP_NUM_THREADS": "1"}, stderr=subprocess.DEVNULL)
                first, seen, largest, began = None, 0, 0.0, 0.0
                while seen < end:
                    time.sleep(0.5)
                    assert process.poll() is None, f"the consumer ended with {process.returncode}"
                    seen = int(store.rows.query("SELECT COALESCE(SUM(count), 0) FROM states")[0][0])
                    if first is None and seen:
                        first, began = seen, time.monotonic()
                    largest = max(largest, memory(process))
                rate = (seen - (first or 0)) / max(time.monotonic() - began, 1e-9)
                process.send_signal(signal.SIGTERM if end == options.events else signal.SIGKILL)
                process.wait()
                print(f"{seen:,} events in the store: {rate:,.0f} per second, at most {largest:.0f} MB")
            exact = all(store.count(id) == count for id, count in counts.items()) and len(store) == len(counts)
        print(f"counts of {len(counts):,} sets exact: {exact}; {states.stat().st_size / len(counts):,.0f} bytes per set")
    finally:
        server.kill()
        server.wait()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("events", 100_000), ("sets", 10_000), ("kills", 2), ("batch", 1000)):
        parser.add_argument(f"--{name}", type=int, default=default)
    with tempfile.TemporaryDirectory() as temporary:
        run(parser.parse_args(), Path(temporary))
