"""`setstream evaluate` and `setstream crossval`: how good is a model?"""

import dataclasses
import json
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from setstream.cli.options import assignments, merge
from setstream.errors import ConfigurationError
from setstream.training.config import TrainConfig
from setstream.training.crossval import cross_validate, summarise
from setstream.training.processes import choose_device
from setstream.training.registry import SavedRun, build_task, read_run


def run_evaluate(folder: Path, options: list[str], device: str, as_json: bool, trust: list[str], console: Console) -> None:
    """Test the model of a run, perhaps on other data of the same task."""
    chosen = read_run(folder)
    changes = assignments(options)
    if set(changes) - {"task_options"}:
        raise ConfigurationError(f"only task.NAME=VALUE can be changed when testing; got {sorted(changes)}")
    chosen = dataclasses.replace(chosen, task_options=merge(chosen.task_options, changes.get("task_options", {})))
    run = SavedRun(folder, chosen, trust)
    task = run.task()
    model = run.model(task).to(choose_device(device))
    with torch.no_grad():
        found = task.evaluate(model)
    if as_json:
        print(json.dumps(found))
        return
    rows = Table("metric", "value", box=None)
    for name, value in found.items():
        rows.add_row(name, f"{value:.5f}")
    console.print(rows)


def run_crossval(config: TrainConfig, out: Path, folds: int, repeats: int, console: Console) -> None:
    """Every fold of every repeat, then means and intervals."""
    with Progress(console=console) as bar:
        row = bar.add_task(f"{config.task}/{config.model}", total=folds * repeats)
        found = cross_validate(
            config,
            build_task,
            out,
            folds=folds,
            repeats=repeats,
            progress=lambda done, total: bar.update(row, completed=done, total=total),
        )
    rows = Table("metric", "mean", "± over repeats", "95 % interval", box=None)
    for name, own in summarise(found, repeats).items():
        rows.add_row(name, f"{own['mean']:.4f}", f"{own['over_repeats']:.4f}", f"{own['low']:.4f} .. {own['high']:.4f}")
    console.print(rows)
