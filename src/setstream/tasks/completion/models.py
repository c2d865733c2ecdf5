"""The models of the paper's image completion: a set of pixels, a set encoder, a decoder for any place.

    (place, colour) --four layers of 128--> features --pool--> z --body--> r (128,) --decoder at p--> mean and scale of a colour

The paper's models share phi and the decoder and differ in the pool and its body; `umbc+anchors` is in anchored.py. Set
functions that need their whole input are wrapped in `ChunkMean`: they average over chunks, as in the paper's tests. `waves` is
for large images: see field.Waves.

`init` is the initialisation of phi and the decoder, which the paper does not give: torch's default ("torch"), with which
features shrink from layer to layer, or He's ("he"), which keeps their size. Slots that see nearly equal features learn slowly.
"""

from collections.abc import Callable
from typing import Any

from torch import nn

from setstream.errors import ConfigurationError
from setstream.models.encoder import SetEncoder
from setstream.models.model import SetModel
from setstream.nn import SAB, DiffEM, FSPool, SetTransformer
from setstream.nn.mlp import initialise, mlp
from setstream.pools import SSE, UMBC, ChunkMean, DeepSets, HierarchicalSSE
from setstream.pools.base import Pool
from setstream.tasks.completion.anchored import AnchoredDecoder, AnchoredFeatures, anchored_slots, spread
from setstream.tasks.completion.field import HEADS, LAYERS, SLOTS, SMALLEST_SCALE, WIDTH, Decoder, FieldHead, Waves

Parts = Callable[..., tuple[Pool, nn.Module]]  # width, options of the pool -> the pool, and the body after it


def completion_model(parts: Parts) -> Callable[..., SetModel]:
    """A builder of models that differ in their pool and its body only, with the docstring of `parts`."""

    def build(
        channels: int = 3,
        width: int = WIDTH,
        smallest_scale: float = SMALLEST_SCALE,
        waves: int = 0,
        init: str = "torch",
        **options: Any,
    ) -> SetModel:
        pool, body = parts(width, **options)
        layers = mlp([2 + 4 * waves + channels, *[width] * LAYERS])
        decoder = Decoder(width, channels, smallest_scale, waves)
        for module in (layers, decoder):
            initialise(module, init)
        encoder = SetEncoder(nn.Sequential(Waves(waves), layers) if waves else layers, pool)
        return SetModel(encoder, FieldHead(body, decoder))

    build.__doc__ = parts.__doc__
    return build


def deepsets(width: int) -> tuple[Pool, nn.Module]:
    """Mean pooling: the original conditional neural process."""
    return DeepSets("mean"), nn.Identity()


def sse(width: int, num_slots: int = SLOTS, normalise: bool = True, **options: Any) -> tuple[Pool, nn.Module]:
    """The Slot Set Encoder, the mean of its slots."""
    return SSE(width, num_slots, heads=HEADS, pool="mean", normalise=normalise, **options), nn.Identity()


def sse_hierarchical(width: int, num_slots: int = SLOTS, normalise: bool = True, **options: Any) -> tuple[Pool, nn.Module]:
    """Two stacked Slot Set Encoders, the second with one slot."""
    return HierarchicalSSE(width, (num_slots, 1), heads=HEADS, normalise=normalise, **options), nn.Identity()


def fspool(width: int) -> tuple[Pool, nn.Module]:
    """Featurewise sort pooling."""
    return ChunkMean(FSPool(width), width), nn.Identity()


def diff_em(width: int, steps: int = 3) -> tuple[Pool, nn.Module]:
    """Differentiable EM, one head of five components."""
    pool = DiffEM(width, heads=1, components=5, steps=steps)
    return ChunkMean(pool, width), nn.Linear(pool.out_dim, width)


def set_transformer(width: int) -> tuple[Pool, nn.Module]:
    """Two SABs on the pixels, pooling by attention."""
    return ChunkMean(SetTransformer(width, HEADS), width), nn.Identity()


def umbc_set_transformer(width: int, num_slots: int = SLOTS, **options: Any) -> tuple[Pool, nn.Module]:
    """UMBC with layer norm, two SABs on its slots, pooling by attention."""
    defaults: dict[str, Any] = {"slots": "gaussian", "norm_after": True}
    return UMBC(width, num_slots, heads=HEADS, **(defaults | options)), SetTransformer(width, HEADS)


def umbc_anchors(
    channels: int = 3,
    width: int = WIDTH,
    smallest_scale: float = SMALLEST_SCALE,
    waves: int = 4,
    init: str = "he",
    num_slots: int = SLOTS,
) -> SetModel:
    """Slots that are initialised as places of the image, two SABs on them; every place reads the slots near it.

    `init` is for phi, and for the decoder's layers after its attention.
    """
    if not 1 <= waves <= width // HEADS // 4:
        raise ConfigurationError(f"waves must be 1 to {width // HEADS // 4} at width {width}; got {waves}")
    anchors, features = spread(num_slots), AnchoredFeatures(waves, width, channels)
    pool = anchored_slots(anchors, waves, width, HEADS)
    decoder = AnchoredDecoder(anchors, waves, width, HEADS, channels, smallest_scale)
    for module in (features, decoder.rest):
        initialise(module, init)
    body = nn.Sequential(*(SAB(width, HEADS, layer_norm=True) for _ in range(2)))
    return SetModel(SetEncoder(features, pool), FieldHead(body, decoder))


MODELS: dict[str, Callable[..., SetModel]] = {
    "deepsets": completion_model(deepsets),
    "sse": completion_model(sse),
    "sse-hierarchical": completion_model(sse_hierarchical),
    "fspool": completion_model(fspool),
    "diff-em": completion_model(diff_em),
    "set-transformer": completion_model(set_transformer),
    "umbc+set-transformer": completion_model(umbc_set_transformer),
    "umbc+anchors": umbc_anchors,
}
