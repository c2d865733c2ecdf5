"""Speed of UMBC pooling: setstream, the paper's direct form, and torch's attention, interleaved in one run.

    python benchmarks/pooling.py                       the table
    python benchmarks/pooling.py --backward            forward and backward
    python benchmarks/pooling.py --rounds 31 --threads 2

Times are medians of single calls. All contestants take turns in every round, so that a busy machine slows them all alike; the
first call of a turn does not count, because it pays for what the one before has left in the caches and the allocator.
Read the ratios. `setstream` is the pool on the whole set, `streamed` the encoder fed in chunks of 4,096. `GEMM share` is the
time that the matrix products of the pool need at the rate that this machine reaches on large products (measured in the
same run), divided by the pool's time: 100 % would mean that everything else is free.
"""

from __future__ import annotations

import argparse
import copy
import platform
import statistics
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

import setstream as ss

CALLS_A_TURN = 3

# B sets, N elements, in_dim, out_dim, slots, heads
SHAPES = [
    (10, 1024, 128, 128, 4, 4),
    (1, 65536, 128, 128, 64, 1),
    (16, 512, 128, 128, 128, 1),
    (1, 16384, 768, 768, 256, 1),
    (1, 65536, 128, 128, 16, 4),
    (1, 65536, 128, 128, 64, 4),
]


def split(rows: Tensor, heads: int) -> Tensor:
    return rows.unflatten(-1, (heads, -1)).transpose(1, 2)


def projected(pool: ss.UMBC, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values by heads: every element is projected."""
    queries = pool.query_norm(pool.query(pool.slots(None))).expand(len(x), -1, -1)
    return split(queries, pool.heads), split(pool.key(x), pool.heads), split(pool.value(x), pool.heads)


def direct(pool: ss.UMBC, x: Tensor) -> Tensor:
    """The paper's form, plainly: project all elements, exponentiate all scores, divide two sums."""
    q, k, v = projected(pool, x)
    weights = torch.exp(q @ k.mT / q.shape[-1] ** 0.5)
    z = (weights @ v) / weights.sum(-1, keepdim=True)
    return z.transpose(1, 2).flatten(2)


def sdpa(pool: ss.UMBC, x: Tensor) -> Tensor:
    """The fused attention of torch over the whole set."""
    q, k, v = projected(pool, x)
    return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


def streamed(encoder: ss.SetEncoder, x: Tensor) -> Tensor:
    """The same pool, fed in chunks of 4,096 elements."""
    state = None
    for chunk in x.split(4096, dim=1):
        state = encoder.update(state, chunk)
    assert state is not None
    z: Tensor = encoder.finalize(state)
    return z


def gemm_rate(seconds: float = 1.0) -> float:
    """Multiply-adds per second of a large float32 product on this machine, now."""
    a, b = torch.randn(1024, 1024), torch.randn(1024, 1024)
    best, end = 0.0, time.perf_counter() + seconds
    while time.perf_counter() < end:
        start = time.perf_counter()
        torch.mm(a, b)
        best = max(best, 1024**3 / (time.perf_counter() - start))
    return best


def multiply_adds(shape: tuple[int, int, int, int, int, int], folded: bool) -> int:
    """Multiply-adds of one forward pass, elements only (the slots' share is the same for any N)."""
    batch, size, in_dim, out_dim, slots, heads = shape
    per_element = 2 * heads * slots * in_dim if folded else 2 * in_dim * out_dim + 2 * slots * out_dim
    return batch * size * per_element


def measure(contestants: dict[str, Callable[[], Tensor]], rounds: int, backward: bool) -> dict[str, float]:
    """Median seconds of each. In each round all take a turn: one call to warm up, then CALLS_A_TURN that count."""
    times: dict[str, list[float]] = {name: [] for name in contestants}
    for _ in range(rounds):
        for name, run in contestants.items():
            for call in range(CALLS_A_TURN + 1):
                start = time.perf_counter()
                z = run()
                if backward:
                    z.square().sum().backward()
                if call:
                    times[name].append(time.perf_counter() - start)
    return {name: statistics.median(values) for name, values in times.items()}


def row(shape: tuple[int, int, int, int, int, int], rounds: int, backward: bool) -> str:
    """Check that all contestants agree at this shape, time them, and format the result."""
    batch, size, in_dim, out_dim, slots, heads = shape
    pool = ss.UMBC(in_dim, slots, in_dim, out_dim, heads).eval()
    encoder = ss.SetEncoder(torch.nn.Identity(), pool, check_finite=False)
    x = torch.randn(batch, size, in_dim, requires_grad=backward)
    contestants: dict[str, Callable[[], Tensor]] = {
        "direct": lambda: direct(pool, x),
        "sdpa": lambda: sdpa(pool, x),
        "setstream": lambda: pool(x),
        "streamed": lambda: streamed(encoder, x),
    }
    with torch.no_grad():
        exact = direct(copy.deepcopy(pool).double(), x.double())
        for name, run in contestants.items():
            error = float((run() - exact).abs().max() / exact.abs().max())
            if not error < 1e-4:
                raise SystemExit(f"{name} is wrong at {shape}: relative error {error:.2g}")
    with torch.set_grad_enabled(backward):
        seconds = measure(contestants, rounds, backward)
    share = multiply_adds(shape, pool.folded) * (3 if backward else 1) / gemm_rate(0.3) / seconds["setstream"]
    cells = [
        ", ".join(map(str, shape)),
        "folded" if pool.folded else "direct",
        *(f"{seconds[name] * 1e3:.2f}" for name in contestants),
        *(f"{seconds[name] / seconds['setstream']:.2f}x" for name in ("direct", "sdpa")),
        f"{seconds['direct'] / seconds['streamed']:.2f}x",
        f"{share:.0%}",
    ]
    return f"| {' | '.join(cells)} |"


def commit() -> str:
    try:
        here = Path(__file__).parent
        done = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, cwd=here, check=True)
        return done.stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--rounds", type=int, default=9, help=f"turns of each contestant, {CALLS_A_TURN} timed calls each (default 9)"
    )
    parser.add_argument("--threads", type=int, default=2, help="torch threads (default 2)")
    parser.add_argument("--backward", action="store_true", help="time forward and backward together")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.manual_seed(options.seed)
    torch.set_num_threads(options.threads)

    print(
        f"setstream {ss.__version__} at {commit()}, torch {torch.__version__}, {options.threads} threads, {platform.machine()}"
    )
    print(f"large float32 product: {gemm_rate() / 1e9:.1f} G multiply-adds/s\n")
    header = (
        "| B, N, in, out, slots, heads | form | direct ms | SDPA ms | setstream ms | streamed ms "
        "| setstream vs direct | setstream vs SDPA | streamed vs direct | GEMM share |"
    )
    print(header)
    print("|---|---|---|---|---|---|---|---|---|---|")
    for shape in SHAPES:
        print(row(shape, options.rounds, options.backward), flush=True)


if __name__ == "__main__":
    main()
