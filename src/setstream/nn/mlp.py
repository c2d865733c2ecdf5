"""The small network before or after a pool (Linear, ReLU, Linear, ReLU, ...), and how layers are initialised."""

from itertools import pairwise

import torch
from torch import Tensor, nn

from setstream.errors import ConfigurationError

INITS = ("torch", "he")


def mlp(widths: list[int], dropout: float = 0.0) -> nn.Sequential:
    """Linear layers from width to width with a ReLU after each (and a dropout); a single width is the identity."""
    layers: list[nn.Module] = []
    for pair in pairwise(widths):
        layers += [nn.Linear(*pair), nn.ReLU(), *([nn.Dropout(dropout)] if dropout else [])]
    return nn.Sequential(*layers)


def initialise(module: nn.Module, init: str) -> None:
    """Initialise the linear layers of a module: torch's way, where features shrink, or std √(2 / inputs) and no bias: "he"."""
    if init not in INITS:
        raise ConfigurationError(f"init is {' or '.join(INITS)}; got {init!r}")
    for layer in module.modules():
        if init == "he" and isinstance(layer, nn.Linear):
            nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)


@torch.no_grad()
def begin_near(query: nn.Linear, key: nn.Linear, sizes: Tensor, used: int) -> None:
    """Initialise attention near anchors, by projections of anchors a (K, used) and elements x (N, used or more)::

        l_h = s_h ⟨a, x⟩                  the logit of head h, over the first `used` numbers; `sizes` s (H,)

    With random projections, all queries see the mean of a set. Where near elements belong together (places of an image, vectors
    of words), slots can start spread over that space. Other numbers of an anchor have no effect at first. All of it is trained.
    """
    width = query.out_features // len(sizes)
    if used > width:
        raise ConfigurationError(f"a head of width {width} cannot hold the {used} numbers that tell anchors apart")
    if query.in_features < used or "bias" in dict(query.named_parameters()):
        raise ConfigurationError(f"anchors of {used} numbers are projected without a bias; got {query}")
    # A square root for each of the two; attention divides by the root of a head's width.
    scales = (sizes * width**0.5).sqrt().view(-1, 1, 1)  # (H, 1, 1)
    query.weight.copy_((scales * torch.eye(width, query.in_features)).flatten(0, 1))
    query.weight[:, used:] = 0.0
    # The rest of a head: the query starts at zero, and the key keeps its values, so that the query gets a gradient.
    by_head = key.weight.view(len(sizes), width, -1)
    by_head[:, :used] = scales * torch.eye(used, key.in_features)
    if "bias" in dict(key.named_parameters()):
        key.bias.zero_()
