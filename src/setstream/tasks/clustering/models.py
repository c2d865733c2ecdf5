"""The nine models of the paper's clustering experiment; `umbc+fourier`, the best with one pass (see docs/results/clustering);
`umbc+passes`, the same with several passes over the points; and `umbc+em`, the same with steps of EM as later passes.

    points --Linear(D, width), ReLU--> features --set encoder--> z --decoder--> K x (logit, mean, scale)

Decoders have three layers, those after UMBC two, as in the paper's appendix; UMBC + Set Transformer has three SABs, as in its
published run. Set functions that need their whole input (fspool, diff-em, set-transformer) are wrapped in `ChunkMean`: they
average over chunks, as in the paper's tests. SSE divides by the sum of the weights, as its published code does. Without this it
is a sum over the set, and a model trained on 512 points fails on 1,024.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from setstream.models.encoder import SetEncoder
from setstream.models.model import SetModel
from setstream.nn import ISAB, PMA, SAB, DiffEM, FSPool
from setstream.nn.mlp import mlp
from setstream.pools import SSE, UMBC, ChunkMean, DeepSets, HierarchicalSSE, MultiPass
from setstream.pools.base import Pool
from setstream.tasks.clustering.em import refined
from setstream.tasks.clustering.mixtures import DiagonalMixture
from setstream.tasks.registry import Builder, Masked, RenamedModels, ShippedModels, check_passes, variants

WIDTH, HEADS = 128, 4
EM = {"heads": 1, "components": 5}
SMALLEST_SCALE = 1e-2  # scales are softplus(raw) + this: far below the smallest scale in the data, and never zero


class MixtureHead(nn.Module):
    """A body that returns (B, K, width), a row per component (`per_slot`), or (B, width), and a linear layer to mixtures."""

    def __init__(self, body: nn.Module, width: int, clusters: int, dim: int, *, per_slot: bool) -> None:
        super().__init__()
        self.body, self.clusters, self.dim, self.per_slot = body, clusters, dim, per_slot
        numbers = 1 + 2 * dim
        self.out = nn.Linear(width, numbers if per_slot else clusters * numbers)

    def forward(self, z: Tensor) -> DiagonalMixture:
        rows = self.out(self.body(z))
        rows = rows if self.per_slot else rows.unflatten(-1, (self.clusters, -1))
        logits, means, scales = rows.split([1, self.dim, self.dim], dim=-1)
        return DiagonalMixture(logits.squeeze(-1), means, self.scales(scales))

    def scales(self, raw: Tensor) -> Tensor:
        """Standard deviations from the layer's third output."""
        return F.softplus(raw) + SMALLEST_SCALE


class FourierFeatures(nn.Module):
    """[x, sin(x F), cos(x F)], F learned: (M, dim) to (M, dim + 2 count). The mean is the empirical characteristic function."""

    def __init__(self, dim: int, count: int) -> None:
        super().__init__()
        self.frequencies = nn.Parameter(torch.randn(dim, count) * 0.5)

    def forward(self, x: Tensor) -> Tensor:
        angles = x @ self.frequencies
        return torch.cat([x, angles.sin(), angles.cos()], dim=-1)


# number of clusters, options -> the pool, the body of the head, and whether the body returns a row per component
Parts = tuple[Pool, nn.Module, bool]


def clustering_model(parts: Callable[..., Parts], clusters: int = 4, dim: int = 2, **options: Any) -> SetModel:
    """A model of the paper with the pool and the body of `parts(clusters, **options)`."""
    pool, body, per_slot = parts(clusters, **options)
    return SetModel(SetEncoder(mlp([dim, WIDTH]), pool), MixtureHead(body, WIDTH, clusters, dim, per_slot=per_slot))


def umbc_pool(num_slots: int, width: int = WIDTH, heads: int = HEADS, **options: Any) -> UMBC:
    """UMBC as in the published run: Gaussian slots, slot residual, layer norm after."""
    defaults: dict[str, Any] = {"slots": "gaussian", "slot_residual": True, "norm_after": True}
    return UMBC(width, num_slots, width, width, heads, **(defaults | options))


def deepsets(clusters: int) -> Parts:
    """Mean pooling."""
    return DeepSets("mean"), mlp([WIDTH] * 4), False


def sse(clusters: int, normalise: bool = True, **options: Any) -> Parts:
    """The Slot Set Encoder, one slot per component."""
    return SSE(WIDTH, clusters, WIDTH, WIDTH, HEADS, normalise=normalise, **options), mlp([WIDTH] * 4), True


def sse_hierarchical(clusters: int, first: int = 16, normalise: bool = True, **options: Any) -> Parts:
    """Two stacked Slot Set Encoders."""
    pool = HierarchicalSSE(WIDTH, (first, clusters), WIDTH, WIDTH, HEADS, normalise=normalise, **options)
    return pool, mlp([WIDTH] * 4), True


