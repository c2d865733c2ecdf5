"""`umbc+anchors`: slots initialised as places of the image; each attends to its surroundings, each place to the slots near it.

    γ(p)  = (sin 2^i πp, cos 2^i πp)_{i < waves}                       waves of a place, 4 waves numbers
    φ(x)  = [γ(p), layers(γ(p), x)]                                    x = (p, colour), a pixel
    l_kn  = s_h ⟨γ(a_k), γ(p_n)⟩,   z_k = LN(softmax_n(l_k) values)    UMBC, head h: anchors a_k on the image are its slots
    r     = SABs(z)                                                    (K, width): the slots after self-attention
    a(p)  = softmax_k(s_h ⟨γ(a_k), γ(p)⟩) (r W)                        what a place attends to
    (μ, s) = layers(γ(p), a(p))

⟨γ(a), γ(p)⟩ = Σ_i cos 2^i π(a - p), for x and for y, is largest at p = a; its exponential is a product of bumps around the
anchor, wide in the first head and narrow in the last. This is the initialisation only: anchors and projections, and with them
the sizes s_h, are learned.

The paper's single vector per image limits the detail of large images; with slots, capacity grows with their number. It is still
UMBC: pixels come in any chunks and can be removed.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from setstream.nn.mlp import begin_near, mlp
from setstream.pools import UMBC
from setstream.tasks.completion.field import LAYERS, GaussianDecoder, Waves

# s_h of the first and of the last head; it grows by a constant factor from head to head.
WIDEST, NARROWEST = 0.25, 2.0


def spread(count: int) -> Tensor:
    """Places (count, 2) evenly over [0, 1]², for any count: the R2 low-discrepancy sequence.

    >>> spread(2)
    tensor([[0.3774, 0.2849],
            [0.1323, 0.8548]])
    """
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

    def __init__(self, anchors: Tensor, waves: int, width: int, heads: int, channels: int, smallest_scale: float) -> None:
        super().__init__(channels, smallest_scale)
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


def anchored_slots(anchors: Tensor, waves: int, width: int, heads: int) -> UMBC:
    """The pool over features (B, N, 4 waves + width), one slot per anchor (K, 2): (B, K, width)."""
    used = 4 * waves
    pool = UMBC(used + width, len(anchors), slot_dim=used, out_dim=width, heads=heads, slot_norm=False, norm_after=True)
    with torch.no_grad():
        pool.slots.mean.copy_(Waves(waves)(anchors)[:, :used])
    begin_near(pool.query, pool.key, head_sizes(heads), used)
    return pool
