"""Trained models that come with the package.

Each is a folder `weights/NAME` beside its task, as `save_pretrained` writes it: in half precision to be small, with what the
model scored under `about` in its config.json.
"""

from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from setstream.errors import ConfigurationError
from setstream.models.model import SetModel


class Shelf:
    """The shipped models of a task: those of its `models` that have a folder."""

    def __init__(self, folder: Path, models: Mapping[str, Callable[..., SetModel]]) -> None:
        self.folder, self.models = folder, models

    def folder_of(self, name: str) -> Path:
        """Where a model lies."""
        return self.folder / name.replace("+", "-")

    def available(self) -> list[str]:
        """The models that are shipped."""
        return [name for name in self.models if self.folder_of(name).is_dir()]

    def open(self, name: str) -> SetModel:
        """A trained model, in eval mode."""
        if name not in self.available():
            raise ConfigurationError(f"no weights of {name!r} are shipped: choose one of {', '.join(self.available())}")
        return SetModel.from_pretrained(self.folder_of(name))

    def ship(self, name: str, model: SetModel, options: dict[str, object], about: dict[str, object]) -> Path:
        """Write a trained model into the package."""
        builder = self.models[name]
        return model.save_pretrained(self.folder_of(name), builder=builder, options=options, about=about, dtype=torch.float16)
