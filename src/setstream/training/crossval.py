"""Cross-validation: one run for each fold and repeat of a task that takes `fold`, `count` and `repeat`.

out/repeat-0/fold-0/ ...          run folders; finished ones are skipped, so it resumes like everything else
    crossval.json                 mean, spread over the repeats and 95 % interval of every metric, when all are done
"""

import dataclasses
import json
import statistics
from collections.abc import Callable
from pathlib import Path

from setstream._utils.atomic import write_atomically
from setstream.errors import ConfigurationError
from setstream.training.config import TrainConfig, read_options
from setstream.training.task import Task
from setstream.training.trainer import Trainer


def cross_validate(
    config: TrainConfig,
    build: Callable[[TrainConfig], Task],
    out: Path,
    *,
    folds: int = 10,
    repeats: int = 5,
    progress: Callable[[int, int], None] | None = None,
) -> list[dict[str, float]]:
    """Train and test every fold; gives the test metrics of each, those of a repeat one after another."""
    if config.task_options.get("split") is not None:
        raise ConfigurationError(
            f"task.split = {config.task_options['split']!r} says what is tested, so every fold would be the same run. Leave it "
            "out to cross-validate, or use `setstream train` with it, once for each seed"
        )
    found = []
    for repeat in range(repeats):
        for fold in range(folds):
            folder = out / f"repeat-{repeat}" / f"fold-{fold}"
            result = folder / "result.json"
            if not result.exists():
                options = config.task_options | {"fold": fold, "count": folds, "repeat": repeat}
                own = dataclasses.replace(config, task_options=options, seed=config.seed + repeat)
                outcome = Trainer(build(own), own, folder, shown=False).run()
                if not outcome.done:
                    raise KeyboardInterrupt
            found.append(read_options(result)["metrics"])
            if progress is not None:
                progress(len(found), folds * repeats)
    write_atomically(out / "crossval.json", json.dumps(summarise(found, repeats), indent=2))
    return found


def summarise(found: list[dict[str, float]], repeats: int) -> dict[str, dict[str, float]]:
    """Of every metric that all folds have: the mean, the spread of the repeats' means, and a 95 % interval of the mean.

    The interval is that of the folds' scores as if they were independent; folds of different repeats share bags, so it is on
    the narrow side.
    """
    folds, rows = len(found) // repeats, {}
    for name in found[0]:
        if all(name in metrics for metrics in found):
            values = [metrics[name] for metrics in found]
            means = [statistics.fmean(values[start : start + folds]) for start in range(0, len(values), folds)]
            mean, half = statistics.fmean(values), 1.96 * statistics.stdev(values) / len(values) ** 0.5
            spread = statistics.stdev(means) if repeats > 1 else float("nan")
            rows[name] = {"mean": mean, "over_repeats": spread, "low": mean - half, "high": mean + half}
    return rows
