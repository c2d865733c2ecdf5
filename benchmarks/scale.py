"""One huge set over 1 and 2 ranks, and over 1 and 2 Ray workers or local processes: elements a second, and efficiency.

    python benchmarks/scale.py                             10^6 elements of 64 features, one thread for each rank or worker
    python benchmarks/scale.py --elements 10000000 --skip-ranks

ranks, encode:   `ss.encode(gradient="none")` of one .npy file, each rank reading its part of it
ranks, train:    the same with gradient="exact" and its way back: a training step on one huge set
local, bulk:     `setstream encode` without its output, of one .npy file; two processes that each encode a half
ray, bulk:       the same on Ray; without the start of cluster and workers, as the start of processes is not in the others

Efficiency is the rate of two, divided by twice the rate of one. Local processes and Ray workers are measured in turn, round by
round, and the rate of Ray to that of the processes is the median over the rounds.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

import setstream as ss
from setstream.bulk import EncodeOptions
from setstream.bulk.encode import encode_states, local_engine
from setstream.bulk.journal import Engine, Journal
from setstream.bulk.ray import cluster, ray_engine
from setstream.data import NpySource, SetDataset, SourceChunks
from setstream.sets.chunks import scatter_sets
from setstream.sets.source import PartSource

WIDTH, CHUNK = 64, 4096


def make() -> ss.SetEncoder:
    torch.manual_seed(0)
    phi = nn.Sequential(nn.Linear(WIDTH, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU())
    return ss.SetEncoder(phi, ss.UMBC(64, 16, heads=4)).eval()


def rank_worker(path: Path, gradient: str, rounds: int) -> None:
    """One rank: seconds of the best round, printed by the first."""
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    encoder = make()
    mine = SourceChunks(scatter_sets([NpySource(path)]), CHUNK)
    seconds = []
    for _ in range(rounds + 1):  # the first warms up
        dist.barrier()
        start = time.perf_counter()
        z = ss.encode(encoder, mine, chunk_size=CHUNK, gradient=gradient, group=dist.group.WORLD)
        if gradient != "none":
            z.square().mean().backward()
        dist.barrier()
        seconds.append(time.perf_counter() - start)
    if dist.get_rank() == 0:
        print(json.dumps(min(seconds[1:])))
    dist.barrier()
    dist.destroy_process_group()


def ranks_seconds(path: Path, gradient: str, ranks: int, rounds: int) -> float:
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", __file__]
    command = [*launch, "--worker", str(path), gradient, str(rounds)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
    return float(json.loads(done.strip().splitlines()[-1]))


def bulk_seconds(data: SetDataset, read: Engine, options: EncodeOptions) -> float:
    """One pass over the data: what `setstream encode` does without its output."""
    encoder = make()
    with tempfile.TemporaryDirectory() as temporary:
        journal = Journal(Path(temporary) / "journal", encoder, {})
        start = time.perf_counter()
        encode_states(encoder, data, journal, options, lambda *done: None, read)
        seconds = time.perf_counter() - start
        ((_, state),) = journal.states()
        assert int(state.count) == sum(len(source) for source in data), state.count
    return seconds


def local_seconds(path: Path, number: int, parts: int) -> float:
    """One local process: encodes its part of the file."""
    torch.set_num_threads(1)
    data, options = SetDataset([PartSource(NpySource(path), number, parts)]), EncodeOptions(chunk_size=CHUNK)
    with local_engine(make(), data, options) as read:
        return bulk_seconds(data, read, options)


def bulk_rounds(path: Path, rounds: int) -> np.ndarray:
    """Seconds for each round, of one and of two, of local processes and of Ray workers: (rounds, 2, 2); all in turn."""
    data, seconds = SetDataset([NpySource(path)]), np.empty((rounds + 1, 2, 2))
    with ExitStack() as stack:
        spawn = multiprocessing.get_context("spawn")
        processes = [stack.enter_context(ProcessPoolExecutor(size, spawn)) for size in (1, 2)]
        stack.enter_context(cluster(workers=3))  # one for the engine of one worker, two for that of two
        options = [EncodeOptions(chunk_size=CHUNK, engine="ray", workers=size) for size in (1, 2)]
        engines = [stack.enter_context(ray_engine(make(), data, one)) for one in options]
        for number in range(rounds + 1):  # the first warms up
            for size in (1, 2):
                parts = list(processes[size - 1].map(local_seconds, [path] * size, range(size), [size] * size))
                ray = bulk_seconds(data, engines[size - 1], options[size - 1])
                seconds[number, size - 1] = max(parts), ray
    return seconds[1:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--elements", type=int, default=10**6)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", type=Path, help="where to write the file (default: a temporary folder)")
    parser.add_argument("--skip-ray", action="store_true")
    parser.add_argument("--skip-ranks", action="store_true")
    parser.add_argument("--worker", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        rank_worker(Path(options.worker[0]), options.worker[1], int(options.worker[2]))
        return
    with tempfile.TemporaryDirectory(dir=options.folder) as temporary:
        path = Path(temporary) / "set.npy"
        array = np.lib.format.open_memmap(path, "w+", np.float32, (options.elements, WIDTH))
        for start in range(0, options.elements, 2**18):
            rows = array[start : start + 2**18]
            rows[:] = np.random.default_rng(start).standard_normal(rows.shape, dtype=np.float32)
        array.flush()
        measured = {}
        for name, gradient in (("ranks, encode", "none"), ("ranks, train", "exact")):
            if not options.skip_ranks:
                measured[name] = [ranks_seconds(path, gradient, ranks, options.rounds) for ranks in (1, 2)]
        bulk = np.empty(0) if options.skip_ray else bulk_rounds(path, options.rounds)
    for kind, name in enumerate(("local, bulk", "ray, bulk") if len(bulk) else ()):
        measured[name] = bulk[:, :, kind].min(0).tolist()
    print("| how | elements/s by one | by two | efficiency |\n|---|---|---|---|")
    for how, (one, two) in measured.items():
        print(f"| {how} | {options.elements / one:,.0f} | {options.elements / two:,.0f} | {one / two / 2:.0%} |")
    for size, ratios in enumerate((bulk[:, :, 0] / bulk[:, :, 1]).T if len(bulk) else (), 1):
        print(f"\nRay with {size} to local with {size}: {np.median(ratios):.0%} ({ratios.min():.0%} to {ratios.max():.0%})")


if __name__ == "__main__":
    main()
