"""Run folders as rows of a table."""

import json
import statistics
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from setstream.errors import ConfigurationError
from setstream.models.model import SetModel
from setstream.training.config import FREE, TrainConfig, read_options
from setstream.training.record import read_metrics
from setstream.training.registry import SavedRun, read_run
from setstream.training.task import Task

AnyTask = TypeVar("AnyTask", bound=Task)


@dataclass(frozen=True)
class FinishedRun:
    """One run folder whose run is done."""

    folder: Path
    config: TrainConfig
    result: dict[str, Any]
    trust: Iterable[str] = ()

    @property
    def saved(self) -> SavedRun:
        """Its task and its trained model."""
        return SavedRun(self.folder, self.config, self.trust)

    @property
    def metrics(self) -> dict[str, float]:
        """The test metrics at the end."""
        found: dict[str, float] = self.result["metrics"]
        return found

    def seconds(self) -> float:
        """How long training took; of a run that was stopped and resumed, as its last part says."""
        return float(self.result["seconds"]) * self.result["step"] / max(1, self.result.get("steps_timed", self.result["step"]))

    def curve(self, metric: str) -> tuple[list[int], list[float]]:
        """A test metric by step."""
        lines = read_metrics(self.folder, "test") + read_metrics(self.folder, "final")
        return [line["step"] for line in lines if metric in line], [line[metric] for line in lines if metric in line]

    def label(self) -> str:
        """Model, gradient and options: what seeds have in common."""
        options = "".join(f", {name}={value}" for name, value in self.config.model_options.items())
        size = self.config.chunk_size * self.config.grad_chunks
        gradient = self.config.gradient if self.config.gradient in ("full", "exact") else f"{self.config.gradient} {size}"
        return f"{self.config.model} ({gradient}{options})"

    def task(self, kind: type[AnyTask]) -> AnyTask:
        """The run's task, which is of this kind."""
        task = self.saved.task()
        assert isinstance(task, kind)
        return task

    def model(self) -> SetModel:
        """The trained model, in eval mode."""
        return self.saved.model()


def find_runs(folders: list[Path], trust: Iterable[str] = ()) -> list[FinishedRun]:
    """All finished runs in or below the folders; `trust`: see `SavedRun`."""
    trust = tuple(trust)
    found = []
    seen: set[Path] = set()
    for folder in folders:
        if not folder.is_dir():
            raise ConfigurationError(f"there is no folder {folder}")
        for result in sorted(folder.resolve().rglob("result.json")):
            if result in seen:
                continue
            seen.add(result)
            found.append(FinishedRun(result.parent, read_run(result.parent), read_options(result), trust))
    if not found:
        raise ConfigurationError(f"no finished run (with a result.json) in {', '.join(map(str, folders))}")
    return found


def without_seed(folder: Path, config: TrainConfig) -> dict[str, Any]:
    """What runs with other seeds have in common; of a run that began with a sibling, what its sibling has in common."""
    found = {name: value for name, value in config.to_dict().items() if name != "seed" and name not in FREE}
    if config.init_from is not None:
        first = folder.parent / Path(config.init_from).name
        if (first / "config.json").is_file():
            found["init_from"] = without_seed(first, read_run(first))
    return found


def by_label(runs: list[FinishedRun]) -> dict[str, list[FinishedRun]]:
    """Runs that differ in nothing but their seed, together; where labels coincide, they say what else differs."""
    groups: dict[str, list[FinishedRun]] = {}
    for run in runs:
        groups.setdefault(json.dumps(without_seed(run.folder, run.config), sort_keys=True), []).append(run)
    labels: dict[str, list[list[FinishedRun]]] = {}
    for group in groups.values():
        labels.setdefault(group[0].label(), []).append(group)
    found: dict[str, list[FinishedRun]] = {}
    for label, own in labels.items():
        configs = [group[0].config.to_dict() for group in own]
        differing = [n for n in configs[0] if n not in FREE | {"seed"} and any(c[n] != configs[0][n] for c in configs)]
        for group, config in zip(own, configs, strict=True):
            extra = "".join(f", {name} {config[name]}" for name in differing)
            found[f"{label[:-1]}{extra})"] = group
    return found


def mean_and_spread(values: list[float]) -> str:
    """Mean and standard deviation over seeds, as text."""
    mean = statistics.mean(values)
    return f"{mean:.3f} ± {statistics.stdev(values):.3f}" if len(values) > 1 else f"{mean:.3f}"
