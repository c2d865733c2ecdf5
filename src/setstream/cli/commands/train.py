"""`setstream train`, `crossval`, `evaluate` and `sweep`."""

from pathlib import Path
from typing import Annotated

import typer

from setstream.cli.command import command
from setstream.cli.commands.flags import Config, Device, Options, Trust


@command(
    "setstream.cli.train:run_train",
    examples=[
        "setstream train clustering umbc+set-transformer --out runs/umbc",
        "setstream train clustering deepsets --steps 2000 --gradient full -o task.points=256",
        "setstream train --config run.toml --out runs/mine",
        "torchrun --nproc-per-node 2 -m setstream.cli train clustering umbc+set-transformer --out runs/two",
    ],
    note="Ctrl-C saves and stops. The same command with the same --out resumes the run.",
)
def train(
    task: Annotated[str | None, typer.Argument(help="A task (`setstream tasks`), or package.module:Class.")] = None,
    model: Annotated[str | None, typer.Argument(help="A model of the task (`setstream models TASK`).")] = None,
    out: Annotated[Path | None, typer.Option(help="Run folder. Default: runs/TASK-MODEL-SEED.")] = None,
    config: Config = None,
    steps: Annotated[int | None, typer.Option(help="Training steps.")] = None,
    batch: Annotated[int | None, typer.Option(help="Sets per step.")] = None,
    lr: Annotated[float | None, typer.Option(help="Learning rate.")] = None,
    optimizer: Annotated[str | None, typer.Option(help="adam, adamw or sgd.")] = None,
    schedule: Annotated[str | None, typer.Option(help="constant, step or cosine.")] = None,
    gradient: Annotated[
        str | None, typer.Option(help="full, exact, unbiased, importance or subset: see docs/gradients.md.")
    ] = None,
    chunk_size: Annotated[int | None, typer.Option(help="Elements per chunk.")] = None,
    grad_chunks: Annotated[int | None, typer.Option(help="Chunks of each set that carry the gradient.")] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of all random numbers.")] = None,
    device: Annotated[str | None, typer.Option(help="auto, cpu, cuda, cuda:1 or mps.")] = None,
    threads: Annotated[int | None, typer.Option(help="Threads on a CPU.")] = None,
    amp: Annotated[str | None, typer.Option(help="Mixed precision: none or bf16.")] = None,
    parallel: Annotated[
        str | None, typer.Option(help="Under torchrun: data (each process has some sets) or set (a part of every set).")
    ] = None,
    option: Options = None,
    resume: Annotated[bool, typer.Option(help="Resume a run in this folder.")] = True,
) -> None:
    """Train a model of a task."""


@command(
    "setstream.cli.train:run_crossval",
    examples=["setstream crossval mil umbc+set-transformer --config sweeps/mil/musk1.toml --out runs/musk1-umbc"],
    note="If it is stopped, the same command continues with the unfinished folds.",
)
def crossval(
    task: Annotated[str, typer.Argument(help="A task that takes fold, count and repeat.")],
    model: Annotated[str, typer.Argument(help="A model of the task.")],
    out: Annotated[Path, typer.Option(help="Folder for the run folders.")],
    config: Config = None,
    folds: Annotated[int, typer.Option(help="Folds.", min=2)] = 10,
    repeats: Annotated[int, typer.Option(help="Repetitions, each with new folds and a new seed.", min=1)] = 5,
    option: Options = None,
) -> None:
    """Cross-validate a model."""


@command("setstream.cli.train:run_evaluate", examples=["setstream evaluate runs/umbc -o task.test_sets=2000"])
def evaluate(
    folder: Annotated[Path, typer.Argument(help="A run folder.")],
    option: Annotated[list[str] | None, typer.Option("-o", "--option", help="task.NAME=VALUE; may be repeated.")] = None,
    device: Device = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, for scripts.")] = False,
    trust: Trust = None,
) -> None:
    """Evaluate the model of a run, finished or not, on test data."""


@command(
    "setstream.cli.sweep:run_sweep",
    examples=["setstream sweep sweeps/clustering.toml --out runs/clustering --jobs 2"],
    note="If it is stopped, the same command continues: finished runs are skipped, others are resumed.",
)
def sweep(
    file: Annotated[Path, typer.Argument(help="TOML, YAML or JSON with a table `defaults` and tables `runs`.")],
    out: Annotated[Path, typer.Option(help="Folder for the run folders.")] = Path("runs"),
    jobs: Annotated[int, typer.Option(help="Runs at the same time.", min=1)] = 2,
    threads: Annotated[int, typer.Option(help="Threads per run.", min=1)] = 1,
) -> None:
    """Train all configurations of a file, several at a time."""
