"""Repertoires: ways to train a convolution through bags of 10^4 to 10^5 sequences, of which 1 in 100 to 1 in 10,000 matter.

    python -m benchmarks.repertoires                                   the grid: 15 to 20 minutes of a core; can be stopped
    python -m benchmarks.repertoires --table                           tables of what was run
    python -m benchmarks.repertoires --picture out/repertoires.png     AUROC against the rate of the motif
    python -m benchmarks.repertoires --size 100000 --elements 1000 --seeds 0        larger bags
    python -m benchmarks.repertoires --time                            only the processor time of a step of each way

phi     embedding, convolution over residues, maximum over places: 32 features of a sequence
pool    UMBC, softmax attention of a few slots; head: a linear layer

Ways, all of which hold the graph of at most `--elements` sequences of a bag at a time:

    exact        the gradient of the whole bag; chunks are computed again in the backward pass
    importance   exact through the pool; phi for sequences drawn by the size of their gradient
    unbiased     the value of the whole bag, the gradient of one random chunk
    top          DeepRC's rule (Widrich et al. 2020): attention of the whole bag without a graph; then the sequences with the
                 largest attention are all that is encoded
    subsample    a random part of each bag is all that is encoded

All ways of a seed begin with the same weights and see the same bags, new ones in each step. At rates below 1 in 1,000 a way
continues from its own weights at the rate before. AUROC of whole test bags after `--steps` steps (equal memory), and after as
many steps as take the processor time of `--steps` steps of `importance` (equal time; the times are measured first). Each rate
of each way is one line of a JSON-lines file, so that a grid can be stopped, continued, and shared by several processes.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from benchmarks.evidence_common import plot_ranges
from benchmarks.repertoires_data import AMINO, MOTIF, PARTS, Repertoires, part, receptors
from safetensors.torch import load_file, save_file
from scipy import stats
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits as cross_entropy

import setstream as ss
from setstream._utils.registry import cache_folder
from setstream.report.page import pyplot
from setstream.tasks.mil.metrics import auroc
from setstream.training.task import mix

WIDTH, CHANNELS, KERNEL, SLOTS = 8, 32, 5, 4
SCALE, SILENT = 4.0, 0.95  # by how much the first filters are larger; for which share of sequences a feature is zero
RATES = (0.01, 0.001, 0.0001)
FROM_SCRATCH = 0.001  # rarer motifs continue from the weights at the rate before
BATCH, LEARNING_RATE = 8, 1e-2


class Convolution(nn.Module):
    """Features of sequences: x (n, LENGTH) codes to (n, CHANNELS), relu(max over places of conv(embedding(x)) - threshold).

    Each feature is zero for most sequences; `known` sequences decide the first thresholds. Without thresholds, what a motif of
    few sequences adds to a bag's mean is lost among the other sequences.
    """

    def __init__(self, known: Tensor) -> None:
        super().__init__()
        self.embedding = nn.Embedding(1 + len(AMINO), WIDTH, padding_idx=0)
        self.convolution = nn.Conv2d(WIDTH, CHANNELS, (1, KERNEL), bias=False)  # in two dimensions: faster on CPUs
        self.threshold = nn.Parameter(torch.zeros(CHANNELS))
        with torch.no_grad():
            self.convolution.weight.mul_(SCALE)
            self.threshold.copy_(self.largest(known).quantile(SILENT, dim=0))

    def largest(self, x: Tensor) -> Tensor:
        """The largest output of each filter over all places of a sequence."""
        y = self.convolution(self.embedding(x.int()).unsqueeze(1).permute(0, 3, 1, 2))  # (n, CHANNELS, 1, places)
        return torch.max_pool2d(y, (1, y.shape[3])).flatten(1)

    def forward(self, x: Tensor) -> Tensor:
        return (self.largest(x) - self.threshold).relu()


def build(known: Tensor, seed: int) -> ss.SetModel:
    """The model, with thresholds for these sequences."""
    torch.manual_seed(seed)
    encoder = ss.SetEncoder(Convolution(known), ss.UMBC(CHANNELS, num_slots=SLOTS, slot_norm=False), cast_input=False)
    return ss.SetModel(encoder, nn.Sequential(nn.Flatten(), nn.Linear(SLOTS * CHANNELS, 1)))


@torch.no_grad()
def largest_attention(encoder: ss.SetEncoder, bags: Tensor, count: int) -> Tensor:
    """Of each bag (B, N, LENGTH) the `count` sequences with the largest attention, summed over slots (B, count, LENGTH)."""
    attend = ss.SetEncoder(nn.Identity(), encoder.pool)  # phi once, for the state and for the weights
    chosen = []
    for bag in bags:
        features = encoder.phi(bag).unsqueeze(0)
        weights = attend.attention(features, attend.update(None, features))  # (1, heads, slots, N)
        chosen.append(bag[weights.sum((0, 1, 2)).topk(min(count, len(bag))).indices])
    return torch.stack(chosen)


Way = Callable[[ss.SetEncoder, Tensor, int], Tensor]


def streamed(gradient: str) -> Way:
    """A gradient mode of the library, with `elements` sequences at a time."""
    return lambda encoder, bags, elements: ss.encode(encoder, bags, chunk_size=elements, gradient=gradient)


def top(encoder: ss.SetEncoder, bags: Tensor, elements: int) -> Tensor:
    """DeepRC's rule."""
    return ss.encode(encoder, largest_attention(encoder, bags, elements), gradient="full")


