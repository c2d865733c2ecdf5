"""The models of image completion as in the published code of the authors, which differs from the text.

    (place, colour) --three layers, Linear--> features --pool--> z --body--> r (128,) --decoder at p--> mean and scale

docs/recipes.md lists the differences from `models.py`, layer by layer. The release has no hierarchical SSE for images.
"""

from collections.abc import Callable
from typing import Any

from torch import nn

from setstream.models.encoder import SetEncoder
from setstream.models.model import SetModel
from setstream.nn import DiffEM
from setstream.nn.mlp import initialise, mlp
from setstream.pools import ChunkMean
from setstream.tasks.completion import models as text
from setstream.tasks.completion.field import Decoder, FieldHead
from setstream.tasks.completion.models import LAYERS, SLOTS, WIDTH, Parts
from setstream.tasks.registry import Masked, variants
from setstream.tasks.released import ONE_SLOT, PMA, SAB, NormedSlots


def released_model(parts: Callable[..., Parts], channels: int = 3, init: str = "torch", **options: Any) -> SetModel:
    """A released model with the pool and the body of `parts(width, **options)`."""
    pool, body = parts(WIDTH, **options)
    phi = nn.Sequential(mlp([2 + channels, *[WIDTH] * (LAYERS - 1)]), nn.Linear(WIDTH, WIDTH))
    decoder = Decoder(WIDTH, channels)
    initialise(nn.ModuleList([phi, decoder]), init)
    return SetModel(SetEncoder(phi, pool), FieldHead(body, decoder))


def blocks(width: int) -> nn.Sequential:
    """Two SABs and PMA, with one head and layer norm."""
    return nn.Sequential(SAB(width, 1), SAB(width, 1), PMA(width, width, 1, 1))


def sse(width: int, **options: Any) -> Parts:
    """The Slot Set Encoder with one slot, which is a mean, and layer norm."""
    return NormedSlots(width, **(ONE_SLOT | options)), nn.Identity()


def diff_em(width: int) -> Parts:
    """Differentiable EM, four heads of 64 components."""
    pool = DiffEM(width, heads=4, components=64, steps=3, strength=0.01)
    return ChunkMean(pool, width), nn.Linear(pool.out_dim, width)


def set_transformer(width: int) -> Parts:
    """Two SABs on the pixels and pooling by attention, with one head and layer norm."""
    return ChunkMean(Masked(blocks(width)), width), nn.Identity()


def umbc_set_transformer(width: int, num_slots: int = SLOTS, **options: Any) -> Parts:
    """UMBC, two SABs on its slots and pooling by attention, all with one head and layer norm."""
    return NormedSlots(width, num_slots, **options), blocks(width)


_PARTS = {"deepsets": text.deepsets, "sse": sse, "fspool": text.fspool, "diff-em": diff_em, "set-transformer": set_transformer}
_MODELS = variants(released_model, _PARTS | {"umbc+set-transformer": umbc_set_transformer})
MODELS = {f"{name}-released": build for name, build in _MODELS.items()}
