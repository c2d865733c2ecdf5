"""From the options of a run, or its folder, to its task and its trained model."""

from __future__ import annotations

from pathlib import Path

from setstream.errors import ConfigurationError
from setstream.model import SetModel
from setstream.tasks import task_class
from setstream.training.checkpoint import weights_of
from setstream.training.config import TrainConfig, read_options
from setstream.training.task import Task
from setstream.weights import load_weights


def build_task(config: TrainConfig) -> Task:
    """The task of a run."""
    kind = task_class(config.task)
    try:
        return kind(**config.task_options)
    except TypeError as error:
        raise ConfigurationError(f"the task {config.task} does not take these options: {error}") from error


def read_run(folder: Path) -> TrainConfig:
    """The options of an earlier run."""
    if not (folder / "config.json").is_file():
        raise ConfigurationError(f"{folder} is no run folder: it has no config.json")
    return TrainConfig.from_dict(read_options(folder / "config.json"))


def trained_model(folder: Path, task: Task, config: TrainConfig) -> SetModel:
    """The model of a run, in eval mode: as it ended, or as its last checkpoint has it."""
    model = task.build(config.model, **config.model_options)
    load_weights(model, weights_of(folder))
    return model.eval()
