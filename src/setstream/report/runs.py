"""Run folders as rows of a table."""

from __future__ import annotations

import json
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from setstream.errors import ConfigurationError
from setstream.model import SetModel
from setstream.tasks import task_class
from setstream.training.checkpoint import load_weights
from setstream.training.config import TrainConfig, read_options
from setstream.training.record import read_metrics
from setstream.training.task import Task


@dataclass(frozen=True)
class FinishedRun:
    """One run folder whose run is done."""

    folder: Path
    config: TrainConfig
    result: dict[str, Any]

    @property
    def metrics(self) -> dict[str, float]:
        """The test metrics at the end."""
        found: dict[str, float] = self.result["metrics"]
        return found

    def milliseconds(self) -> float | None:
        """Wall clock a step, evaluations included; None for a run that was resumed at its end."""
        steps = self.result.get("steps_timed", 0)
        return 1000 * self.result["seconds"] / steps if steps else None

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

    def task(self) -> Task:
        """The task it was trained for."""
        return task_class(self.config.task)(**self.config.task_options)

    def model(self) -> SetModel:
        """The trained model, in eval mode."""
        model = self.task().build(self.config.model, **self.config.model_options)
        load_weights(model, self.folder / "model.safetensors")
        return model.eval()


def find_runs(folders: list[Path]) -> list[FinishedRun]:
    """All finished runs in or below the folders."""
    found = []
    for folder in folders:
        if not folder.is_dir():
            raise ConfigurationError(f"there is no folder {folder}")
        for result in sorted(folder.rglob("result.json")):
            config = TrainConfig.from_dict(read_options(result.parent / "config.json"))
            found.append(FinishedRun(result.parent, config, json.loads(result.read_text())))
    if not found:
        raise ConfigurationError(f"no finished run (with a result.json) in {', '.join(map(str, folders))}")
    return found


def by_label(runs: list[FinishedRun]) -> dict[str, list[FinishedRun]]:
    """Runs that differ in nothing but their seed, together."""
    groups: dict[str, list[FinishedRun]] = {}
    for run in runs:
        groups.setdefault(run.label(), []).append(run)
    return groups


def mean_and_spread(values: list[float]) -> str:
    """Mean and standard deviation over seeds, as text."""
    mean = statistics.mean(values)
    return f"{mean:.3f} ± {statistics.stdev(values):.3f}" if len(values) > 1 else f"{mean:.3f}"


def parameters(model: torch.nn.Module) -> int:
    """How many numbers it learns."""
    return sum(p.numel() for p in model.parameters())
