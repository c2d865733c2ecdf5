"""The small network before or after a pool: Linear, ReLU, Linear, ReLU, ..."""

from itertools import pairwise

from torch import nn

from setstream.errors import ConfigurationError

INITS = ("torch", "he")


def mlp(widths: list[int], dropout: float = 0.0) -> nn.Sequential:
    """Linear layers from width to width with a ReLU after each (and a dropout); a single width is the identity."""
    layers: list[nn.Module] = []
    for pair in pairwise(widths):
        layers += [nn.Linear(*pair), nn.ReLU()]
        if dropout:
            layers.append(nn.Dropout(dropout))
    return nn.Sequential(*layers)


def initialise(module: nn.Module, init: str) -> None:
    """Initialise the linear layers of a module: torch's way, or std √(2 / inputs) and no bias for "he".

    With torch's, features shrink from layer to layer: after four layers they are nearly equal, and so is attention to them.
    """
    if init not in INITS:
        raise ConfigurationError(f"init is {' or '.join(INITS)}; got {init!r}")
    for layer in module.modules():
        if init == "he" and isinstance(layer, nn.Linear):
            nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)
