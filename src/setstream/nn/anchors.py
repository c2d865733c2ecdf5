"""Initialise attention near anchors: before training, a query attends to the elements most like it.

    l_h = s_h ⟨a, x⟩                  the logit of head h of an anchor a and an element x, over their first `used` numbers

With random projections, queries differ by noise, attend to all elements alike and see the mean of a set; what tells them apart
has to be learned through that mean. Where a space is known in which near elements belong together (places of an image, vectors
of words), slots can start spread over it. This is only an initialisation: all of it is trained.
"""

import torch
from torch import Tensor, nn

from setstream.errors import ConfigurationError


@torch.no_grad()
def begin_near(query: nn.Linear, key: nn.Linear, sizes: Tensor, used: int) -> None:
    """Set the projections of anchors (K, used) and elements (N, used or more) so that their logits are s_h ⟨a, x⟩; s (H,)."""
    width = query.out_features // len(sizes)
    if used > width:
        raise ConfigurationError(f"a head of width {width} cannot hold the {used} numbers that tell anchors apart")
    if query.in_features != used or "bias" in dict(query.named_parameters()):
        raise ConfigurationError(f"anchors of {used} numbers are projected without a bias; got {query}")
    # A square root for each of the two; attention divides by the root of a head's width.
    scales = (sizes * width**0.5).sqrt().view(-1, 1, 1)  # (H, 1, 1)
    query.weight.copy_((scales * torch.eye(width, used)).flatten(0, 1))
    # The rest of a head: the query starts at zero, and the key keeps its values, so that the query gets a gradient.
    by_head = key.weight.view(len(sizes), width, -1)
    by_head[:, :used] = scales * torch.eye(used, key.in_features)
    if "bias" in dict(key.named_parameters()):
        key.bias.zero_()
