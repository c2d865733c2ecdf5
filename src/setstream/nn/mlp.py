"""The small network that stands in front of a pool, or behind it: Linear, ReLU, Linear, ReLU, ..."""

from __future__ import annotations

from itertools import pairwise

from torch import nn


def mlp(widths: list[int], dropout: float = 0.0) -> nn.Sequential:
    """Linear layers from width to width with a ReLU after each (and a dropout); a single width is the identity."""
    layers: list[nn.Module] = []
    for pair in pairwise(widths):
        layers += [nn.Linear(*pair), nn.ReLU()]
        if dropout:
            layers.append(nn.Dropout(dropout))
    return nn.Sequential(*layers)
