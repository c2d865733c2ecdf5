"""The nine models of the clustering experiment as in the published code of the authors, which differs from the text.

    points --Linear, ReLU, Linear--> features --set encoder--> z --decoder--> K x (logit, mean, variance)

What differs from the text (`models.py`), model by model:

    all                phi has a second linear layer; the third output is a variance, softplus clamped at 1e-2
    deepsets           layer norm after the mean
    sse                one Gaussian for each slot, its mean at test time, one draw for all sets of a batch; a bias and no
                       layer norm for the queries; weights divided by their sum; slot residual and layer norm after
    sse-hierarchical   four such encoders with four slots each, then one linear layer
    set-transformer    one ISAB on the points themselves, no phi; layer norm in every block
    umbc+...           queries with a bias and without layer norm
    diff-em            five heads of four components; the best one is the output

Attention blocks have another form than those of `setstream.nn`:

    MAB(X, Y) = LN(H + ReLU(H Wo)),   H = LN(Q + Attend(Q, Y Wk, Y Wv)),   Q = X Wq          LN optional

The residual connection takes the *projected* queries, and attention has no output projection, so X and Y may have other widths
than the result.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from setstream.models.encoder import SetEncoder
from setstream.models.model import SetModel
from setstream.nn import DiffEM, FSPool
from setstream.nn.mlp import mlp
from setstream.nn.set_transformer import check_heads
from setstream.pools import SSE, UMBC, ChunkMean, DeepSets, HierarchicalSSE
from setstream.pools.base import Pool
from setstream.tasks.clustering.models import HEADS, WIDTH, Masked, MixtureHead
from setstream.tasks.registry import Builder

SMALLEST_VARIANCE = 1e-2


class VarianceHead(MixtureHead):
    """A `MixtureHead` whose third output is a variance."""

    def scales(self, raw: Tensor) -> Tensor:
        return F.softplus(raw).clamp(min=SMALLEST_VARIANCE).sqrt()


class MAB(nn.Module):
    """Rows x (B, M, x_dim) attend to a set y (B, N, y_dim): (B, M, dim)."""

    def __init__(self, x_dim: int, y_dim: int, dim: int, heads: int, *, layer_norm: bool) -> None:
        super().__init__()
        check_heads(dim, heads)
        self.heads = heads
        self.query, self.key, self.value = nn.Linear(x_dim, dim), nn.Linear(y_dim, dim), nn.Linear(y_dim, dim)
        self.out = nn.Linear(dim, dim)
        self.norm1 = nn.LayerNorm(dim) if layer_norm else nn.Identity()
        self.norm2 = nn.LayerNorm(dim) if layer_norm else nn.Identity()

    def forward(self, x: Tensor, y: Tensor, mask: Tensor | None = None) -> Tensor:
        queries = self.query(x)
        q, k, v = (rows.unflatten(-1, (self.heads, -1)).transpose(1, 2) for rows in (queries, self.key(y), self.value(y)))
        attended = F.scaled_dot_product_attention(q, k, v, attn_mask=None if mask is None else mask[:, None, None])
        h = self.norm1(queries + attended.transpose(1, 2).flatten(2))
        return self.norm2(h + F.relu(self.out(h)))


class SAB(nn.Module):
    """Every row attends to all rows: (B, N, dim) to (B, N, dim)."""

    def __init__(self, dim: int, heads: int, *, layer_norm: bool) -> None:
        super().__init__()
        self.block = MAB(dim, dim, dim, heads, layer_norm=layer_norm)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return self.block(x, x, mask)


class PMA(nn.Module):
    """Learned seeds attend to the set: (B, N, in_dim) to (B, num_seeds, dim)."""

    def __init__(self, in_dim: int, dim: int, heads: int, num_seeds: int, *, layer_norm: bool) -> None:
        super().__init__()
        self.seeds = nn.Parameter(nn.init.xavier_uniform_(torch.empty(num_seeds, dim)))
        self.block = MAB(dim, in_dim, dim, heads, layer_norm=layer_norm)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return self.block(self.seeds.expand(len(x), -1, -1), x, mask)


class ISAB(nn.Module):
    """Inducing points attend to the set, and every row to them: (B, N, in_dim) to (B, N, dim)."""

    def __init__(self, in_dim: int, dim: int, heads: int, num_inducing: int, *, layer_norm: bool) -> None:
        super().__init__()
        self.gather = PMA(in_dim, dim, heads, num_inducing, layer_norm=layer_norm)
        self.spread = MAB(in_dim, dim, dim, heads, layer_norm=layer_norm)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return self.spread(x, self.gather(x, mask))


def assemble(pool: Pool, body: nn.Module, clusters: int, dim: int, *, per_slot: bool, phi: nn.Module | None = None) -> SetModel:
    """phi (two linear layers unless given), a pool, and a head that ends in a mixture."""
    phi = nn.Sequential(nn.Linear(dim, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH)) if phi is None else phi
    return SetModel(SetEncoder(phi, pool), VarianceHead(body, WIDTH, clusters, dim, per_slot=per_slot))


# UMBC and SSE are one layer in the release, with these options.
SLOTS: dict[str, Any] = {"slots": "gaussian", "eval_slots": "mean", "shared_draw": True, "slot_norm": False, "query_bias": True}
SLOTS |= {"slot_residual": True, "norm_after": True}
SSE_SLOTS = SLOTS | {"normalise": True}


def umbc_pool(num_slots: int, **options: Any) -> UMBC:
    """UMBC as released."""
    return UMBC(WIDTH, num_slots, WIDTH, WIDTH, HEADS, **(SLOTS | options))


def deepsets(clusters: int = 4, dim: int = 2) -> SetModel:
    """Mean pooling, then layer norm."""
    body = nn.Sequential(nn.LayerNorm(WIDTH), mlp([WIDTH] * 4))
    return assemble(DeepSets("mean"), body, clusters, dim, per_slot=False)


def sse(clusters: int = 4, dim: int = 2, **options: Any) -> SetModel:
    """The Slot Set Encoder: UMBC's layer with a normalised slot-sigmoid."""
    pool = SSE(WIDTH, clusters, WIDTH, WIDTH, HEADS, **(SSE_SLOTS | options))
    return assemble(pool, mlp([WIDTH] * 4), clusters, dim, per_slot=True)


