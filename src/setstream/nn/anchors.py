"""Attention that begins near anchors: a query reads what is like it, before anything is learned.

    l_h = s_h ⟨a, x⟩                  the logit of head h of an anchor a and an element x, over their first `used` numbers

With random projections, queries differ by noise, attend to all elements alike and see the mean of a set; what tells them apart
has to be learned through that mean. Where a space is known in which near elements belong together (places of an image, vectors
of words), slots may as well begin spread over it. This is only a beginning: all of it are weights.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from setstream.errors import ConfigurationError


@torch.no_grad()
def begin_near(query: nn.Linear, key: nn.Linear, sizes: Tensor, used: int) -> None:
    """Set projections (without bias, or with one that is kept) so that the logits are s_h ⟨a, x⟩, for sizes s (H,)."""
    width = query.out_features // len(sizes)
    if used > width:
        raise ConfigurationError(f"a head of width {width} cannot hold the {used} numbers that tell anchors apart")
    # A square root for each of the two; attention divides by the root of a head's width.
    blocks = (sizes * width**0.5).sqrt().view(-1, 1, 1) * torch.eye(width, used)  # (H, width, used)
    for linear in (query, key):
        linear.weight.zero_()
        linear.weight[:, :used] = blocks.flatten(0, 1)
