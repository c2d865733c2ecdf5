"""`setstream crossval`: one run for each fold and repeat of a task that takes `fold`, `count` and `repeat`.

    out/repeat-0/fold-0/ ...          run folders; finished ones are skipped, so that it can be resumed
        repeat-0/fold-0-choice-1/inner-2/ ...     with --each: runs on the training sets of the fold that compare options
        crossval.json                 of every metric: mean, deviations over folds and repeats, 95 % interval
        predictions.csv               predictions for the test sets of all folds, if the task writes them

Folds are drawn, or those of the task's split files. With --each, every fold chooses the options with the best mean over its
inner folds, which never see its test sets (nested cross-validation).
"""

import csv
import dataclasses
import itertools
import json
import statistics
from pathlib import Path
from typing import Any

from rich.progress import Progress

from setstream._utils.atomic import whole_or_nothing, write_atomically
from setstream.cli.command import Words, console, print_table
from setstream.cli.train import assignments, build_config
from setstream.errors import ConfigurationError
from setstream.training import Trainer
from setstream.training.config import TrainConfig, merge, read_options
from setstream.training.task import build_task, new_config, task_class

DRAWN = 10  #: folds, where none are prescribed
PREDICTIONS = "predictions.csv"


def run_crossval(
    task: str,
    model: str,
    out: Path,
    config: Path | None,
    folds: int | None,
    repeats: int,
    each: Words,
    inner: int,
    option: Words,
) -> None:
    """Train and test every fold of every repeat, then print means and intervals."""
    options = build_config(config, {"task": task, "model": model}, ["tensorboard=false", *(option or [])])
    count, choices = _count(options, folds), combinations(options, each or [])
    scores: dict[tuple[int, int], dict[str, float]] = {}
    with Progress(console=console) as bar:
        row = bar.add_task(f"{task}/{model}", total=count * repeats)
        for repeat, fold in itertools.product(range(repeats), range(count)):
            folder = out / f"repeat-{repeat}" / f"fold-{fold}"
            place = {"fold": fold, "count": count, "repeat": repeat}
            runs = [_with_place(choice, place, options.seed + repeat) for choice in choices]
            number = 0 if len(runs) == 1 else _choose(runs, folder, inner)
            scores[repeat, fold] = _finish(runs[number], folder)
            bar.advance(row)
    summary = summarise(list(scores.values()), repeats)
    write_atomically(out / "crossval.json", json.dumps(summary, indent=2))
    _join_predictions(out, list(scores))
    rows = [
        (name, *(f"{score[part]:.4f}" for part in ("mean", "sd", "over_repeats")), f"{score['low']:.4f} .. {score['high']:.4f}")
        for name, score in summary.items()
    ]
    print_table(("metric", "mean", "± over folds", "± over repeats", "95 % interval"), rows)


def _count(options: TrainConfig, folds: int | None) -> int:
    """The number of folds: those of the task's split, or as many as were asked for."""
    prescribed = task_class(options.task).fold_count(options.task_options)
    if prescribed == 1:
        raise ConfigurationError(
            f"task.split = {options.task_options['split']!r} fixes the test set, so every fold would be the same run. Leave it "
            "out to cross-validate, give a split with several folds, or use `setstream train` with it, once for each seed"
        )
    if prescribed is not None and folds not in (None, prescribed):
        raise ConfigurationError(f"the split has {prescribed} folds; got --folds {folds}: leave it out")
    return prescribed or folds or DRAWN


def combinations(options: TrainConfig, each: list[str]) -> list[TrainConfig]:
    """The options with every combination of the values in NAME=[VALUE, ...]."""
    lists = []
    for pair in each:
        name, _, text = pair.partition("=")
        try:
            values = json.loads(text)
        except json.JSONDecodeError:
            values = None
        if not isinstance(values, list) or not values:
            raise ConfigurationError(f"--each takes a list of values, like lr=[1e-4,1e-3]; got {pair!r}")
        lists.append([f"{name}={json.dumps(value)}" for value in values])
    given = options.to_dict()
    return [new_config(merge(given, assignments(list(pairs)))) for pairs in itertools.product(*lists)]


def _with_place(options: TrainConfig, place: dict[str, Any], seed: int) -> TrainConfig:
    return dataclasses.replace(options, task_options=options.task_options | place, seed=seed)


def _finish(options: TrainConfig, folder: Path) -> dict[str, float]:
    """The metrics of a run, which is trained unless it is finished."""
    if not (folder / "result.json").exists() and not Trainer(build_task(options), options, folder, shown=False).run().done:
        raise KeyboardInterrupt
    return dict(read_options(folder / "result.json")["metrics"])


def _choose(runs: list[TrainConfig], folder: Path, inner: int) -> int:
    """The number of the options that are best on the inner folds of a fold's training sets, by `select`."""
    means = []
    for number, run in enumerate(runs):
        name = (run.select or "selection").removeprefix("-")
        sign, place = (-1 if run.select == f"-{name}" else 1), folder.with_name(f"{folder.name}-choice-{number}")
        options = [_with_place(run, {"inner": part, "inner_count": inner}, run.seed) for part in range(inner)]
        scores = [_finish(own, place / f"inner-{part}") for part, own in enumerate(options)]
        means.append(statistics.fmean(sign * score[name] for score in scores if name in score))
    return means.index(max(means))


def _join_predictions(out: Path, places: list[tuple[int, int]]) -> None:
    """One table of the predictions for the test sets of all folds, with repeat and fold in front."""
    tables = {place: out / f"repeat-{place[0]}" / f"fold-{place[1]}" / PREDICTIONS for place in places}
    if not all(table.exists() for table in tables.values()):
        return
    with whole_or_nothing(out / PREDICTIONS) as hidden, hidden.open("w", newline="") as file:
        writer = csv.writer(file)
        for number, (place, table) in enumerate(tables.items()):
            with table.open(newline="") as rows:
                header, *lines = csv.reader(rows)
                writer.writerows([["repeat", "fold", *header]] if number == 0 else [])
                writer.writerows([*place, *line] for line in lines)


def summarise(scores: list[dict[str, float]], repeats: int) -> dict[str, dict[str, float]]:
    """Of every metric that all folds have: mean, deviations over folds and of the repeats' means, 95 % interval of the mean.

    The interval treats the folds' scores as independent. Folds of different repeats share bags, so it is somewhat too narrow.
    """
    folds, rows = len(scores) // repeats, {}
    for name in scores[0]:
        if all(name in metrics for metrics in scores):
            values = [metrics[name] for metrics in scores]
            means = [statistics.fmean(values[start : start + folds]) for start in range(0, len(values), folds)]
            mean, sd = statistics.fmean(values), statistics.stdev(values)
            half, spread = 1.96 * sd / len(values) ** 0.5, statistics.stdev(means) if repeats > 1 else float("nan")
            rows[name] = {"mean": mean, "sd": sd, "over_repeats": spread, "low": mean - half, "high": mean + half}
    return rows
