"""Memory and time of one training step against the size of the set: each measurement in a fresh process.

    python benchmarks/memory.py --plot out/memory.png        sets of 10^3 to 10^7
    python benchmarks/memory.py --sizes 10000 10000000 --modes exact unbiased
    python benchmarks/memory.py --sizes 200000 --modes exact two-passes --alternate 5     CPU time in one process, in turns

One set of N elements of width 32 through a two-layer phi and UMBC with 16 slots. `exact` and `unbiased` read the set from a
source that makes each chunk of 4,096 when it is asked for; `full`, `subset` and the Set Transformer (two ISABs, on the whole
set) hold it. `two-passes` is `exact` with a second UMBC, whose slots the first one gives; `ab-mil` and `ds-mil` are `exact`
with these pools, and with `-whole` behind, the modules of ss.nn that hold the whole set. Peak is the largest resident memory of
the process; saved is what autograd keeps for the way back, at most, by its own hooks (counted on 10^6 elements where there are
more).
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor, nn

import setstream as ss
from setstream.pools.base import named_tensors

WIDTH, CHUNK = 32, 4096
WHOLE = ("full", "set-transformer", "ab-mil-whole", "ds-mil-whole")  # a graph over all elements
MODES = ("full", "exact", "unbiased", "subset", "set-transformer")
OTHERS = ("two-passes", "ab-mil", "ab-mil-whole", "ds-mil", "ds-mil-whole")  # if asked for


class Made:
    """A set of `size` elements that is never in memory: chunk i is drawn with seed i, each time anew."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __iter__(self) -> Iterator[Tensor]:
        for start in range(0, self.size, CHUNK):
            generator = torch.Generator().manual_seed(start)
            yield torch.randn(1, min(CHUNK, self.size - start), WIDTH, generator=generator)


def peak_mib() -> float:
    """The largest resident memory of this process; where Linux tells it, without what its parent had when it was forked."""
    status = Path("/proc/self/status")
    if status.exists():
        line = next(line for line in status.read_text().splitlines() if line.startswith("VmHWM"))
        return int(line.split()[1]) / 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


class Saved:
    """What autograd keeps for the way back: bytes now and at most."""

    def __init__(self) -> None:
        self.now = self.most = 0

    def pack(self, tensor: Tensor) -> Kept:
        """Called when a graph keeps a tensor."""
        return Kept(self, tensor)

    @staticmethod
    def unpack(kept: Kept) -> Tensor:
        """Called when the way back needs it."""
        return kept.tensor


class Kept:
    """A tensor in a graph, counted as long as the graph lives."""

    def __init__(self, saved: Saved, tensor: Tensor) -> None:
        self.saved, self.tensor, self.bytes = saved, tensor, tensor.numel() * tensor.element_size()
        saved.now += self.bytes
        saved.most = max(saved.most, saved.now)

    def __del__(self) -> None:
        self.saved.now -= self.bytes


