"""Tasks by name (`TASKS`), and from the options of a run, or its folder, to its task and its trained model."""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from setstream._utils.import_path import TASKS, find, named_by_file
from setstream.errors import ConfigurationError
from setstream.models.model import SetModel
from setstream.models.weights import load_model
from setstream.training.checkpoint import weights_of
from setstream.training.config import TrainConfig, read_options
from setstream.training.task import Task


def task_class(name: str) -> type[Task]:
    """The task with this name: a built-in one, or your own as `package.module:Class`."""
    place = TASKS.get(name, name)
    if ":" not in place:
        names = ", ".join(TASKS)
        raise ConfigurationError(f"unknown task {name!r}: choose one of {names}, or give your own as package.module:Class")
    kind = find(place, "task")
    if not (isinstance(kind, type) and issubclass(kind, Task)):
        raise ConfigurationError(f"{name!r} is not a subclass of setstream.training.Task")
    return kind


def describe_task(name: str) -> dict[str, Any]:
    """The summary of a task, and its models with the first lines of their docstrings."""
    kind = task_class(name)
    models = {model: (build.__doc__ or "").strip().partition("\n")[0] for model, build in kind.models.items()}
    return {"summary": kind.summary, "models": models}


def build_task(config: TrainConfig) -> Task:
    """The task of a run whose options the caller chose."""
    try:
        return task_class(config.task)(**config.task_options)
    except TypeError as error:
        raise ConfigurationError(f"the task {config.task} does not take these options: {error}") from error


def read_run(folder: Path) -> TrainConfig:
    """The options of an earlier run."""
    if not (folder / "config.json").is_file():
        raise ConfigurationError(f"{folder} is not a run folder: it has no config.json")
    return TrainConfig.from_dict(read_options(folder / "config.json"))


@dataclass(frozen=True)
class SavedRun:
    """A run in a folder, with the options in its config.json; `trust`: import paths outside setstream that they may name."""

    folder: Path
    config: TrainConfig
    trust: Iterable[str] = ()

    def task(self) -> Task:
        with named_by_file(self.folder / "config.json", self.trust):
            return build_task(self.config)

    def model(self, task: Task | None = None) -> SetModel:
        """The model of the run, in eval mode: the final one, or that of its last checkpoint. `task`: the run's, if known."""
        options = self.config.model_options
        build = partial((task or self.task()).build, self.config.model, **options)
        with named_by_file(self.folder / "config.json", self.trust):
            return load_model(build, options, weights_of(self.folder), trusted=bool(self.trust))
