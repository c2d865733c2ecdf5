"""full: ordinary autograd.

z = encoder(sets)          memory of all elements
"""

from typing import Any

from setstream.gradients.base import Pass
from setstream.gradients.exact import exact
from setstream.gradients.protocol import Batch, Options
from setstream.models.encoder import SetEncoder


def full(encoder: SetEncoder, sets: Batch, options: Options) -> Any:
    """z with an ordinary graph; over several ranks, which no graph crosses, `exact`."""
    if options.group is not None:
        return exact(encoder, sets, options)
    packed = sets.whole()
    if packed is not None:
        return encoder(packed)
    run = Pass(encoder, sets, options)
    return run.result(run.forward(sets.blocks(options.chunk_size)).state)
