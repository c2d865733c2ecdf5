"""Survival from slides: Cox over whole patients beside what fits the same memory, on simulated survival.

    python benchmarks/survival_mil.py c-index       the C-index of three ways to train, each at two learning rates
    python benchmarks/survival_mil.py memory        peak memory of a step, by the number of patients and patches

A patient has 200 to 600 patches of 32 features, standard normal. A share of them, uniform from 0 to 5 % over patients, is
shifted by 4 in the same direction; the hazard is e^(4 · share / 5 %), times are exponential, some patients are censored. 100
patients are for training and 100 for the test. All ways train ab-mil for 15 epochs, with a graph for at most 256 patches at a
time:

    exact          Cox over batches of 16 patients, each a state that carries the gradient: all patches
    one patient    batches of one patient, all patches; Cox has nothing to compare, so discrete time
    subsampling    Cox over batches of 16 patients, 16 random patches of each

Memory is the largest resident memory beyond that before the step; each row is a process of its own.
"""

import resource
import subprocess
import sys
import tempfile
from itertools import product

import torch

from setstream.data import ArraySource
from setstream.sets.source import SetSource
from setstream.tasks.mil import Bags, Mil
from setstream.tasks.mil.targets import target_class
from setstream.training import Encode, Trainer

DIM, GRAPH, BATCH, PATIENTS, EPOCHS, SHARE = 32, 256, 16, 200, 15, 0.05
WAYS = {  # the kind of labels; sets per step, gradient and chunk size
    "exact": ("cox", BATCH, "exact", GRAPH),
    "one patient": ("discrete-time", 1, "exact", GRAPH),
    "subsampling": ("cox", BATCH, "subset", GRAPH // BATCH),
}
RATES, SEEDS = (0.003, 0.01), range(5)


def cohort(kind: str, seed: int) -> Bags:
    """Patients with their times and events."""
    generator = torch.Generator().manual_seed(seed)
    direction = torch.randn(DIM, generator=generator)
    shares = SHARE * torch.rand(PATIENTS, generator=generator)
    patients: list[SetSource] = []
    for share in shares.tolist():
        bag = torch.randn(int(torch.randint(200, 601, (), generator=generator)), DIM, generator=generator)
        bag[: round(share * len(bag))] += 4 * direction / direction.norm()
        patients.append(ArraySource(bag))
    time = torch.empty(PATIENTS).exponential_(generator=generator) / (4 * shares / SHARE).exp()
    censoring = torch.empty(PATIENTS).exponential_(generator=generator) / 4
    values = torch.stack([torch.minimum(time, censoring), (time <= censoring).float()], 1)
    return Bags(patients, values, target_class(kind)())


def c_index(way: str, rate: float, seed: int) -> float:
    """The C-index of the test patients."""
    kind, batch, gradient, chunk_size = WAYS[way]
    task = Mil(bags=cohort(kind, seed), kind=kind, count=2)
    options = {"lr": rate, "seed": seed, "batch": batch, "gradient": gradient, "chunk_size": chunk_size}
    steps = EPOCHS * (PATIENTS // 2) // batch
    config = Mil.config(
        "ab-mil", {"validation": 0.0}, steps=steps, evaluate_every=10**9, tensorboard=False, threads=1, **options
    )
    with tempfile.TemporaryDirectory() as folder:
        return Trainer(task, config, folder, shown=False).run().metrics["c_index"]


class Drawn(SetSource):
    """Random features, drawn again whenever they are read."""

    def __init__(self, size: int) -> None:
        super().__init__("drawn", None, None)
        self.size = size

    def __len__(self) -> int:
        return self.size

    @property
    def shape(self) -> tuple[int, ...]:
        return (512,)

    @property
    def dtype(self) -> torch.dtype:
        return torch.float32

    def read(self, start: int, stop: int) -> torch.Tensor:
        return torch.randn(stop - start, 512, generator=torch.Generator().manual_seed(start))


def memory(gradient: str, patients: int, patches: int) -> None:
    """A step of Cox over some patients, with the gradient `exact`, or `full` where it fits."""
    torch.manual_seed(0)
    values = torch.stack([torch.arange(float(patients)), torch.ones(patients)], 1)
    sources: list[SetSource] = [Drawn(9)] * 4
    task = Mil(bags=Bags(sources, values[:4], target_class("cox")()), count=2)
    model, encode = task.build("ab-mil"), Encode(gradient, chunk_size=4096)

    def step(bags: list[SetSource], values: torch.Tensor) -> float:
        model.zero_grad()
        loss = task.loss(model, {"bags": bags, "label": values}, encode)
        loss.backward()
        return float(loss.detach())

    step([Drawn(4096)] * 2, values[:2])
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    loss = step([Drawn(patches)] * patients, values)
    peak = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    print(f"| {gradient} | {patients} | {patches:,} | {peak:.0f} | {loss:.4f} |", flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    match sys.argv[1:]:
        case ["memory", gradient, patients, patches]:
            memory(gradient, int(patients), int(patches))
        case ["memory"]:
            print("| gradient | patients | patches of each | MiB | loss |")
            rows = ["exact 16 5000", "exact 64 5000", "exact 256 5000", "exact 16 20000", "exact 16 80000"]
            for row in [*rows, "full 16 5000", "full 64 5000"]:
                subprocess.run([sys.executable, __file__, "memory", *row.split()], check=True)
        case ["c-index", way, rate, seed]:
            print(f"seed {seed}  {way:12}  rate {rate}  C-index {c_index(way, float(rate), int(seed)):.3f}", flush=True)
        case ["c-index"]:
            for one in product(WAYS, RATES, SEEDS):
                subprocess.run([sys.executable, __file__, "c-index", *map(str, one)], check=True)
        case _:
            print(__doc__)
