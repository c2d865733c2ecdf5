"""Cross-validation: one run for each fold and repeat of a task that takes `fold`, `count` and `repeat`.

out/repeat-0/fold-0/ ...          run folders; finished ones are skipped, so that it can be resumed
    crossval.json                 mean, spread over the repeats and 95 % interval of every metric, when all are done
"""

import dataclasses
import itertools
import json
import statistics
from collections.abc import Callable
from pathlib import Path

from setstream._utils.atomic import write_atomically
from setstream.errors import ConfigurationError
from setstream.training.config import TrainConfig, read_options
from setstream.training.registry import build_task
from setstream.training.trainer import Trainer

Scores = list[dict[str, float]]


def cross_validate(config: TrainConfig, out: Path, folds: int, repeats: int, progress: Callable[[int], None]) -> Scores:
    """Train and test every fold; returns the test metrics of each, repeat after repeat. `progress` gets the number done."""
    if (split := config.task_options.get("split")) is not None:
        raise ConfigurationError(
            f"task.split = {split!r} fixes the test set, so every fold would be the same run. Leave it out to cross-validate, "
            "or use `setstream train` with it, once for each seed"
        )
    scores = []
    for repeat, fold in itertools.product(range(repeats), range(folds)):
        folder = out / f"repeat-{repeat}" / f"fold-{fold}"
        if not (folder / "result.json").exists():
            options = config.task_options | {"fold": fold, "count": folds, "repeat": repeat}
            fold_config = dataclasses.replace(config, task_options=options, seed=config.seed + repeat)
            if not Trainer(build_task(fold_config), fold_config, folder, shown=False).run().done:
                raise KeyboardInterrupt
        scores.append(read_options(folder / "result.json")["metrics"])
        progress(len(scores))
    write_atomically(out / "crossval.json", json.dumps(summarise(scores, repeats), indent=2))
    return scores


def summarise(scores: Scores, repeats: int) -> dict[str, dict[str, float]]:
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
