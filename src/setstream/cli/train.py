"""`setstream train`, `evaluate` and `crossval`, and how flags and files become the options of a run.

Cross-validation is one run for each fold and repeat of a task that takes `fold`, `count` and `repeat`:

out/repeat-0/fold-0/ ...          run folders; finished ones are skipped, so that it can be resumed
    crossval.json                 mean, spread over the repeats and 95 % interval of every metric, when all are done
"""

import dataclasses
import itertools
import json
import statistics
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import typer
from rich.progress import Progress

from setstream._utils.atomic import write_atomically
from setstream.cli.command import Words, console, print_table
from setstream.errors import ConfigurationError
from setstream.training import Trainer
from setstream.training.config import TrainConfig, read_options
from setstream.training.processes import choose_device
from setstream.training.task import SavedRun, build_task, read_run

INTERRUPTED = 130


def merge(base: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """`base` with `changes` on top; mappings are merged, not replaced."""
    both = {name for name in changes if isinstance(base.get(name), dict) and isinstance(changes[name], dict)}
    return base | changes | {name: merge(base[name], changes[name]) for name in both}


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
    return TrainConfig.from_dict(merge(options, assignments(pairs)))


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


def run_crossval(task: str, model: str, out: Path, config: Path | None, folds: int, repeats: int, option: Words) -> None:
    """Train and test every fold of every repeat, then print means and intervals."""
    options = build_config(config, {"task": task, "model": model}, ["tensorboard=false", *(option or [])])
    if (split := options.task_options.get("split")) is not None:
        raise ConfigurationError(
            f"task.split = {split!r} fixes the test set, so every fold would be the same run. Leave it out to cross-validate, "
            "or use `setstream train` with it, once for each seed"
        )
    scores = []
    with Progress(console=console) as bar:
        row = bar.add_task(f"{task}/{model}", total=folds * repeats)
        for repeat, fold in itertools.product(range(repeats), range(folds)):
            folder = out / f"repeat-{repeat}" / f"fold-{fold}"
            if not (folder / "result.json").exists():
                task_options = options.task_options | {"fold": fold, "count": folds, "repeat": repeat}
                run = dataclasses.replace(options, task_options=task_options, seed=options.seed + repeat)
                if not Trainer(build_task(run), run, folder, shown=False).run().done:
                    raise KeyboardInterrupt
            scores.append(read_options(folder / "result.json")["metrics"])
            bar.advance(row)
    summary = summarise(scores, repeats)
    write_atomically(out / "crossval.json", json.dumps(summary, indent=2))
    rows = [
        (name, f"{score['mean']:.4f}", f"{score['over_repeats']:.4f}", f"{score['low']:.4f} .. {score['high']:.4f}")
        for name, score in summary.items()
    ]
    print_table(("metric", "mean", "± over repeats", "95 % interval"), rows)


def summarise(scores: list[dict[str, float]], repeats: int) -> dict[str, dict[str, float]]:
    """Of every metric that all folds have: the mean, the spread of the repeats' means, and a 95 % interval of the mean.

    The interval treats the folds' scores as independent. Folds of different repeats share bags, so it is somewhat too narrow.
    """
    folds, rows = len(scores) // repeats, {}
    for name in scores[0]:
        if all(name in metrics for metrics in scores):
            values = [metrics[name] for metrics in scores]
            means = [statistics.fmean(values[start : start + folds]) for start in range(0, len(values), folds)]
            mean, half = statistics.fmean(values), 1.96 * statistics.stdev(values) / len(values) ** 0.5
            spread = statistics.stdev(means) if repeats > 1 else float("nan")
            rows[name] = {"mean": mean, "over_repeats": spread, "low": mean - half, "high": mean + half}
    return rows