def sse_hierarchical(clusters: int = 4, dim: int = 2, layers: int = 4, **options: Any) -> SetModel:
    """Slot Set Encoders on top of each other, then one linear layer."""
    pool = HierarchicalSSE(WIDTH, [clusters] * layers, WIDTH, WIDTH, HEADS, **(SSE_SLOTS | options))
    return assemble(pool, nn.Identity(), clusters, dim, per_slot=True)


def fspool(clusters: int = 4, dim: int = 2) -> SetModel:
    """Featurewise sort pooling."""
    return assemble(ChunkMean(FSPool(WIDTH), WIDTH), mlp([WIDTH] * 4), clusters, dim, per_slot=False)


def diff_em(clusters: int = 4, dim: int = 2) -> SetModel:
    """Differentiable EM: five heads of four components, three steps."""
    pool = DiffEM(WIDTH, heads=5, components=4, steps=3, strength=0.01)
    return assemble(ChunkMean(pool, WIDTH), mlp([pool.out_dim, *[WIDTH] * 3]), clusters, dim, per_slot=False)


def set_transformer(clusters: int = 4, dim: int = 2, num_inducing: int = 16) -> SetModel:
    """One ISAB, pooling by attention to a seed for each component, three SABs, all with layer norm."""
    encoder = nn.Sequential(
        ISAB(dim, WIDTH, HEADS, num_inducing, layer_norm=True), PMA(WIDTH, WIDTH, HEADS, clusters, layer_norm=True)
    )
    decoder = nn.Sequential(*(SAB(WIDTH, HEADS, layer_norm=True) for _ in range(3)))
    return assemble(ChunkMean(Masked(encoder), dim), decoder, clusters, dim, per_slot=True, phi=nn.Identity())


def umbc_fspool(clusters: int = 4, dim: int = 2, num_slots: int = 4, **options: Any) -> SetModel:
    """UMBC, then featurewise sort pooling of the slots."""
    body = nn.Sequential(FSPool(WIDTH), mlp([WIDTH] * 3))
    return assemble(umbc_pool(num_slots, **options), body, clusters, dim, per_slot=False)


def umbc_diff_em(clusters: int = 4, dim: int = 2, num_slots: int = 4, **options: Any) -> SetModel:
    """UMBC, then one step of differentiable EM on the slots."""
    pool = DiffEM(WIDTH, heads=5, components=4, steps=1, strength=0.01)
    body = nn.Sequential(pool, mlp([pool.out_dim, *[WIDTH] * 2]))
    return assemble(umbc_pool(num_slots, **options), body, clusters, dim, per_slot=False)


def umbc_set_transformer(clusters: int = 4, dim: int = 2, **options: Any) -> SetModel:
    """UMBC with a slot for each component, then three SABs without layer norm."""
    body = nn.Sequential(*(SAB(WIDTH, HEADS, layer_norm=False) for _ in range(3)))
    return assemble(umbc_pool(clusters, **options), body, clusters, dim, per_slot=True)


_BUILDERS: dict[str, Builder] = {"deepsets": deepsets, "sse": sse, "sse-hierarchical": sse_hierarchical, "fspool": fspool}
_BUILDERS |= {"diff-em": diff_em, "set-transformer": set_transformer, "umbc+fspool": umbc_fspool, "umbc+diff-em": umbc_diff_em}
_BUILDERS |= {"umbc+set-transformer": umbc_set_transformer}
MODELS = {f"{name}-released": build for name, build in _BUILDERS.items()}
