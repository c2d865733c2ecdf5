"""Cross-validation: one run for each fold and repeat of a task that takes `fold`, `count` and `repeat`.

out/repeat-0/fold-0/ ...          run folders; finished ones are skipped, so it resumes like everything else
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path

from setstream.training.config import TrainConfig
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
            found.append(json.loads(result.read_text())["metrics"])
            if progress is not None:
                progress(len(found), folds * repeats)
    return found
