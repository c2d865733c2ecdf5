"""The nine models of the clustering experiment as in the published code of the authors, which differs from the text.

    points --Linear, ReLU, Linear--> features --set encoder--> z --decoder--> K x (logit, mean, variance)

The third output is a variance of at least 1e-2, not a standard deviation. docs/recipes.md lists the differences from
`models.py`, layer by layer.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from setstream.models.encoder import SetEncoder
from setstream.models.model import SetModel
from setstream.nn.mlp import mlp
from setstream.pools import ChunkMean, DeepSets, HierarchicalSSE
from setstream.tasks.clustering import models as text
from setstream.tasks.clustering.models import HEADS, WIDTH, MixtureHead, Parts, umbc_pool
from setstream.tasks.registry import Masked, variants
from setstream.tasks.released import ISAB, LAYER, PMA, SAB


class VarianceHead(MixtureHead):
    """A `MixtureHead` whose third output is a variance."""

    def scales(self, raw: Tensor) -> Tensor:
        return F.softplus(raw).clamp(min=1e-2).sqrt()


def three_sabs(*, layer_norm: bool) -> nn.Sequential:
    """Three blocks in which every slot attends to all slots."""
    return nn.Sequential(*(SAB(WIDTH, HEADS, layer_norm=layer_norm) for _ in range(3)))


def released_model(parts: Callable[..., Parts], clusters: int = 4, dim: int = 2, **options: Any) -> SetModel:
    """A released model with the pool and the body of `parts(clusters, **options)`."""
    pool, body, per_slot = parts(clusters, **options)
    phi = nn.Sequential(nn.Linear(dim, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))
    return SetModel(SetEncoder(phi, pool), VarianceHead(body, WIDTH, clusters, dim, per_slot=per_slot))


SLOTS = LAYER | {"slot_residual": True}
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