def step_of(mode: str) -> Callable[[int], None]:
    """A training step of a mode on one set of the given size."""
    torch.manual_seed(0)
    phi = nn.Sequential(nn.Linear(WIDTH, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU())
    pools = {
        "two-passes": lambda: ss.MultiPass(
            [ss.UMBC(64, 16, heads=4), ss.UMBC(64, 16, heads=4, slots="given")], between=nn.Linear(64, 64)
        ),
        "ab-mil": lambda: ss.GatedAttention(64),
        "ds-mil": lambda: ss.DSMIL(64),
    }
    encoder = ss.SetEncoder(phi, pools.get(mode, lambda: ss.UMBC(64, 16, heads=4))())
    wholes = {
        "set-transformer": lambda: ss.nn.SetTransformer(64, in_dim=WIDTH, num_inducing=16),
        "ab-mil-whole": lambda: nn.Sequential(phi, ss.nn.GatedAttention(64)),
        "ds-mil-whole": lambda: nn.Sequential(phi, ss.nn.DSMIL(64)),
    }
    whole = wholes[mode]() if mode in wholes else None

    def step(n: int) -> None:
        if whole is not None:
            z = whole(torch.cat(list(Made(n)), dim=1))
        elif mode in ("full", "subset"):
            z = ss.encode(encoder, torch.cat(list(Made(n)), dim=1), chunk_size=CHUNK, gradient=mode)
        else:
            z = ss.encode(encoder, ss.Chunks(Made(n)), gradient="exact" if mode in pools else mode)
        torch.stack([tensor.square().mean() for _, tensor in named_tensors(z)]).sum().backward()

    return step


def alternate(modes: list[str], size: int, turns: int) -> None:
    """CPU seconds of a step of each mode, the modes in turns, on one thread; medians, and their ratio to the first mode."""
    torch.set_num_threads(1)
    steps, seconds = {mode: step_of(mode) for mode in modes}, {mode: [0.0] * turns for mode in modes}
    for turn in range(-1, turns):  # the first one is not counted
        for mode, step in steps.items():
            start = time.process_time()
            step(size)
            seconds[mode][turn] = time.process_time() - start
    first = statistics.median(seconds[modes[0]])
    for mode, values in seconds.items():
        middle = statistics.median(values)
        print(f"| {mode} | {size:.0e} | {middle:.2f} CPU seconds | {middle / first:.2f} |", flush=True)


def worker(mode: str, size: int, threads: int) -> None:
    torch.set_num_threads(threads)
    step = step_of(mode)
    step(CHUNK)  # libraries and thread pools, not the step, fill memory the first time
    before, start = peak_mib(), time.perf_counter()
    step(size)
    found = {"seconds": time.perf_counter() - start, "before": before, "peak": peak_mib()}
    saved = Saved()
    with torch.autograd.graph.saved_tensors_hooks(saved.pack, saved.unpack):
        step(min(size, 10**6))  # once more, to count
    print(json.dumps(found | {"saved": saved.most / 2**20}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs="+", default=[10**3, 10**4, 10**5, 10**6, 10**7])
    parser.add_argument("--modes", nargs="+", default=list(MODES), choices=MODES + OTHERS)
    help_whole = "largest set for the modes that hold it whole (default 10^6: some gigabytes)"
    parser.add_argument("--largest-whole", type=int, default=10**6, help=help_whole)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--alternate", type=int, metavar="TURNS", help="compare the CPU time of the modes instead")
    parser.add_argument("--plot", type=Path, help="write a figure, too")
    parser.add_argument("--worker", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        worker(options.worker[0], *map(int, options.worker[1:]))
        return
    if options.alternate:
        for size in options.sizes:
            alternate(options.modes, size, options.alternate)
        return
    rows: dict[str, list[tuple[int, float, float]]] = {mode: [] for mode in options.modes}
    print("| mode | N | peak MiB | of which the step | saved by autograd, MiB | seconds |\n|---|---|---|---|---|---|")
    for mode in options.modes:
        for size in options.sizes:
            if mode in WHOLE and size > options.largest_whole:
                continue
            command = [sys.executable, __file__, "--worker", mode, str(size), str(options.threads)]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                print(f"| {mode} | {size:.0e} | failed: {done.stderr.strip().splitlines()[-1][:80]} | | | |", flush=True)
                break
            found = json.loads(done.stdout)
            rows[mode].append((size, found["peak"], found["seconds"]))
            grown = found["peak"] - found["before"]
            print(
                f"| {mode} | {size:.0e} | {found['peak']:.0f} | {grown:.0f} | {found['saved']:.1f} | {found['seconds']:.2f} |",
                flush=True,
            )
    if options.plot:
        plot(rows, options.plot)


def plot(rows: dict[str, list[tuple[int, float, float]]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(9, 3.6), constrained_layout=True)
    for mode, values in rows.items():
        if values:
            sizes, peaks, seconds = zip(*values, strict=True)
            axes[0].loglog(sizes, peaks, "o-", label=mode)
            axes[1].loglog(sizes, seconds, "o-", label=mode)
    axes[0].set(xlabel="elements in the set", ylabel="peak memory, MiB", title="one training step")
    axes[1].set(xlabel="elements in the set", ylabel="seconds")
    axes[0].legend(fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    main()