def fspool(clusters: int) -> Parts:
    """Featurewise sort pooling."""
    return ChunkMean(FSPool(WIDTH), WIDTH), mlp([WIDTH] * 4), False


def diff_em(clusters: int, steps: int = 3, em: Mapping[str, Any] = EM) -> Parts:
    """Differentiable EM, by default one head of five components: 1,286 numbers."""
    pool = DiffEM(WIDTH, steps=steps, **em)
    return ChunkMean(pool, WIDTH), mlp([pool.out_dim, *[WIDTH] * 3]), False


def set_transformer(clusters: int, num_inducing: int = 16) -> Parts:
    """Two ISABs, PMA with one seed per component, three SABs."""
    encoder = nn.Sequential(ISAB(WIDTH, HEADS, num_inducing), ISAB(WIDTH, HEADS, num_inducing), PMA(WIDTH, HEADS, clusters))
    return ChunkMean(Masked(encoder), WIDTH), nn.Sequential(*(SAB(WIDTH, HEADS) for _ in range(3))), True


def umbc_fspool(clusters: int, num_slots: int = 4, **options: Any) -> Parts:
    """UMBC, then featurewise sort pooling of the slots."""
    body = nn.Sequential(FSPool(WIDTH), mlp([WIDTH] * 3))
    return umbc_pool(num_slots, **options), body, False


def umbc_diff_em(clusters: int, num_slots: int = 4, steps: int = 1, em: Mapping[str, Any] = EM, **options: Any) -> Parts:
    """UMBC, then differentiable EM on the slots."""
    layer = DiffEM(WIDTH, steps=steps, **em)
    body = nn.Sequential(layer, mlp([layer.out_dim, *[WIDTH] * 2]))
    return umbc_pool(num_slots, **options), body, False


def umbc_set_transformer(clusters: int, **options: Any) -> Parts:
    """UMBC with one slot per component, then three SABs on the slots."""
    body = nn.Sequential(*(SAB(WIDTH, HEADS) for _ in range(3)))
    return umbc_pool(clusters, **options), body, True


def umbc_fourier(
    clusters: int = 4, dim: int = 2, num_slots: int = 16, width: int = 128, frequencies: int = 64, sabs: int = 2, heads: int = 4
) -> SetModel:
    """Fourier features, a deeper phi, UMBC with more slots, SABs with layer norm, PMA with a seed per component."""
    return umbc_passes(clusters, dim, 1, "softmax", num_slots, width, frequencies, sabs, heads)


def umbc_passes(
    clusters: int = 4,
    dim: int = 2,
    passes: int = 2,
    activation: str = "slot-softmax",
    num_slots: int = 16,
    width: int = 128,
    frequencies: int = 64,
    sabs: int = 2,
    heads: int = 4,
) -> SetModel:
    """`umbc+fourier` with several passes: what SABs make of the slots are the queries of the next one, with `activation`."""
    check_passes(passes)
    features = [FourierFeatures(dim, frequencies)] if frequencies else []
    phi = nn.Sequential(*features, mlp([dim + 2 * frequencies, width, width]))
    first = umbc_pool(num_slots, width, heads, slots="learned")
    later = [umbc_pool(num_slots, width, heads, slots="given", activation=activation) for _ in range(1, passes)]
    blocks = [[SAB(width, heads, layer_norm=True) for _ in range(sabs)] for _ in range(passes)]
    pool = MultiPass([first, *later], [nn.Sequential(*some) for some in blocks[:-1]]) if later else first
    body = nn.Sequential(*blocks[-1], PMA(width, heads, clusters, layer_norm=True), SAB(width, heads, layer_norm=True))
    return SetModel(SetEncoder(phi, pool), MixtureHead(body, width, clusters, dim, per_slot=True))


def umbc_em(clusters: int = 4, dim: int = 2, em_steps: int = 2, **options: Any) -> SetModel:
    """`umbc+fourier`, whose mixture `em_steps` more passes over the points improve: each is a step of EM, without weights."""
    return refined(umbc_fourier(clusters, dim, **options), em_steps, clusters, dim)


_PARTS = {"deepsets": deepsets, "sse": sse, "sse-hierarchical": sse_hierarchical, "fspool": fspool, "diff-em": diff_em}
_PARTS |= {"set-transformer": set_transformer, "umbc+fspool": umbc_fspool, "umbc+diff-em": umbc_diff_em}
_PAPER = variants(clustering_model, _PARTS | {"umbc+set-transformer": umbc_set_transformer})
_MORE: dict[str, Builder] = {"umbc+fourier": umbc_fourier, "umbc+passes": umbc_passes, "umbc+em": umbc_em}
MODELS = RenamedModels(_PAPER | _MORE, renamed={"ours": "umbc+fourier"})
pretrained = ShippedModels(__file__, MODELS)
