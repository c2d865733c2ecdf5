"""Bag classifiers by name, each as the paper's appendix builds it.

    instances --phi--> h --+-- w·h + b, maximum over the bag -----------------> instance logit
                           +-- set encoder, decoder --------------------------> bag logit

Both streams read one pass of phi (`Parallel`), and the instance stream, a maximum, is O(1) in memory like the other. It is left
out unless two_stream asks for it. Models that need their whole bag (ab-mil, ds-mil) stand in `ChunkMean`: give them whole bags.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from setstream.encoder import SetEncoder
from setstream.model import SetModel
from setstream.nn import DSMIL, PMA, SAB, DiffEM, FSPool, GatedAttention
from setstream.pool import Pool
from setstream.pools import SSE, UMBC, ChunkMean, DeepSets, Parallel, Projected

WIDTH, HEADS, SLOTS = 128, 4, 64


class BagHead(nn.Module):
    """Logits of the streams, (B, S): the instance stream's first where there is one, the bag stream's last."""

    def __init__(self, decoder: nn.Module) -> None:
        super().__init__()
        self.decoder = decoder

    def forward(self, z: Tensor | dict[str, Tensor]) -> Tensor:
        """From what the pools gave to logits."""
        if isinstance(z, dict):
            return torch.cat([z["instance"], self.decoder(z["bag"])], dim=1)
        logits: Tensor = self.decoder(z)
        return logits


class BothStreams(nn.Module):
    """DS-MIL's two logits, (B, 2)."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.dsmil = DSMIL(dim)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """The instance logit and the bag logit."""
        instance, bag, _ = self.dsmil.streams(x, mask)
        return torch.cat([instance, bag], dim=1)


def feature_network(widths: list[int], dropout: float = 0.0) -> nn.Sequential:
    """Linear layers with ReLUs between and after them; an empty list of layers is the identity."""
    layers: list[nn.Module] = []
    for pair in pairwise(widths):
        layers += [nn.Linear(*pair), nn.ReLU()]
        if dropout:
            layers.append(nn.Dropout(dropout))
    return nn.Sequential(*layers)


def assemble(phi: nn.Module, width: int, pool: Pool, decoder: nn.Module, two_stream: bool) -> SetModel:
    """phi, a pool (beside it the instance stream), a head."""
    if two_stream:
        pool = Parallel(instance=Projected(nn.Linear(width, 1), DeepSets("max")), bag=pool)
    return SetModel(SetEncoder(phi, pool), BagHead(decoder))


def _phi(in_dim: int, widths: list[int], phi: nn.Module | None, dropout: float) -> tuple[nn.Module, int]:
    network = feature_network([in_dim, *widths], dropout)
    return (network if phi is None else nn.Sequential(phi, network)), [in_dim, *widths][-1]


def ab_mil(
    in_dim: int, widths: list[int] | None = None, two_stream: bool = False, phi: nn.Module | None = None, dropout: float = 0.0
) -> SetModel:
    """Gated attention over the whole bag, then a linear layer."""
    features, width = _phi(in_dim, [WIDTH] if widths is None else widths, phi, dropout)
    pool = ChunkMean(GatedAttention(width, 64), width)
    return assemble(features, width, pool, nn.Linear(width, 1), two_stream)


def ds_mil(in_dim: int, widths: list[int] | None = None, phi: nn.Module | None = None, dropout: float = 0.0) -> SetModel:
    """DS-MIL on the whole bag: both streams are its own."""
    features, width = _phi(in_dim, [WIDTH] if widths is None else widths, phi, dropout)
    return assemble(features, width, ChunkMean(BothStreams(width), width), nn.Identity(), two_stream=False)


def deepsets(
    in_dim: int, widths: list[int] | None = None, two_stream: bool = False, phi: nn.Module | None = None, dropout: float = 0.0
) -> SetModel:
    """Maximum pooling, two linear layers."""
    features, width = _phi(in_dim, [WIDTH] if widths is None else widths, phi, dropout)
    decoder = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 1))
    return assemble(features, width, DeepSets("max"), decoder, two_stream)


def sse(
    in_dim: int,
    widths: list[int] | None = None,
    two_stream: bool = False,
    phi: nn.Module | None = None,
    dropout: float = 0.0,
    num_slots: int = SLOTS,
) -> SetModel:
    """The Slot Set Encoder with a mean over its slots, two linear layers."""
    features, width = _phi(in_dim, [WIDTH] if widths is None else widths, phi, dropout)
    decoder = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 1))
    return assemble(features, width, SSE(width, num_slots, heads=HEADS, pool="mean"), decoder, two_stream)


def _umbc(body: Callable[[int], nn.Module], about: str) -> Callable[..., SetModel]:
    """UMBC, and any set function on its slots that ends in (B, 1)."""

    def build(
        in_dim: int,
        widths: list[int] | None = None,
        two_stream: bool = False,
        phi: nn.Module | None = None,
        dropout: float = 0.0,
        num_slots: int = SLOTS,
        heads: int = HEADS,
        **options: Any,
    ) -> SetModel:
        features, width = _phi(in_dim, [WIDTH] if widths is None else widths, phi, dropout)
        pool = UMBC(width, num_slots, heads=heads, **options)
        return assemble(features, width, pool, body(width), two_stream)

    build.__doc__ = about
    return build


def set_transformer_body(width: int, dropout: float = 0.5) -> nn.Sequential:
    """SAB, pooling to one seed with dropout before and after, a linear layer."""
    return nn.Sequential(
        SAB(width, HEADS, layer_norm=True),
        nn.Dropout(dropout),
        PMA(width, HEADS, layer_norm=True),
        nn.Flatten(1),
        nn.Dropout(dropout),
        nn.Linear(width, 1),
    )


def diff_em_body(width: int) -> nn.Sequential:
    """Differentiable EM on the slots, two linear layers."""
    pool = DiffEM(width, heads=1, components=5, steps=1)
    return nn.Sequential(pool, nn.Linear(pool.out_dim, width), nn.ReLU(), nn.Linear(width, 1))


def fspool_body(width: int) -> nn.Sequential:
    """Featurewise sort pooling of the slots, two linear layers."""
    return nn.Sequential(FSPool(width), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 1))


MODELS: dict[str, Callable[..., SetModel]] = {
    "ab-mil": ab_mil,
    "ds-mil": ds_mil,
    "deepsets": deepsets,
    "sse": sse,
    "umbc+set-transformer": _umbc(set_transformer_body, "UMBC, then SAB and PMA with dropout on the slots."),
    "umbc+diff-em": _umbc(diff_em_body, "UMBC, then differentiable EM on the slots."),
    "umbc+fspool": _umbc(fspool_body, "UMBC, then featurewise sort pooling of the slots."),
}