WAYS: dict[str, Way] = {
    "exact": streamed("exact"),
    "importance": streamed("importance"),
    "unbiased": streamed("unbiased"),
    "top": top,
    "subsample": streamed("subset"),
}


SAME = ("size", "elements", "steps", "motif", "test_bags")  # what lines of one grid have in common


@dataclass(frozen=True)
class Setting:
    """What all ways of a grid have in common."""

    size: int
    elements: int
    steps: int
    motif: str
    test_bags: int
    results: Path

    def same(self, line: dict[str, Any]) -> bool:
        """Whether a line of the results belongs to this setting."""
        return all(line[name] == getattr(self, name) for name in SAME)

    def lines(self, kind: str) -> list[dict[str, Any]]:
        """The stored lines of this setting: `times` or `auroc`."""
        stored = self.results.read_text().splitlines() if self.results.is_file() else []
        return [line for line in map(json.loads, stored) if kind in line and self.same(line)]

    def store(self, line: dict[str, Any]) -> None:
        self.results.parent.mkdir(parents=True, exist_ok=True)
        known = {name: getattr(self, name) for name in SAME}
        with self.results.open("a") as file:
            file.write(json.dumps(known | line) + "\n")

    def bags(self, sequences: np.ndarray, split: str, rate: float, seed: int) -> Repertoires:
        """The bags of a split. Training bags never come again."""
        count = self.test_bags if split == "test" else 2**31
        seed = mix(seed, list(PARTS).index(split))
        return Repertoires(part(split, sequences), count=count, size=self.size, rate=rate, motif=self.motif, seed=seed)

    def weights(self, way: str, rate: float, seed: int) -> Path:
        """Where the weights of a way are kept."""
        name = f"{way}-{rate:g}-{seed}-{self.size}-{self.elements}-{self.steps}-{self.motif}.safetensors"
        return self.results.with_suffix("") / name


class Training:
    """A model that is trained in one way, a batch of bags per step, half of them positive."""

    def __init__(self, model: ss.SetModel, way: str, bags: Repertoires, elements: int) -> None:
        self.model, self.way, self.bags, self.elements = model, WAYS[way], bags, elements
        self.optimiser = torch.optim.Adam(model.parameters(), lr=LEARNING_RATE)
        self.steps, self.seconds = 0, 0.0

    def step(self) -> float:
        """One step; returns the loss. `seconds` counts the processor time of steps, without that of assembling bags."""
        numbers = range(self.steps * BATCH, (self.steps + 1) * BATCH)
        bags, labels = torch.stack([self.bags[number] for number in numbers]), torch.tensor([number % 2 for number in numbers])
        began = time.process_time()
        logits = self.model.head(self.way(self.model.encoder, bags, self.elements)).flatten()
        loss = cross_entropy(logits, labels.float())
        self.optimiser.zero_grad()
        loss.backward()
        self.optimiser.step()
        self.seconds += time.process_time() - began
        self.steps += 1
        return float(loss.detach())


@torch.no_grad()
def area(model: ss.SetModel, bags: Repertoires) -> float:
    """AUROC of whole bags."""
    model.eval()
    logits = torch.cat([model(bag.unsqueeze(0)).flatten() for bag in map(bags.__getitem__, range(len(bags)))])
    model.train()
    return auroc(logits, torch.arange(len(bags)) % 2)


