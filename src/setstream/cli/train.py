"""`setstream train` and `evaluate`, and how flags and files become the options of a run."""

import dataclasses
import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import typer

from setstream.cli.command import console, print_table
from setstream.errors import ConfigurationError
from setstream.training import Trainer
from setstream.training.config import TrainConfig, merge, read_options
from setstream.training.processes import choose_device
from setstream.training.task import SavedRun, build_task, new_config, read_run

INTERRUPTED = 130


def assignments(pairs: list[str]) -> dict[str, Any]:
    """Options from NAME=VALUE, where a value is JSON or a text; `task.NAME` and `model.NAME` go to the task and the model."""
    options: dict[str, Any] = {}
    for pair in pairs:
        name, equals, text = pair.partition("=")
        if not equals or not name:
            raise ConfigurationError(f"an option is NAME=VALUE, like lr=0.001 or model.num_slots=16; got {pair!r}")
        value: Any = text
        with suppress(json.JSONDecodeError):
            value = json.loads(text)
        owner, dot, inner = name.partition(".")
        if not dot:
            options[name] = value
        elif owner in ("task", "model"):
            options.setdefault(f"{owner}_options", {})[inner] = value
        else:
            raise ConfigurationError(f"options with a dot begin with task. or model.; got {name!r}")
    return options


def build_config(file: Path | None, flags: dict[str, Any], pairs: list[str]) -> TrainConfig:
    """The options of a run: those of the file, then flags, then assignments."""
    options = merge(read_options(file) if file else {}, {name: value for name, value in flags.items() if value is not None})
    return new_config(merge(options, assignments(pairs)))


def run_train(out: Path | None, config: Path | None, option: list[str] | None, resume: bool, **flags: Any) -> None:
    """Train or resume; `flags` are options of `TrainConfig`, None where not given."""
    options = build_config(config, flags, option or [])
    name = f"{options.task}-{options.model}-{options.seed}".replace("/", "-").replace(":", "-")
    trainer = Trainer(build_task(options), options, out or Path("runs") / name)
    result = trainer.run(resume=resume)
    trainer.processes.leave()
    console.print(f"run folder: {result.folder}")
    if not result.done:
        raise typer.Exit(INTERRUPTED)


def run_evaluate(folder: Path, option: list[str] | None, device: str, as_json: bool, trust: list[str] | None) -> None:
    """Evaluate the model of a run, perhaps on other data of the same task."""
    config = read_run(folder)
    if set(changes := assignments(option or [])) - {"task_options"}:
        raise ConfigurationError(f"evaluate changes options of the task only (task.NAME=VALUE); got {sorted(changes)}")
    config = dataclasses.replace(config, task_options=merge(config.task_options, changes.get("task_options", {})))
    run = SavedRun(folder, config, trust or [])
    task = run.task()
    with torch.no_grad():
        metrics = task.evaluate(run.model(task).to(choose_device(device)))
    if as_json:
        print(json.dumps(metrics))
    else:
        print_table(("metric", "value"), [(name, f"{value:.5f}") for name, value in metrics.items()])
