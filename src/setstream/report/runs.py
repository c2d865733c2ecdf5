"""Finished run folders, and those that differ in their seed only as one group."""

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from setstream.errors import ConfigurationError
from setstream.training.config import FREE, TrainConfig, read_options
from setstream.training.record import read_metrics
from setstream.training.registry import SavedRun, read_run
from setstream.training.task import Task

AnyTask = TypeVar("AnyTask", bound=Task)
Key = TypeVar("Key")


@dataclass(frozen=True)
class FinishedRun(SavedRun):
    """One run folder whose run is done, with its result.json."""

    result: dict[str, Any] = field(default_factory=dict)

    @property
    def metrics(self) -> dict[str, float]:
        """The test metrics at the end."""
        return self.result["metrics"]

    def seconds(self) -> float:
        """The training time; of a resumed run, extrapolated from the steps of its last part."""
        return float(self.result["seconds"]) * self.result["step"] / max(1, self.result.get("steps_timed", self.result["step"]))

    def curve(self, metric: str) -> tuple[list[int], list[float]]:
        """Steps, and the value of a test metric at each."""
        lines = read_metrics(self.folder, "test") + read_metrics(self.folder, "final")
        return [line["step"] for line in lines if metric in line], [line[metric] for line in lines if metric in line]

    def label(self) -> str:
        """Model, gradient and options: what seeds have in common."""
        options = "".join(f", {name}={value}" for name, value in self.config.model_options.items())
        size = self.config.chunk_size * self.config.grad_chunks
        gradient = self.config.gradient if self.config.gradient in ("full", "exact") else f"{self.config.gradient} {size}"
        return f"{self.config.model} ({gradient}{options})"

    def task_as(self, kind: type[AnyTask]) -> AnyTask:
        """The run's task, which must be of this kind."""
        task = self.task()
        if not isinstance(task, kind):
            raise ConfigurationError(f"{self.folder}: expected a run of {kind.name}; got one of {self.config.task}")
        return task


def find_runs(folders: list[Path], trust: Iterable[str] = ()) -> list[FinishedRun]:
    """All finished runs in or below the folders, each once; `trust`: see `SavedRun`."""
    trust = tuple(trust)
    results: dict[Path, None] = {}
    for folder in folders:
        if not folder.is_dir():
            raise ConfigurationError(f"there is no folder {folder}")
        results |= dict.fromkeys(sorted(folder.resolve().rglob("result.json")))
    if not results:
        raise ConfigurationError(f"no finished run (with a result.json) in {', '.join(map(str, folders))}")
    return [FinishedRun(path.parent, read_run(path.parent), trust, read_options(path)) for path in results]


def group_by(runs: Iterable[FinishedRun], key: Callable[[FinishedRun], Key]) -> dict[Key, list[FinishedRun]]:
    """Runs with the same key together, in the order in which the keys first occur."""
    groups: dict[Key, list[FinishedRun]] = {}
    for run in runs:
        groups.setdefault(key(run), []).append(run)
    return groups


def without_seed(folder: Path, config: TrainConfig) -> dict[str, Any]:
    """The options that runs with other seeds share; of a second stage, with the options of its first stage for the folder."""
    options = {name: value for name, value in config.to_dict().items() if name != "seed" and name not in FREE}
    if config.init_from is not None:
        first = folder.parent / Path(config.init_from).name
        if (first / "config.json").is_file():
            options["init_from"] = without_seed(first, read_run(first))
    return options


def by_label(runs: list[FinishedRun]) -> dict[str, list[FinishedRun]]:
    """Groups of runs that differ in their seed only. Where labels coincide, they also name the options that differ."""
    seeds = group_by(runs, lambda run: json.dumps(without_seed(run.folder, run.config), sort_keys=True))
    same_label = group_by((group[0] for group in seeds.values()), FinishedRun.label)
    labels = {}
    for label, firsts in same_label.items():
        configs = [run.config.to_dict() for run in firsts]
        differing = [n for n in configs[0] if n not in FREE | {"seed"} and any(c[n] != configs[0][n] for c in configs)]
        for run, config in zip(firsts, configs, strict=True):
            labels[run.folder] = f"{label[:-1]}{''.join(f', {name} {config[name]}' for name in differing)})"
    return {labels[group[0].folder]: group for group in seeds.values()}
