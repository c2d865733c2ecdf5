"""Trained completion models that come with the package: of CIFAR-10's 32x32 images."""

from pathlib import Path

from setstream.models.model import SetModel
from setstream.tasks.completion.models import MODELS
from setstream.tasks.registry import ShippedModels

SHIPPED = ShippedModels(Path(__file__).parent / "weights", MODELS)


def pretrained(name: str) -> SetModel:
    """A trained completion model of 32x32 colour images, in eval mode.

    >>> import torch
    >>> from setstream.tasks.completion import places
    >>> pixels = torch.cat([torch.rand(1, 90, 2), torch.ones(1, 90, 3)], -1)           # ninety white pixels at random places
    >>> bool(pretrained("umbc+set-transformer")(pixels).at(places(32, 32)[None]).mean.mean() > 0.8)
    True
    """
    return SHIPPED.open(name)
