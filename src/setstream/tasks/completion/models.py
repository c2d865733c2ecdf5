"""The models of the paper's image completion: a set of pixels, a set encoder, a decoder for any place.

    (place, colour) --four layers of 128--> features --pool--> z --body--> r (128,) --decoder at p--> mean and scale of a colour

The paper's models share phi and the decoder and differ in the pool and its body. Set functions that need their whole input are
wrapped in `ChunkMean`: they average over chunks, as in the paper's tests. `waves` (field.Waves) are for large images.
`init` is the initialisation of phi and the decoder, which the paper does not give: torch's default ("torch"), with which
features shrink from layer to layer, or He's ("he"), which keeps their size. Slots that see nearly equal features learn slowly.

`umbc+anchors`: slots initialised as places of the image; each attends to its surroundings, each place to the slots near it.

    γ(p)  = (sin 2^i πp, cos 2^i πp)_{i < waves}                       waves of a place, 4 waves numbers
    φ(x)  = [γ(p), layers(γ(p), x)]                                    x = (p, colour), a pixel
    l_kn  = s_h ⟨γ(a_k), γ(p_n)⟩,   z_k = LN(softmax_n(l_k) values)    UMBC, head h: anchors a_k on the image are its slots
    r     = SABs(z)                                                    (K, width): the slots after self-attention
    a(p)  = softmax_k(s_h ⟨γ(a_k), γ(p)⟩) (r W)                        what a place attends to
    (μ, s) = layers(γ(p), a(p))

⟨γ(a), γ(p)⟩ = Σ_i cos 2^i π(a - p), for x and for y, is largest at p = a; its exponential is a product of bumps around the
anchor, wide in the first head and narrow in the last. This is the initialisation only: anchors and projections, and with them
the sizes s_h, are learned. Capacity grows with the number of slots, where the paper's single vector per image limits it. With
several passes, [γ(a_k), SABs(z)_k] are the slots of the next one, which starts near the same places.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from setstream.errors import ConfigurationError
from setstream.models.encoder import SetEncoder
from setstream.models.model import SetModel
from setstream.nn import SAB, DiffEM, FSPool, SetTransformer
from setstream.nn.mlp import begin_near, initialise, mlp
from setstream.pools import SSE, UMBC, ChunkMean, DeepSets, HierarchicalSSE, MultiPass
from setstream.pools.base import Pool
from setstream.tasks.completion.field import Decoder, FieldHead, GaussianDecoder, Waves
from setstream.tasks.registry import Builder, ShippedModels, check_passes, variants

WIDTH, HEADS, SLOTS, LAYERS = 128, 4, 128, 4  # as in the paper's appendix
WIDEST, NARROWEST = 0.25, 2.0  # s_h of the first and of the last head; it grows by a constant factor from head to head
Parts = tuple[Pool, nn.Module]  # width, options of the pool -> the pool, and the body after it


def completion_model(
    parts: Callable[..., Parts], channels: int = 3, width: int = WIDTH, waves: int = 0, init: str = "torch", **options: Any
) -> SetModel:
    """A model of the paper with the pool and the body of `parts(width, **options)`."""
    pool, body = parts(width, **options)
    layers = mlp([2 + 4 * waves + channels, *[width] * LAYERS])
    decoder = Decoder(width, channels, waves)
    initialise(nn.ModuleList([layers, decoder]), init)
    encoder = SetEncoder(nn.Sequential(Waves(waves), layers) if waves else layers, pool)
    return SetModel(encoder, FieldHead(body, decoder))


def deepsets(width: int) -> Parts:
    """Mean pooling: the original conditional neural process."""
    return DeepSets("mean"), nn.Identity()


def sse(width: int, num_slots: int = SLOTS, normalise: bool = True, **options: Any) -> Parts:
    """The Slot Set Encoder, the mean of its slots."""
    return SSE(width, num_slots, heads=HEADS, pool="mean", normalise=normalise, **options), nn.Identity()


def sse_hierarchical(width: int, num_slots: int = SLOTS, normalise: bool = True, **options: Any) -> Parts:
    """Two stacked Slot Set Encoders, the second with one slot."""
    return HierarchicalSSE(width, (num_slots, 1), heads=HEADS, normalise=normalise, **options), nn.Identity()


def fspool(width: int) -> Parts:
    """Featurewise sort pooling."""
    return ChunkMean(FSPool(width), width), nn.Identity()


def diff_em(width: int, steps: int = 3) -> Parts:
    """Differentiable EM, one head of five components."""
    pool = DiffEM(width, heads=1, components=5, steps=steps)
    return ChunkMean(pool, width), nn.Linear(pool.out_dim, width)


def set_transformer(width: int) -> Parts:
    """Two SABs on the pixels, pooling by attention."""
    return ChunkMean(SetTransformer(width, HEADS), width), nn.Identity()


def umbc_set_transformer(width: int, num_slots: int = SLOTS, **options: Any) -> Parts:
    """UMBC with layer norm, two SABs on its slots, pooling by attention."""
    defaults: dict[str, Any] = {"slots": "gaussian", "norm_after": True}
    return UMBC(width, num_slots, heads=HEADS, **(defaults | options)), SetTransformer(width, HEADS)


def spread(count: int) -> Tensor:
    """Places (count, 2) evenly over [0, 1]², for any count: the R2 low-discrepancy sequence."""
    plastic = 1.324717957244746  # the root of x³ = x + 1
    multiples = torch.arange(count, dtype=torch.float64, device="cpu").unsqueeze(1) + 0.5  # not every device has float64
    steps = torch.tensor([plastic**-1, plastic**-2], dtype=torch.float64, device="cpu")
    return (multiples * steps % 1).float().to(torch.get_default_device())


def head_sizes(heads: int) -> Tensor:
    """s_h (H,)."""
    return torch.logspace(0, 1, heads, base=NARROWEST / WIDEST) * WIDEST


class AnchoredFeatures(nn.Module):
    """Pixels (..., 2 + channels) to features (..., 4 waves + width): the waves of their places, and layers on all of it."""

    def __init__(self, waves: int, width: int, channels: int) -> None:
        super().__init__()
        self.waves = Waves(waves)
        self.layers = mlp([4 * waves + 2 + channels, *[width] * LAYERS])

    def forward(self, pixels: Tensor) -> Tensor:
        rows = self.waves(pixels)
        return torch.cat([rows[..., : 4 * self.waves.count], self.layers(rows)], -1)


class AnchoredDecoder(GaussianDecoder):
    """Rows (B, K, width), one per anchor, and places (B, T, 2) to mean and scale of each channel."""

    def __init__(self, anchors: Tensor, waves: int, width: int, heads: int, channels: int) -> None:
        super().__init__(channels)
        self.waves, self.heads = Waves(waves), heads
        count = 4 * waves
        self.anchors = nn.Parameter(self.waves(anchors)[:, :count].clone())
        self.query, self.key = nn.Linear(count, width, bias=False), nn.Linear(count, width, bias=False)
        begin_near(self.query, self.key, head_sizes(heads), count)
        self.value, self.place = nn.Linear(width, width), nn.Linear(count + 2, width)
        self.rest = nn.Sequential(nn.ReLU(), mlp([width] * 4), nn.Linear(width, 2 * channels))

    def raw(self, read: Tensor, places: Tensor) -> Tensor:
        of_place = self.waves(places)
        queries = self._by_head(self.query(of_place[..., : self.anchors.shape[1]]))
        keys = self._by_head(self.key(self.anchors).expand(len(read), -1, -1))
        attended = F.scaled_dot_product_attention(queries, keys, self._by_head(self.value(read)))  # (B, H, T, width / H)
        return self.rest(self.place(of_place) + attended.transpose(1, 2).flatten(2))

    def _by_head(self, rows: Tensor) -> Tensor:
        return rows.unflatten(-1, (self.heads, -1)).transpose(1, 2)


class AnchoredSlots(nn.Module):
    """The slots of the next pass (B, K, used + width): the waves of the anchors, and what a body makes of the slots."""

    def __init__(self, places: Tensor, body: nn.Module) -> None:
        super().__init__()
        self.places, self.body = nn.Parameter(places.clone()), body

    def forward(self, z: Tensor) -> Tensor:
        return torch.cat([self.places.expand(len(z), -1, -1), self.body(z)], -1)


def umbc_anchors(
    channels: int = 3, width: int = WIDTH, waves: int = 4, init: str = "he", num_slots: int = SLOTS, passes: int = 1
) -> SetModel:
    """Slots that are initialised as places of the image, two SABs on them; every place reads the slots near it."""
    if not 1 <= waves <= width // HEADS // 4:
        raise ConfigurationError(f"waves must be 1 to {width // HEADS // 4} at width {width}; got {waves}")
    check_passes(passes)
    anchors, features, used = spread(num_slots), AnchoredFeatures(waves, width, channels), 4 * waves
    places = Waves(waves)(anchors)[:, :used]

    def reading(slot_dim: int, **options: Any) -> UMBC:
        pool = UMBC(used + width, num_slots, slot_dim, out_dim=width, heads=HEADS, slot_norm=False, norm_after=True, **options)
        begin_near(pool.query, pool.key, head_sizes(HEADS), used)
        return pool

    def body() -> nn.Sequential:
        return nn.Sequential(*(SAB(width, HEADS, layer_norm=True) for _ in range(2)))

    first = reading(used)
    with torch.no_grad():
        first.slots.mean.copy_(places)
    decoder = AnchoredDecoder(anchors, waves, width, HEADS, channels)
    initialise(nn.ModuleList([features, decoder.rest]), init)  # not the decoder's attention
    last = body()
    pools = [first, *(reading(used + width, slots="given") for _ in range(1, passes))]
    pool = MultiPass(pools, [AnchoredSlots(places, body()) for _ in pools[1:]]) if passes > 1 else first
    return SetModel(SetEncoder(features, pool), FieldHead(last, decoder))


_PARTS = {"deepsets": deepsets, "sse": sse, "sse-hierarchical": sse_hierarchical, "fspool": fspool, "diff-em": diff_em}
_PARTS |= {"set-transformer": set_transformer, "umbc+set-transformer": umbc_set_transformer}
MODELS: dict[str, Builder] = variants(completion_model, _PARTS) | {"umbc+anchors": umbc_anchors}
pretrained = ShippedModels(__file__, MODELS)  # trained on the 32x32 images of CIFAR-10
