"""Trained models that come with the package.

Each is a folder beside this module, as `save_pretrained` writes it: in half precision to be small, with what the model scored
under `about` in its config.json.
"""

from __future__ import annotations

from pathlib import Path

import torch

from setstream.errors import ConfigurationError
from setstream.model import SetModel
from setstream.tasks.clustering.models import MODELS

FOLDER = Path(__file__).parent / "weights"


def folder_of(name: str) -> Path:
    """Where a model lies."""
    return FOLDER / name.replace("+", "-")


def available() -> list[str]:
    """The models that are shipped."""
    return [name for name in MODELS if folder_of(name).is_dir()]


def pretrained(name: str) -> SetModel:
    """A trained clustering model, in eval mode.

    >>> import torch
    >>> model = pretrained("umbc+set-transformer")
    >>> points = torch.randn(1, 1000, 2)
    >>> nll = -model(points).log_prob(points)          # of every point
    >>> nll.shape
    torch.Size([1, 1000])
    """
    if name not in available():
        raise ConfigurationError(f"no weights of {name!r} are shipped: choose one of {', '.join(available())}")
    return SetModel.from_pretrained(folder_of(name))


def ship(name: str, model: SetModel, options: dict[str, object], about: dict[str, object]) -> Path:
    """Write a trained model into the package."""
    return model.save_pretrained(folder_of(name), builder=MODELS[name], options=options, about=about, dtype=torch.float16)
