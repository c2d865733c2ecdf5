"""Trained models by name: from a run folder, saved, shipped, or your own."""

from collections.abc import Iterable
from pathlib import Path

from setstream._utils.import_path import find
from setstream.errors import ConfigurationError
from setstream.models.model import SetModel
from setstream.models.pretrained import is_saved
from setstream.tasks.clustering.models import pretrained
from setstream.training.processes import choose_device
from setstream.training.task import SavedRun, read_run


def open_model(
    name: str, builder: str | None = None, trust: Iterable[str] | None = None, device: str | None = None
) -> SetModel:
    """A trained model, in eval mode.

    Args:
        name: a run folder, a folder written by `save_pretrained`, a shipped model, or your own as `package.module:name`.
        builder: your function that builds the model of a `save_pretrained` folder, as package.module:name.
        trust: import paths outside setstream that the folder's config.json may name: a task, a backbone, a builder.
        device: where to move it, as in `choose_device`; None leaves it where it is.

    >>> type(open_model("umbc+set-transformer")).__name__
    'SetModel'
    """
    trusted = tuple(trust or ())
    named: object
    if is_saved(Path(name)):
        named = SetModel.from_pretrained(name, builder=builder, trust=trusted)
    elif builder is not None:
        raise ConfigurationError(f"builder is for folders written by save_pretrained; {name!r} is not one")
    elif Path(name).is_dir():
        named = SavedRun(Path(name), read_run(Path(name)), trusted).model()
    elif name in pretrained.available():
        named = pretrained(name)
    elif ":" not in name:
        known = f"a run folder, a saved model or a shipped one ({', '.join(pretrained.available())})"
        raise ConfigurationError(f"{name!r} is not {known}; name your own model as package.module:name")
    else:
        named = find(name, "model")
    model = named if isinstance(named, SetModel) else named() if callable(named) else named
    if not isinstance(model, SetModel):
        raise ConfigurationError(f"{name!r} must be an ss.SetModel, or a function returning one; it is {type(model).__name__}")
    return model.eval() if device is None else model.eval().to(choose_device(device))
