"""none: inference.

z = finalize( Σ_blocks absorb(phi(block)) )          no graph, memory of one block
"""

from typing import Any

import torch

from setstream.gradients.base import Pass, forward_size
from setstream.gradients.protocol import Batch, Options
from setstream.models.encoder import SetEncoder


@torch.no_grad()
def none(encoder: SetEncoder, sets: Batch, options: Options) -> Any:
    """z without a gradient."""
    forward = Pass(encoder, sets, options).forward(sets.blocks(forward_size(encoder, sets, options)))
    return encoder.finalize_unchecked(forward.state)