def measure_times(setting: Setting, sequences: np.ndarray, rounds: int = 5) -> dict[str, float]:
    """Milliseconds of processor time of a step of each way: the median of steps that take turns."""
    bags = setting.bags(sequences, "train", FROM_SCRATCH, 0)
    trainings = {way: Training(build(bags.rows[:5000], 0), way, bags, setting.elements) for way in WAYS}
    seconds: dict[str, list[float]] = {way: [] for way in WAYS}
    for _ in range(rounds):
        for way, training in trainings.items():
            before = training.seconds
            training.step()
            seconds[way].append(training.seconds - before)
    return {way: 1000 * statistics.median(times) for way, times in seconds.items()}


def times_of(setting: Setting, sequences: np.ndarray) -> dict[str, float]:
    """The stored times of this setting, measured now if there are none."""
    if not setting.lines("times"):
        setting.store({"times": measure_times(setting, sequences)})
    times: dict[str, float] = setting.lines("times")[0]["times"]
    return times


def train(setting: Setting, sequences: np.ndarray, way: str, rate: float, seed: int, times: dict[str, float]) -> None:
    """Train one way at one rate, and store its line and its weights."""
    bags, test = (setting.bags(sequences, split, rate, seed) for split in ("train", "test"))
    model = build(bags.rows[:5000], seed)
    if rate < FROM_SCRATCH:
        before = min(other for other in RATES if other > rate)
        model.load_state_dict(load_file(setting.weights(way, before, seed)))
    training = Training(model, way, bags, setting.elements)
    wanted = {"memory": setting.steps, "time": round(setting.steps * times["importance"] / times[way])}
    curve = {0: area(model, test)} if rate < FROM_SCRATCH else {}
    losses = []
    while training.steps < max(wanted.values()):
        losses.append(training.step())
        if training.steps in wanted.values():
            curve[training.steps] = area(model, test)
    place = setting.weights(way, rate, seed)
    place.parent.mkdir(parents=True, exist_ok=True)
    save_file(model.state_dict(), place)
    last = statistics.mean(losses[-len(losses) // 4 :])
    line: dict[str, Any] = {"way": way, "rate": rate, "seed": seed, "auroc": {kind: curve[n] for kind, n in wanted.items()}}
    setting.store(line | {"curve": curve, "loss": last, "seconds": training.seconds, "taken": training.steps})
    print(f"1 in {1 / rate:g}  {way}  seed {seed}  {line['auroc']}  loss {last:.3f}  {training.seconds:.0f} s", flush=True)


Scores = dict[tuple[str, float], dict[int, dict[str, float]]]


def scores(setting: Setting) -> Scores:
    """AUROC at equal memory and at equal time by seed, for each way and rate."""
    found: Scores = {}
    for line in setting.lines("auroc"):
        found.setdefault((line["way"], line["rate"]), {})[line["seed"]] = line["auroc"]
    return found


def difference(gains: Sequence[float]) -> tuple[float, float]:
    """The mean of paired differences, and half of its 95% interval (Student's t).

    >>> difference([0.1, 0.2, 0.3])
    (0.2..., 0.248...)
    """
    error = statistics.stdev(gains) / len(gains) ** 0.5 if len(gains) > 1 else float("nan")
    return statistics.mean(gains), error * float(stats.t.ppf(0.975, len(gains) - 1))


def gains(found: Scores, other: str, kind: str, rates: Sequence[float]) -> list[float]:
    """AUROC of `importance` minus that of another way, by seed: the mean over these rates, if both have all of them."""
    pairs = [(found.get(("importance", rate), {}), found.get((other, rate), {})) for rate in rates]
    seeds = sorted(set.intersection(*(ours.keys() & theirs.keys() for ours, theirs in pairs)))
    return [statistics.mean(ours[seed][kind] - theirs[seed][kind] for ours, theirs in pairs) for seed in seeds]


def table(setting: Setting) -> None:
    """Markdown tables: AUROC of each way at each rate, and what `importance` is ahead of the others."""
    found = scores(setting)
    rates = sorted({rate for _, rate in found}, reverse=True)
    for kind, title in (("memory", "Equal memory"), ("time", "Equal time")):
        print(f"\n{title}: AUROC, mean (lowest to highest seed)\n")
        print("| way | " + " | ".join(f"1 in {1 / rate:,.0f}" for rate in rates) + " |\n" + "|---" * (len(rates) + 1) + "|")
        for way in WAYS:
            values = [[one[kind] for one in found.get((way, rate), {}).values()] for rate in rates]
            cells = [f"{statistics.mean(v):.3f} ({min(v):.3f} to {max(v):.3f}; {len(v)})" if v else "" for v in values]
            print(f"| {way} | " + " | ".join(cells) + " |")
        rare = [rate for rate in rates if rate <= FROM_SCRATCH]
        names = [f"1 in {1 / rate:,.0f}" for rate in rates] + ["mean of 1 in 1,000 and rarer"]
        print("\n| importance minus | " + " | ".join(names) + " |\n" + "|---" * (len(names) + 1) + "|")
        for way in (other for other in WAYS if other != "importance"):
            cells = []
            for some in [[rate] for rate in rates] + [rare]:
                apart = gains(found, way, kind, some)
                cells.append("{:+.3f} ± {:.3f} ({})".format(*difference(apart), len(apart)) if apart else "")
            print(f"| {way} | " + " | ".join(cells) + " |")
        print("\n| seed | rate | " + " | ".join(WAYS) + " |\n" + "|---" * (len(WAYS) + 2) + "|")
        for rate in rates:
            for seed in sorted({seed for (_, other), seeds in found.items() if other == rate for seed in seeds}):
                areas = [found.get((way, rate), {}).get(seed, {}).get(kind) for way in WAYS]
                shown = " | ".join("" if one is None else f"{one:.3f}" for one in areas)
                print(f"| {seed} | 1 in {1 / rate:,.0f} | {shown} |")
    for line in setting.lines("times"):
        print("\nms per step: " + ", ".join(f"{way} {ms:.0f}" for way, ms in line["times"].items()))


def picture(setting: Setting, path: Path) -> None:
    """AUROC against the rate, at equal memory and at equal time."""
    figure, both = pyplot().subplots(1, 2, figsize=(9, 3.6), sharey=True, constrained_layout=True)
    found = scores(setting)
    for axes, kind in zip(both, ("memory", "time"), strict=True):
        for way in WAYS:
            values = {1 / rate: [one[kind] for one in seeds.values()] for (name, rate), seeds in found.items() if name == way}
            plot_ranges(axes, values, way)
        axes.axhline(0.5, color="0.7", linewidth=1)
        axes.set(xscale="log", xlabel="one sequence with the motif in ...", title=f"equal {kind}")
    both[0].set(ylabel="AUROC of whole test bags")
    both[0].legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    print(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ways", nargs="+", choices=list(WAYS), default=list(WAYS))
    parser.add_argument("--rates", nargs="+", type=float, choices=RATES, default=list(RATES))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--size", type=int, default=10_000, help="sequences of a bag")
    parser.add_argument("--elements", type=int, default=1000, help="sequences of a bag that have a graph at a time")
    parser.add_argument("--steps", type=int, default=100, help=f"steps of {BATCH} bags")
    parser.add_argument("--motif", default=MOTIF, help="a point leaves the residue that was there")
    parser.add_argument("--test-bags", type=int, default=200)
    parser.add_argument("--results", type=Path, default=cache_folder() / "repertoires.jsonl", help="a JSON-lines file")
    parser.add_argument("--time", action="store_true", help="measure the time of a step of each way, and train nothing")
    parser.add_argument("--table", action="store_true", help="print tables, and train nothing")
    parser.add_argument("--picture", type=Path, help="write a picture of what was run, and train nothing")
    given = vars(parser.parse_args())
    setting = Setting(**{name: given[name] for name in ("size", "elements", "steps", "motif", "test_bags", "results")})
    if given["picture"]:
        return picture(setting, given["picture"])
    if not given["table"]:
        torch.set_num_threads(1)
        sequences = receptors()
        times = times_of(setting, sequences)
        for rate in sorted(given["rates"], reverse=True) * (not given["time"]):
            for seed in given["seeds"]:
                for way in given["ways"]:
                    if seed not in scores(setting).get((way, rate), {}):
                        train(setting, sequences, way, rate, seed, times)
    table(setting)
    return None


if __name__ == "__main__":
    main()
