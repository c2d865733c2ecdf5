"""none: inference.

z = finalize( Σ_blocks absorb(phi(block)) )          no graph, memory of one block
"""

from typing import Any

import torch

from setstream.gradients.base import Pass
from setstream.gradients.protocol import Batch, Options
from setstream.models.encoder import SetEncoder


@torch.no_grad()
def none(encoder: SetEncoder, sets: Batch, options: Options) -> Any:
    """z without a gradient."""
    run = Pass(encoder, sets, options)
    return run.result(run.forward(sets.blocks(run.forward_size(sets))).state)
