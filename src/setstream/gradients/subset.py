"""subset: encode only the drawn chunks. Biased, and cheap.

z = encoder(m' drawn chunks of each set)          memory of m' chunks
"""

from typing import Any

from setstream.gradients.full import full
from setstream.gradients.protocol import Batch, Options
from setstream.models.encoder import SetEncoder


def subset(encoder: SetEncoder, sets: Batch, options: Options) -> Any:
    """z of a random subset, with its full gradient."""
    return full(encoder, sets.subset(options.grad_chunks), options)
