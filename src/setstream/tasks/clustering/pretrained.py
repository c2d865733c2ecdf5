"""Trained clustering models that come with the package."""

from pathlib import Path

from setstream.models.model import SetModel
from setstream.tasks.clustering.models import MODELS
from setstream.tasks.shelf import Shelf

SHELF = Shelf(Path(__file__).parent / "weights", MODELS)


def pretrained(name: str) -> SetModel:
    """A trained clustering model, in eval mode.

    >>> import torch
    >>> model = pretrained("umbc+set-transformer")
    >>> points = torch.randn(1, 1000, 2)
    >>> nll = -model(points).log_prob(points)          # of every point
    >>> nll.shape
    torch.Size([1, 1000])
    """
    return SHELF.open(name)
