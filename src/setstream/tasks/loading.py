"""From the options of a run, or its folder, to its task and its trained model."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from setstream.errors import ConfigurationError
from setstream.model import SetModel
from setstream.places import find, named_by_file
from setstream.pretrained import is_saved
from setstream.tasks import task_class
from setstream.training.checkpoint import weights_of
from setstream.training.config import TrainConfig, read_options
from setstream.training.task import Task
from setstream.weights import load_weights


def build_task(config: TrainConfig) -> Task:
    """The task of a run whose options the caller chose."""
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


@dataclass(frozen=True)
class SavedRun:
    """A run in a folder, with its options as they are in config.json there.

    trust: import paths, package.module:name, that these options may name although they are not ours: a task, a backbone.
    """

    folder: Path
    config: TrainConfig
    trust: Iterable[str] = ()

    def task(self) -> Task:
        """The task of the run."""
        with named_by_file(self.folder / "config.json", self.trust):
            return build_task(self.config)

    def model(self, task: Task | None = None) -> SetModel:
        """The model of the run, in eval mode: as it ended, or as its last checkpoint has it. `task`: the run's, if at hand."""
        task = task or self.task()
        with named_by_file(self.folder / "config.json", self.trust):
            model = task.build(self.config.model, **self.config.model_options)
        load_weights(model, weights_of(self.folder))
        return model.eval()


def open_model(name: str, builder: str | None = None, trust: Iterable[str] = ()) -> SetModel:
    """A model to use, in eval mode: of a run's folder or one of `save_pretrained`, shipped, or your own: `package.module:name`.

    builder: your function that builds what lies in a folder of `save_pretrained`, as package.module:name.
    trust:   import paths, package.module:name, that the folder's config.json may name although they are not ours: a task, a
             backbone, a builder.

    >>> type(open_model("umbc+set-transformer")).__name__
    'SetModel'
    """
    from setstream.tasks.clustering.pretrained import SHELF

    if is_saved(Path(name)):
        return SetModel.from_pretrained(name, builder=builder, trust=trust)
    if builder is not None:
        raise ConfigurationError(f"a builder goes with a folder that save_pretrained wrote; {name!r} is none")
    if Path(name).is_dir():
        return SavedRun(Path(name), read_run(Path(name)), tuple(trust)).model()
    if name in SHELF.available():
        return SHELF.open(name)
    if ":" not in name:
        raise ConfigurationError(
            f"{name!r} is no run folder, no saved model and no shipped one ({', '.join(SHELF.available())}); your own is "
            "package.module:name"
        )
    found = find(name, "model")
    made = found if isinstance(found, SetModel) else found() if callable(found) else found
    if not isinstance(made, SetModel):
        raise ConfigurationError(f"{name!r} must be an ss.SetModel, or a function that gives one; it is {type(made).__name__}")
    return made.eval()
