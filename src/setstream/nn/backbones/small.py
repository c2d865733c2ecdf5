"""A small network for small images, quick on a CPU.

    x --conv 5x5 /2, norm, ReLU--> width --[conv 3x3 /2, norm, ReLU] x 2, each twice as wide--> mean over the plane --> 4·width

The norm is a group norm, which looks at one image alone, so chunks are safe.
"""

from itertools import pairwise
from pathlib import Path

from torch import nn

from setstream.models.weights import load_tensors
from setstream.nn.backbones.base import Backbone, read_checkpoint

WIDTH, GROUPS = 32, 8


def small(weights: str | Path | None = None, width: int = WIDTH) -> Backbone:
    """Three convolutions with group norm: 128 features; weights: a file, or that of a run."""
    widths = [3, width, 2 * width, 4 * width]
    layers: list[nn.Module] = []
    for before, after in pairwise(widths):
        size = 5 if before == 3 else 3
        layers += [nn.Conv2d(before, after, size, 2, padding=size // 2, bias=False), nn.GroupNorm(GROUPS, after), nn.ReLU()]
    net = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten())
    if weights is not None:
        load_tensors(net, read_checkpoint(Path(weights)), Path(weights))
    return Backbone(net, widths[-1], mean=(0.5,) * 3, std=(0.25,) * 3)
