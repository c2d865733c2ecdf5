"""The way forward without a gradient: setstream against a loop written by hand, and small updates, in one run.

    python benchmarks/forward.py
    python benchmarks/forward.py --points 512 16384 --rounds 21 --threads 2

Batch 10, UMBC with 4 slots and 4 heads, width 128. The loop by hand reads each set in blocks of 1,024 elements: phi, two
products and an exponential, with the library's folded queries, one layout, no checks and no running maximum. The phis are one
linear layer, three layers, and a small convolution of 8 x 8 pictures. Updates are those of a stream: `update` of one or ten
elements of one set, and of 1,000 sets with one element each.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

import setstream as ss

BATCH, WIDTH, BLOCK = 10, 128, 1024


def linear() -> nn.Module:
    """One linear layer."""
    return nn.Sequential(nn.Linear(2, WIDTH), nn.ReLU())


def three_layers() -> nn.Module:
    """Three linear layers."""
    layers = [nn.Linear(2, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU()]
    return nn.Sequential(*layers)


def convolution() -> nn.Module:
    """Two convolutions of pictures of 8 x 8."""
    first, second = nn.Conv2d(1, 16, 3, stride=2), nn.Conv2d(16, 32, 2)
    return nn.Sequential(nn.Unflatten(1, (1, 8, 8)), first, nn.ReLU(), second, nn.ReLU(), nn.Flatten(), nn.Linear(128, WIDTH))


PHIS = {"one layer": (linear, 2), "three layers": (three_layers, 2), "convolution": (convolution, 64)}


def build(phi: nn.Module) -> ss.SetEncoder:
    """The encoder of the clustering model."""
    pool = ss.UMBC(WIDTH, 4, WIDTH, WIDTH, heads=4, slots="gaussian", slot_residual=True, norm_after=True)
    return ss.SetEncoder(phi, pool).eval()


def by_hand(encoder: ss.SetEncoder, x: Tensor) -> Tensor:
    """The same encoding, in blocks of elements."""
    pool = encoder.pool
    assert isinstance(pool, ss.UMBC)
    slots = pool.query_norm(pool.query(pool.slots(None)))
    q = slots.unflatten(-1, (4, -1)).transpose(1, 2) * (WIDTH // 4) ** -0.5
    q = (q @ pool.key.weight.view(4, -1, WIDTH)).flatten(1, 2)[0]  # (16, 128)
    pooled = []
    for elements in x:
        numerator, normaliser = torch.zeros(16, WIDTH), torch.zeros(16, 1)
        for block in elements.split(BLOCK):
            features = encoder.phi(block)
            weights = (q @ features.T).exp_()
            numerator += weights @ features
            normaliser += weights.sum(-1, keepdim=True)
        pooled.append(numerator / normaliser)
    by_head = torch.stack(pooled).unflatten(1, (4, -1)) @ pool.value.weight.view(4, -1, WIDTH).mT
    z: Tensor = pool.norm(by_head.transpose(1, 2).flatten(2) + pool.value.bias + slots)
    return z


def medians(contestants: Mapping[str, Callable[[], object]], rounds: int, calls: int) -> dict[str, float]:
    """Median seconds of each; all take turns in every round, and the first call of a turn does not count."""
    times: dict[str, list[float]] = {name: [] for name in contestants}
    for _ in range(rounds):
        for name, run in contestants.items():
            for call in range(calls + 1):
                start = time.perf_counter()
                run()
                if call:
                    times[name].append(time.perf_counter() - start)
    return {name: statistics.median(values) for name, values in times.items()}


def forward_row(name: str, points: int, rounds: int) -> str:
    """By hand, `ss.encode`, the encoder as a module, and a stream in chunks of 4,096."""
    make, width = PHIS[name]
    encoder, x = build(make()), torch.randn(BATCH, points, width)

    def streamed() -> Tensor:
        state = None
        for chunk in x.split(4096, dim=1):
            state = encoder.update(state, chunk)
        assert state is not None
        z: Tensor = encoder.finalize(state)
        return z

    contestants: dict[str, Callable[[], Tensor]] = {
        "hand": lambda: by_hand(encoder, x),
        "encode": lambda: ss.encode(encoder, x, gradient="none"),
        "call": lambda: encoder(x),
        "streamed": streamed,
    }
    expected = contestants["hand"]()
    for contestant, run in contestants.items():
        if not torch.allclose(run(), expected, atol=1e-4):
            raise SystemExit(f"{contestant} is wrong at {points} points")
    seconds = medians(contestants, rounds, 3 if points < 10_000 else 1)
    cells = [f"{seconds[each] * 1e3:.2f}" for each in contestants]
    ratios = [f"{seconds[each] / seconds['hand']:.2f}x" for each in ("encode", "call", "streamed")]
    return f"| {name} | {points:,} | {' | '.join(cells + ratios)} |"


def update_rows(rounds: int) -> list[str]:
    """Updates of a few elements."""
    encoder = build(linear())
    one, many = encoder.update(None, torch.randn(1, 100, 2)), encoder.update(None, torch.randn(1000, 5, 2))
    chunks = {1: torch.randn(1, 1, 2), 10: torch.randn(1, 10, 2)}
    wide = torch.randn(1000, 1, 2)
    seconds = medians(
        {
            "1 element": lambda: encoder.update(one, chunks[1]),
            "10 elements": lambda: encoder.update(one, chunks[10]),
            "1,000 sets, 1 element each, per set": lambda: encoder.update(many, wide),
        },
        rounds,
        20,
    )
    seconds["1,000 sets, 1 element each, per set"] /= 1000
    return [f"| {name} | {value * 1e6:.1f} |" for name, value in seconds.items()]


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--points", type=int, nargs="+", default=[512, 4096, 16384, 65536], help="elements per set")
    parser.add_argument("--rounds", type=int, default=15, help="turns of each contestant (default 15)")
    parser.add_argument("--threads", type=int, default=1, help="torch threads (default 1)")
    options = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(options.threads)
    print(f"setstream {ss.__version__}, torch {torch.__version__}, {options.threads} threads, {options.rounds} rounds\n")
    print("| phi | points | by hand ms | encode ms | encoder(x) ms | streamed ms | encode | encoder(x) | streamed |")
    print("|---|---|---|---|---|---|---|---|---|")
    for name in PHIS:
        for points in options.points:
            print(forward_row(name, points, options.rounds if points < 10_000 else max(3, options.rounds // 3)), flush=True)
    print("\n| update | microseconds |\n|---|---|")
    print("\n".join(update_rows(options.rounds)))


if __name__ == "__main__":
    main()
