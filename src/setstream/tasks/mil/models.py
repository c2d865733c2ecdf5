"""Bag classifiers by name, each as the paper's appendix builds it.

    instances --backbone, layers--> h --+-- w·h + b, maximum over the bag -----------------> instance logit
                                        +-- set encoder, decoder --------------------------> bag logit

phi is the backbone (for images; none for stored features) and the layers, so a model without a backbone has the same weight
names as one with it. Both streams read one pass of phi (`Parallel`), and the instance stream, a maximum, needs constant memory
like the other. It is left out unless `two_stream`. ds-mil has both streams of its own, and reads a bag twice.
"""

from collections import OrderedDict
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn

from setstream.errors import ConfigurationError
from setstream.models.encoder import SetEncoder
from setstream.models.model import SetModel
from setstream.nn import DiffEM, FSPool
from setstream.nn.backbones import backbone as named_backbone
from setstream.nn.mlp import mlp
from setstream.nn.set_transformer import set_transformer_head
from setstream.pools import DSMIL, SSE, UMBC, DeepSets, GatedAttention, Parallel, Projected
from setstream.pools.base import Pool
from setstream.tasks.registry import variants

WIDTH, HEADS, SLOTS = 128, 4, 64
UMBC_OPTIONS: dict[str, Any] = {"num_slots": SLOTS, "heads": HEADS}


class BagHead(nn.Module):
    """Logits of the streams, (B, S · outputs): the instance stream's first if there is one, the bag stream's last."""

    def __init__(self, decoder: nn.Module) -> None:
        super().__init__()
        self.decoder = decoder

    def forward(self, z: Tensor | dict[str, Tensor]) -> Tensor:
        return torch.cat([z["instance"], self.decoder(z["bag"])], dim=1) if isinstance(z, dict) else self.decoder(z)


Parts = tuple[Pool, nn.Module]  # width of the features, options of the pool -> the pool, and the decoder after it: its logits


def bag_model(
    parts: Callable[..., Parts],
    in_dim: int | None = None,
    widths: list[int] | None = None,
    two_stream: bool = False,
    backbone: str | None = None,
    weights: str | None = None,
    backbone_options: dict[str, Any] | None = None,
    dropout: float = 0.0,
    outputs: int = 1,
    **options: Any,
) -> SetModel:
    """A bag classifier with the pool and the decoder of `parts(width, **options)`; `outputs`: logits of each stream."""
    network: nn.Module = nn.Identity()
    if backbone is not None:
        network = named_backbone(backbone, weights, **(backbone_options or {}))
        in_dim = cast(int, network.out_dim)
    elif in_dim is None:
        raise ConfigurationError("instances that are not vectors need a backbone, such as model.backbone=resnet18")
    layers = [in_dim, *([WIDTH] if widths is None else widths)]
    reading = mlp(layers, dropout)
    if dropout and len(layers) == 1:  # on the features themselves
        reading.append(nn.Dropout(dropout))
    phi, width = nn.Sequential(OrderedDict(backbone=network, layers=reading)), layers[-1]
    pool, decoder = parts(width, **options | ({} if outputs == 1 else {"outputs": outputs}))
    if two_stream:
        pool = Parallel(instance=Projected(nn.Linear(width, outputs), DeepSets("max")), bag=pool)
    return SetModel(SetEncoder(phi, pool, cast_input=backbone is None), BagHead(decoder))  # a backbone takes bytes


def _two_layers(width: int, outputs: int, in_dim: int | None = None) -> nn.Sequential:
    return nn.Sequential(nn.Linear(in_dim or width, width), nn.ReLU(), nn.Linear(width, outputs))


class OneBranch(nn.Linear):
    """A linear layer on the only branch of gated attention, (B, 1, width) to (B, outputs)."""

    def forward(self, z: Tensor) -> Tensor:
        return super().forward(z.squeeze(1))


def ab_mil(width: int, outputs: int = 1) -> Parts:
    """Gated attention, then a linear layer."""
    return GatedAttention(width, 64), OneBranch(width, outputs)


def ds_mil(width: int, outputs: int = 1) -> Parts:
    """DS-MIL in two passes over the bag: both streams are its own."""
    return DSMIL(width, outputs), nn.Identity()


def deepsets(width: int, outputs: int = 1) -> Parts:
    """Maximum pooling, two linear layers."""
    return DeepSets("max"), _two_layers(width, outputs)


def sse(width: int, num_slots: int = SLOTS, normalise: bool = True, outputs: int = 1) -> Parts:
    """The Slot Set Encoder with a mean over its slots, two linear layers."""
    # Not normalised, the weights of an element sum to one over the slots, and their mean is a plain sum: no attention at all.
    return SSE(width, num_slots, heads=HEADS, pool="mean", normalise=normalise), _two_layers(width, outputs)


def umbc_set_transformer(width: int, outputs: int = 1, **options: Any) -> Parts:
    """UMBC, then SAB and PMA with dropout on the slots."""
    pool = UMBC(width, **(UMBC_OPTIONS | options))
    return pool, set_transformer_head(pool.out_dim, HEADS, outputs=outputs)


def umbc_diff_em(width: int, outputs: int = 1, **options: Any) -> Parts:
    """UMBC, then differentiable EM on the slots."""
    pool = UMBC(width, **(UMBC_OPTIONS | options))
    em = DiffEM(pool.out_dim, heads=1, components=5, steps=1)
    return pool, nn.Sequential(em, *_two_layers(pool.out_dim, outputs, em.out_dim))


def umbc_fspool(width: int, outputs: int = 1, **options: Any) -> Parts:
    """UMBC, then featurewise sort pooling of the slots."""
    pool = UMBC(width, **(UMBC_OPTIONS | options))
    return pool, nn.Sequential(FSPool(pool.out_dim), _two_layers(pool.out_dim, outputs))


_PARTS: dict[str, Callable[..., Parts]] = {
    "ab-mil": ab_mil,
    "ds-mil": ds_mil,
    "deepsets": deepsets,
    "sse": sse,
    "umbc+set-transformer": umbc_set_transformer,
}
MODELS = variants(bag_model, _PARTS | {"umbc+diff-em": umbc_diff_em, "umbc+fspool": umbc_fspool})
