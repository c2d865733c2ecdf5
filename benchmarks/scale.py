"""One huge set over 1 and 2 ranks, and over 1 and 2 Ray workers: elements a second, and efficiency.

    python benchmarks/scale.py                             10^6 elements of 64 features, one thread for each rank or worker

ranks, encode:   `ss.encode(gradient="none")` of one .npy file, each rank reading its part of it
ranks, train:    the same with gradient="exact" and its way back: a training step on one huge set
ray:             `ray_states` of the same file, cut into shares; without the start of the cluster

Efficiency is the rate of two, divided by twice the rate of one.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

import setstream as ss
from setstream.bulk.ray import cluster, ray_states
from setstream.data import NpySource, SetDataset, SourceChunks
from setstream.sets.chunks import scatter_sets

WIDTH, CHUNK, SHARE = 64, 4096, 2**16


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


def ray_seconds(path: Path, workers: int, rounds: int) -> float:
    data = SetDataset([NpySource(path)])
    seconds = []
    with cluster(workers=workers) as size:
        for _ in range(rounds):
            start = time.perf_counter()
            ((_, state, _),) = ray_states(make(), data, data.shares(SHARE, lambda name, reason: None), size, CHUNK)
            seconds.append(time.perf_counter() - start)
            assert isinstance(state, ss.State), state
            assert int(state.count) == len(data[0])
    return min(seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--elements", type=int, default=10**6)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", type=Path, help="where to write the file (default: a temporary folder)")
    parser.add_argument("--skip-ray", action="store_true")
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
        measured = {
            "ranks, encode": [ranks_seconds(path, "none", ranks, options.rounds) for ranks in (1, 2)],
            "ranks, train": [ranks_seconds(path, "exact", ranks, options.rounds) for ranks in (1, 2)],
        }
        if not options.skip_ray:
            measured["ray"] = [ray_seconds(path, workers, options.rounds) for workers in (1, 2)]
    print("| how | elements/s by one | by two | efficiency |\n|---|---|---|---|")
    for how, (one, two) in measured.items():
        print(f"| {how} | {options.elements / one:,.0f} | {options.elements / two:,.0f} | {one / two / 2:.0%} |")


if __name__ == "__main__":
    main()
