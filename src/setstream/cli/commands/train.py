"""`setstream train`, `crossval`, `evaluate` and `sweep`."""

from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from setstream.cli.command import Config, Device, Options, Trust, command


@command(
    "setstream.cli.train:run_train",
    "setstream train clustering umbc+set-transformer --out runs/umbc",
    "setstream train clustering deepsets --steps 2000 --gradient full -o task.points=256",
    "setstream train --config run.toml --out runs/mine",
    "torchrun --nproc-per-node 2 -m setstream.cli train clustering umbc+set-transformer --out runs/two",
    note="Ctrl-C saves and stops. The same command with the same --out resumes the run.",
)
def train(
    task: Annotated[str | None, Argument(help="A task (`setstream tasks`), or package.module:Class.")] = None,
    model: Annotated[str | None, Argument(help="A model of the task (`setstream models TASK`).")] = None,
    out: Annotated[Path | None, Option(help="Run folder. Default: runs/TASK-MODEL-SEED.")] = None,
    config: Config = None,
    steps: Annotated[int | None, Option(help="Training steps.")] = None,
    batch: Annotated[int | None, Option(help="Sets per step.")] = None,
    lr: Annotated[float | None, Option(help="Learning rate.")] = None,
    optimizer: Annotated[str | None, Option(help="adam, adamw or sgd.")] = None,
    schedule: Annotated[str | None, Option(help="constant, step or cosine.")] = None,
    gradient: Annotated[str | None, Option(help="full, exact, unbiased, importance or subset: see docs/gradients.md.")] = None,
    chunk_size: Annotated[int | None, Option(help="Elements per chunk.")] = None,
    grad_chunks: Annotated[int | None, Option(help="Chunks of each set that carry the gradient.")] = None,
    seed: Annotated[int | None, Option(help="Seed of all random numbers.")] = None,
    device: Annotated[str | None, Option(help="auto, cpu, cuda, cuda:1 or mps.")] = None,
    threads: Annotated[int | None, Option(help="Threads on a CPU.")] = None,
    amp: Annotated[str | None, Option(help="Mixed precision: none or bf16.")] = None,
    parallel: Annotated[
        str | None, Option(help="Under torchrun: data (each process has some sets) or set (a part of every set).")
    ] = None,
    option: Options = None,
    resume: Annotated[bool, Option(help="Resume a run in this folder.")] = True,
) -> None:
    """Train a model of a task."""


@command(
    "setstream.cli.train:run_crossval",
    "setstream crossval mil umbc+set-transformer --config sweeps/mil/musk1.toml --out runs/musk1-umbc",
    note="If it is stopped, the same command continues with the unfinished folds.",
)
def crossval(
    task: Annotated[str, Argument(help="A task that takes fold, count and repeat.")],
    model: Annotated[str, Argument(help="A model of the task.")],
    out: Annotated[Path, Option(help="Folder for the run folders.")],
    config: Config = None,
    folds: Annotated[int, Option(help="Folds.", min=2)] = 10,
    repeats: Annotated[int, Option(help="Repetitions, each with new folds and a new seed.", min=1)] = 5,
    option: Options = None,
) -> None:
    """Cross-validate a model."""


@command("setstream.cli.train:run_evaluate", "setstream evaluate runs/umbc -o task.test_sets=2000")
def evaluate(
    folder: Annotated[Path, Argument(help="A run folder.")],
    option: Annotated[list[str] | None, Option("-o", "--option", help="task.NAME=VALUE; may be repeated.")] = None,
    device: Device = "auto",
    as_json: Annotated[bool, Option("--json", help="Print JSON, for scripts.")] = False,
    trust: Trust = None,
) -> None:
    """Evaluate the model of a run, finished or not, on test data."""


@command(
    "setstream.cli.sweep:run_sweep",
    "setstream sweep sweeps/clustering.toml --out runs/clustering --jobs 2",
    note="If it is stopped, the same command continues: finished runs are skipped, others are resumed.",
)
def sweep(
    file: Annotated[Path, Argument(help="TOML, YAML or JSON with a table `defaults` and tables `runs`.")],
    out: Annotated[Path, Option(help="Folder for the run folders.")] = Path("runs"),
    jobs: Annotated[int, Option(help="Runs at the same time.", min=1)] = 2,
    threads: Annotated[int, Option(help="Threads per run.", min=1)] = 1,
) -> None:
    """Train all configurations of a file, several at a time."""
