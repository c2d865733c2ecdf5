"""Trained clustering models that come with the package."""

from pathlib import Path

from setstream.models.model import SetModel
from setstream.tasks.clustering.models import MODELS
from setstream.tasks.registry import ShippedModels

SHIPPED = ShippedModels(Path(__file__).parent / "weights", MODELS)


def pretrained(name: str) -> SetModel:
    """A trained clustering model, in eval mode.

    >>> import torch
    >>> points = torch.randn(1, 1000, 2)
    >>> pretrained("umbc+set-transformer")(points).log_prob(points).shape
    torch.Size([1, 1000])
    """
    return SHIPPED.open(name)
