"""Models by name: those of a task, some of which were renamed, and the trained ones that are shipped with the package."""

import warnings
from collections.abc import Callable, Mapping
from pathlib import Path

from setstream.errors import ConfigurationError
from setstream.models.model import SetModel

Builder = Callable[..., SetModel]


class RenamedModels(dict[str, Builder]):
    """A task's models by name. The names in `renamed` still work, with a DeprecationWarning, and are not listed.

    >>> models = RenamedModels({"new": SetModel}, renamed={"old": "new"})
    >>> list(models), "old" in models
    (['new'], True)
    """

    def __init__(self, models: Mapping[str, Builder], renamed: Mapping[str, str]) -> None:
        super().__init__(models)
        self.renamed = renamed

    def __contains__(self, name: object) -> bool:
        return super().__contains__(name) or name in self.renamed

    def __missing__(self, name: str) -> Builder:
        if name not in self.renamed:
            raise KeyError(name)
        message = f"the model {name!r} is now called {self.renamed[name]!r}; the old name will be removed in version 0.3"
        warnings.warn(message, DeprecationWarning, stacklevel=2)
        return self[self.renamed[name]]


class ShippedModels:
    """The trained models of a task that come with the package: those that have a folder `weights/NAME` beside it.

    The folders are written by `save_pretrained` in half precision; `about` in their config.json holds the model's scores.
    """

    def __init__(self, folder: Path, models: Mapping[str, Builder]) -> None:
        self.folder, self.models = folder, models

    def folder_of(self, name: str) -> Path:
        """The folder of a model."""
        return self.folder / name.replace("+", "-")

    def available(self) -> list[str]:
        """The names of the shipped models."""
        return [name for name in self.models if self.folder_of(name).is_dir()]

    def open(self, name: str) -> SetModel:
        """A trained model, in eval mode."""
        if name not in self.available():
            raise ConfigurationError(f"no weights of {name!r} are shipped: choose one of {', '.join(self.available())}")
        return SetModel.from_pretrained(self.folder_of(name))
