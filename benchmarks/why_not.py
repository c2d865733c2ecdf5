"""Why not just subsample, take a Set Transformer, checkpoint, or average chunks? One training step of each, in one run.

    python benchmarks/why_not.py                                          sets of 16,384 and 131,072, sparse and dense
    python benchmarks/why_not.py --sizes 4096 --draws 5 --bags 10         quickly

A set of N elements of width 32 is positive when some of them are shifted: in `sparse` one in 2,048 by much, in `dense` every
other by little. Two models, a UMBC with 16 slots and a Set Transformer with two ISABs, are trained on sets of 2,048 with the
full gradient; then each way takes one step on a positive set of N, with chunks or subsets of 1,024:

    MiB       the most that the allocator held at a time during forward and backward, above what was there before
    ms        processor time of forward and backward in one thread: the median of steps that take turns
    value     |y - y*| / |y*| of the pooled representation y; y* is that of the same model on the whole set; mean over draws
    noise     |g - g*|² / |g*|² of the logit's gradient in all parameters, mean over draws; g* is the same model's, of the whole
    bias      the same for the mean of all draws; for an unbiased way it goes to zero like noise / draws
    right     of how many sets of size N, half of them positive, the logit has the right sign
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits as cross_entropy
from torch.utils.checkpoint import checkpoint
from variance import noise_and_bias

import setstream as ss
from setstream.training import keep_freed_memory

WIDTH, DIM, SLOTS, CHUNK, TRAINED_ON = 32, 64, 16, 1024, 2048
KINDS = {"sparse": (1 / 2048, 2.5), "dense": (0.5, 0.15)}  # share of shifted elements in a positive set, and their shift


@dataclass
class Way:
    """One way to encode a set: the model it belongs to, and from x (B, N, width) to the pooled representation."""

    model: nn.Module
    encode: Callable[[Tensor], Tensor]
    head: nn.Module
    drawn: bool = False  # whether it draws something at random
    whole: bool = True  # whether its value is that of the whole set


def sets(kind: str, count: int, size: int, generator: torch.Generator, positive: bool = False) -> tuple[Tensor, Tensor]:
    """x (count, size, width) and labels (count,): every other set positive from the second on, or all."""
    share, shift = KINDS[kind]
    labels = torch.ones(count) if positive else (torch.arange(count) % 2).float()
    x = torch.randn(count, size, WIDTH, generator=generator)
    x[:, : round(share * size)] += shift * labels[:, None, None]
    return x[:, torch.randperm(size, generator=generator)], labels


class Whole(nn.Module):
    """A Set Transformer of two ISABs on all elements, and its head."""

    def __init__(self) -> None:
        super().__init__()
        self.body = ss.nn.SetTransformer(DIM, in_dim=WIDTH, num_inducing=SLOTS)
        self.head = nn.Linear(DIM, 1)

    def checkpointed(self, x: Tensor) -> Tensor:
        """The same, each block recomputed on the way back."""
        x = self.body.project(x)
        for block in self.body.before:
            x = checkpoint(block, x, use_reentrant=False)
        z: Tensor = checkpoint(self.body.pool, x, use_reentrant=False)
        return z


def ways(pooled: ss.SetModel, whole: Whole) -> dict[str, Way]:
    encoder = pooled.encoder

    def ours(gradient: str) -> Way:
        def encode(x: Tensor) -> Tensor:
            z: Tensor = ss.encode(encoder, x, chunk_size=CHUNK, gradient=gradient, partition="random")
            return z

        return Way(pooled, encode, pooled.head, gradient in ("unbiased", "importance", "subset"), gradient != "subset")

    def checkpointed(x: Tensor) -> Tensor:
        states = (checkpoint(encoder.update, None, chunk, use_reentrant=False) for chunk in x.split(CHUNK, dim=1))
        z: Tensor = encoder.finalize(sum(states))
        return z

    averaged = ss.SetEncoder(nn.Identity(), ss.ChunkMean(whole.body, WIDTH))

    def mean_of_chunks(x: Tensor) -> Tensor:
        z: Tensor = ss.encode(averaged, x, chunk_size=CHUNK, gradient="exact", partition="random", chunks="average")
        return z

    def subset_of_whole(x: Tensor) -> Tensor:
        z: Tensor = whole.body(x[:, torch.randperm(x.shape[1])[:CHUNK]])
        return z

    return {
        "UMBC, full": ours("full"),
        "UMBC, exact": ours("exact"),
        "UMBC, importance": ours("importance"),
        "UMBC, unbiased": ours("unbiased"),
        "UMBC, checkpoint by chunk": Way(pooled, checkpointed, pooled.head),
        "UMBC, subsample": ours("subset"),
        "ISABs on the whole": Way(whole, whole.body, whole.head),
        "ISABs, checkpointed": Way(whole, whole.checkpointed, whole.head),
        "ISABs, subsample": Way(whole, subset_of_whole, whole.head, True, False),
        "ISABs, mean of chunks": Way(whole, mean_of_chunks, whole.head, True, False),
    }


def logit(way: Way, z: Tensor) -> Tensor:
    out: Tensor = way.head(z)
    return out.flatten(1).mean(1)


def train(way: Way, kind: str, steps: int, lr: float) -> float:
    """Train on sets of 2,048 with the full gradient; gives the mean loss of the last tenth of the steps."""
    generator = torch.Generator().manual_seed(1)
    optimizer = torch.optim.Adam(way.model.parameters(), lr)
    losses = []
    for _ in range(steps):
        x, labels = sets(kind, 8, TRAINED_ON, generator)
        loss = cross_entropy(logit(way, way.encode(x)), labels)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(way.model.parameters(), 1.0)
        optimizer.step()
        losses.append(float(loss.detach()))
    return statistics.mean(losses[-max(1, steps // 10) :])


def gradient(way: Way, x: Tensor) -> tuple[Tensor, Tensor]:
    """The pooled representation, and the logit's gradient in all parameters as one vector.

    Not the loss's: of a model that is sure it is zero.
    """
    z = way.encode(x)
    parameters = list(way.model.parameters())
    found = torch.autograd.grad(logit(way, z).sum(), parameters, allow_unused=True)
    pairs = zip(parameters, found, strict=True)
    return z.detach(), torch.cat([torch.zeros_like(p).flatten() if g is None else g.flatten() for p, g in pairs])


def peak_mib(step: Callable[[], object]) -> float:
    """The most memory that tensors made during the step took at a time, as the allocator tells the profiler.

    Autograd's hooks (benchmarks/memory.py) do not see what torch's checkpoint keeps and recomputes; the allocator sees all.
    """
    with torch.autograd.profiler.profile(profile_memory=True, use_kineto=True) as profile:
        step()
    events = sorted((e.start_ns(), e.nbytes()) for e in profile.kineto_results.events() if e.name() == "[memory]")
    now = most = 0
    for _, size in events:
        now += size
        most = max(most, now)
    return most / 2**20


def right(way: Way, kind: str, size: int, bags: int) -> int:
    """How many of `bags` sets are told right. Without a graph encode() would take whole sets, whatever was asked."""
    generator = torch.Generator().manual_seed(3)
    found = 0
    with torch.set_grad_enabled(not way.whole):
        for number in range(bags):
            x, labels = sets(kind, 1, size, generator, positive=number % 2 == 1)
            found += int((logit(way, way.encode(x)) > 0).float().eq(labels).item())
    return found


def report(kind: str, size: int, contestants: dict[str, Way], rounds: int, draws: int, bags: int) -> None:
    x, _ = sets(kind, 1, size, torch.Generator().manual_seed(2), positive=True)
    references = {id(contestants[name].model): gradient(contestants[name], x) for name in WHOLE}
    times: dict[str, list[float]] = {name: [] for name in contestants}
    for _ in range(rounds):
        for name, way in contestants.items():
            start = time.process_time()
            gradient(way, x)
            times[name].append(time.process_time() - start)
    print(f"\n### {kind}, {size:,} elements; {draws} draws, {bags} sets\n")
    print("| way | MiB | ms | value | noise | bias | right |\n|---|---|---|---|---|---|---|")
    known: dict[int, int] = {}  # ways with the value of the whole set share their answers
    for name, way in contestants.items():
        memory = peak_mib(partial(gradient, way, x))
        value, full = references[id(way.model)]
        found = [gradient(way, x) for _ in range(draws if way.drawn else 1)]
        off = statistics.mean(float((z - value).norm() / value.norm()) for z, _ in found)
        noise, bias = noise_and_bias(torch.stack([g for _, g in found]), full)
        if way.whole and id(way.model) not in known:
            known[id(way.model)] = right(way, kind, size, bags)
        score = known[id(way.model)] if way.whole else right(way, kind, size, bags)
        cells = [f"{memory:.1f}", f"{statistics.median(times[name]) * 1e3:.0f}", f"{off:.1g}", f"{noise:.2g}", f"{bias:.2g}"]
        print(f"| {name} | {' | '.join(cells)} | {score} of {bags} |", flush=True)


WHOLE = {"UMBC, full": 3e-3, "ISABs on the whole": 1e-3}  # what each model is trained as, and at what rate


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs="+", default=[16_384, 131_072])
    parser.add_argument("--kinds", nargs="+", default=list(KINDS), choices=list(KINDS))
    parser.add_argument("--steps", type=int, default=100, help="training steps of each model (default 100)")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--draws", type=int, default=20)
    parser.add_argument("--bags", type=int, default=40)
    options = parser.parse_args()
    torch.set_num_threads(1)
    keep_freed_memory()
    print(f"torch {torch.__version__}, one thread, {options.rounds} rounds, {options.steps} training steps")
    for kind in options.kinds:
        torch.manual_seed(0)
        phi = nn.Sequential(nn.Linear(WIDTH, 2 * DIM), nn.ReLU(), nn.Linear(2 * DIM, DIM), nn.ReLU())
        pooled = ss.SetModel(ss.SetEncoder(phi, ss.UMBC(DIM, SLOTS, heads=4)), nn.Linear(DIM, 1))
        contestants = ways(pooled, Whole())
        losses = [train(contestants[name], kind, options.steps, lr) for name, lr in WHOLE.items()]
        print(f"\n{kind}: loss at the end of training {losses[0]:.3f} (UMBC), {losses[1]:.3f} (ISABs)")
        for size in options.sizes:
            report(kind, size, contestants, options.rounds, options.draws, options.bags)


if __name__ == "__main__":
    main()
