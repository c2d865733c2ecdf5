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

The residual connection takes the *projected* queries, and attention has no output projection: widths of X and Y are free.
"""

from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from setstream.models.encoder import SetEncoder
from setstream.models.model import SetModel
from setstream.nn.mlp import mlp
from setstream.pools import ChunkMean, DeepSets, HierarchicalSSE
from setstream.tasks.clustering import models as text
from setstream.tasks.clustering.models import HEADS, WIDTH, Masked, MixtureHead, Parts, umbc_pool
from setstream.tasks.registry import variants


class VarianceHead(MixtureHead):
    """A `MixtureHead` whose third output is a variance."""

    def scales(self, raw: Tensor) -> Tensor:
        return F.softplus(raw).clamp(min=1e-2).sqrt()


class MAB(nn.Module):
    """Rows x (B, M, x_dim) attend to a set y (B, N, y_dim), by default to themselves: (B, M, dim)."""

    def __init__(self, x_dim: int, y_dim: int, dim: int, heads: int, *, layer_norm: bool = True) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value = nn.Linear(x_dim, dim), nn.Linear(y_dim, dim), nn.Linear(y_dim, dim)
        self.out = nn.Linear(dim, dim)
        self.norm1, self.norm2 = (nn.LayerNorm(dim) if layer_norm else nn.Identity() for _ in range(2))

    def forward(self, x: Tensor, y: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
        y = x if y is None else y
        queries = self.query(x)
        q, k, v = (rows.unflatten(-1, (self.heads, -1)).transpose(1, 2) for rows in (queries, self.key(y), self.value(y)))
        attended = F.scaled_dot_product_attention(q, k, v, attn_mask=None if mask is None else mask[:, None, None])
        h = self.norm1(queries + attended.transpose(1, 2).flatten(2))
        return self.norm2(h + F.relu(self.out(h)))


class PMA(nn.Module):
    """Learned seeds attend to the set: (B, N, in_dim) to (B, num_seeds, dim)."""

    def __init__(self, in_dim: int, dim: int, heads: int, num_seeds: int) -> None:
        super().__init__()
        self.seeds = nn.Parameter(nn.init.xavier_uniform_(torch.empty(num_seeds, dim)))
        self.block = MAB(dim, in_dim, dim, heads)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return self.block(self.seeds.expand(len(x), -1, -1), x, mask)


class ISAB(nn.Module):
    """Inducing points attend to the set, and every row to them: (B, N, in_dim) to (B, N, dim)."""

    def __init__(self, in_dim: int, dim: int, heads: int, num_inducing: int) -> None:
        super().__init__()
        self.gather, self.spread = PMA(in_dim, dim, heads, num_inducing), MAB(in_dim, dim, dim, heads)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return self.spread(x, self.gather(x, mask))


def three_sabs(*, layer_norm: bool) -> nn.Sequential:
    """Three blocks in which every slot attends to all slots."""
    blocks = [MAB(WIDTH, WIDTH, WIDTH, HEADS, layer_norm=layer_norm) for _ in range(3)]
    return nn.Sequential(*(nn.Sequential(OrderedDict(block=block)) for block in blocks))


def released_model(parts: Callable[..., Parts], clusters: int = 4, dim: int = 2, **options: Any) -> SetModel:
    """A released model with the pool and the body of `parts(clusters, **options)`."""
    pool, body, per_slot = parts(clusters, **options)
    phi = nn.Sequential(nn.Linear(dim, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))
    return SetModel(SetEncoder(phi, pool), VarianceHead(body, WIDTH, clusters, dim, per_slot=per_slot))


# UMBC and SSE are one layer in the release, with these options.
SLOTS: dict[str, Any] = {"slots": "gaussian", "eval_slots": "mean", "shared_draw": True, "slot_norm": False, "query_bias": True}
SLOTS |= {"slot_residual": True, "norm_after": True}
EM = {"heads": 5, "components": 4, "strength": 0.01}


def deepsets(clusters: int) -> Parts:
    """Mean pooling, then layer norm."""
    return DeepSets("mean"), nn.Sequential(nn.LayerNorm(WIDTH), mlp([WIDTH] * 4)), False


def sse_hierarchical(clusters: int, layers: int = 4, normalise: bool = True, **options: Any) -> Parts:
    """Slot Set Encoders on top of each other, then one linear layer."""
    pool = HierarchicalSSE(WIDTH, [clusters] * layers, WIDTH, WIDTH, HEADS, normalise=normalise, **(SLOTS | options))
    return pool, nn.Identity(), True


def set_transformer(clusters: int = 4, dim: int = 2, num_inducing: int = 16) -> SetModel:
    """One ISAB, pooling by attention to a seed for each component, three SABs, all with layer norm."""
    encoder = nn.Sequential(ISAB(dim, WIDTH, HEADS, num_inducing), PMA(WIDTH, WIDTH, HEADS, clusters))
    body, pool = three_sabs(layer_norm=True), ChunkMean(Masked(encoder), dim)
    return SetModel(SetEncoder(nn.Identity(), pool), VarianceHead(body, WIDTH, clusters, dim, per_slot=True))


def umbc_set_transformer(clusters: int, **options: Any) -> Parts:
    """UMBC with a slot for each component, then three SABs without layer norm."""
    body = three_sabs(layer_norm=False)
    return umbc_pool(clusters, **(SLOTS | options)), body, True


_PARTS: dict[str, Callable[..., Parts]] = {"deepsets": deepsets, "sse": partial(text.sse, **SLOTS)}
_PARTS |= {"sse-hierarchical": sse_hierarchical, "fspool": text.fspool, "diff-em": partial(text.diff_em, em=EM)}
_PARTS |= {"umbc+fspool": partial(text.umbc_fspool, **SLOTS), "umbc+set-transformer": umbc_set_transformer}
_PARTS |= {"umbc+diff-em": partial(text.umbc_diff_em, em=EM, **SLOTS)}
_MODELS = variants(released_model, _PARTS) | {"set-transformer": set_transformer}
MODELS = {f"{name}-released": _MODELS[name] for name in text.MODELS if name in _MODELS}
