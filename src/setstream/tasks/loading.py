"""Trained models by name: of a run's folder, saved, shipped, or your own."""

from collections.abc import Iterable
from pathlib import Path

from setstream._utils.import_path import find
from setstream.errors import ConfigurationError
from setstream.models.model import SetModel
from setstream.models.pretrained import is_saved
from setstream.tasks.clustering.pretrained import SHELF
from setstream.training.registry import SavedRun, read_run


def open_model(name: str, builder: str | None = None, trust: Iterable[str] = ()) -> SetModel:
    """A model to use, in eval mode: of a run's folder or one of `save_pretrained`, shipped, or your own: `package.module:name`.

    builder: your function that builds what lies in a folder of `save_pretrained`, as package.module:name.
    trust:   import paths, package.module:name, that the folder's config.json may name although they are not ours: a task, a
             backbone, a builder.

    >>> type(open_model("umbc+set-transformer")).__name__
    'SetModel'
    """
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
