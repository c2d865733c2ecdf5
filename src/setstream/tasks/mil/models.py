"""Bag classifiers by name, each as the paper's appendix builds it.

    instances --backbone, layers--> h --+-- w·h + b, maximum over the bag -----------------> instance logit
                                        +-- set encoder, decoder --------------------------> bag logit

phi is the backbone (for images; none for stored features) and the layers, so a model without a backbone has the same weight
names as one with it. Both streams read one pass of phi (`Parallel`), and the instance stream, a maximum, needs constant memory
like the other. It is left out unless `two_stream`. ds-mil has both streams of its own, and reads a bag twice.

    ab-mil     Ilse et al., "Attention-based Deep Multiple Instance Learning", ICML 2018
    clam-sb/mb Lu et al., "Data-efficient and weakly supervised computational pathology on whole-slide images", Nature BME 2021
    acmil      Zhang et al., "Attention-Challenging Multiple Instance Learning for Whole Slide Image Classification", ECCV 2024
    simlp      Li et al., "Can We Simplify Slide-level Fine-tuning of Pathology Foundation Models?", arXiv 2502.20823, 2025
    transmil   Shao et al., "TransMIL: Transformer based Correlated Multiple Instance Learning [...]", NeurIPS 2021

Of CLAM and ACMIL, these are the bag's branches. Losses on single patches (CLAM's clustering), on pairs of branches (ACMIL's
diversity) and its masking of the largest weights are not here. transmil needs its whole bag, and refuses chunks.
"""

from collections import OrderedDict
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn

from setstream.errors import ConfigurationError
from setstream.models.encoder import SetEncoder
from setstream.models.model import SetModel
from setstream.nn import SAB, DiffEM, FSPool, TransMIL
from setstream.nn.backbones import backbone as named_backbone
from setstream.nn.mlp import mlp
from setstream.nn.set_transformer import set_transformer_head
from setstream.pools import DSMIL, SSE, UMBC, ChunkMean, DeepSets, GatedAttention, MultiPass, Parallel, Projected
from setstream.pools.base import Pool
from setstream.tasks.registry import check_passes, variants

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
    layers = [in_dim, *(WIDTHS.get(parts, [WIDTH]) if widths is None else widths)]
    reading = mlp(layers, dropout)
    if dropout and len(layers) == 1:  # on the features themselves
        reading.append(nn.Dropout(dropout))
    phi, width = nn.Sequential(OrderedDict(backbone=network, layers=reading)), layers[-1]
    pool, decoder = parts(width, **options | ({} if outputs == 1 else {"outputs": outputs}))
    if two_stream:
        if pool.passes > 1:
            raise ConfigurationError(
                f"two_stream=True adds an instance stream to models that read a bag once, and this one reads it {pool.passes} "
                "times. Leave two_stream out: ds-mil has streams of its own, and umbc+set-transformer takes it with passes=1"
            )
        pool = Parallel(instance=Projected(nn.Linear(width, outputs), DeepSets("max")), bag=pool)
    return SetModel(SetEncoder(phi, pool, cast_input=backbone is None), BagHead(decoder))  # a backbone takes bytes


def _two_layers(width: int, outputs: int, in_dim: int | None = None) -> nn.Sequential:
    return nn.Sequential(nn.Linear(in_dim or width, width), nn.ReLU(), nn.Linear(width, outputs))


class Branches(nn.Linear):
    """A linear layer on all branches of attention together, (B, K, width) to (B, outputs)."""

    def forward(self, z: Tensor) -> Tensor:
        return super().forward(z.flatten(1))


class BranchPerClass(nn.Module):
    """A linear layer for each branch, (B, C, width) to the logits of C classes; of two with one output, their difference.

    The sigmoid of that difference is the probability of the second class under the softmax of both.
    """

    def __init__(self, width: int, outputs: int) -> None:
        super().__init__()
        self.outputs, branches = outputs, max(outputs, 2)
        layer = nn.Linear(width, branches)
        self.weight, self.bias = layer.weight, layer.bias

    def forward(self, z: Tensor) -> Tensor:
        logits = (z * self.weight).sum(-1) + self.bias
        return logits[:, 1:] - logits[:, :1] if self.outputs == 1 else logits


class BranchesAndMean(nn.Module):
    """The logits of each branch by a layer of its own while training, and of their mean: (B, K, width) to (B, (K + 1) outputs).

    In eval mode only the last ones, (B, outputs): the branches' own logits are there to be trained.
    """

    def __init__(self, width: int, branches: int, outputs: int = 1) -> None:
        super().__init__()
        layer = nn.Linear(width, branches * outputs)
        self.weight, self.bias = layer.weight, layer.bias
        self.bag = nn.Linear(width, outputs)

    def forward(self, z: Tensor) -> Tensor:
        bag: Tensor = self.bag(z.mean(1))
        if not self.training:
            return bag
        of_branches = torch.einsum("bkw,kow->bko", z, self.weight.unflatten(0, (z.shape[1], -1))).flatten(1)
        return torch.cat([of_branches + self.bias, bag], dim=1)


def ab_mil(width: int, hidden: int = 64, gated: bool = True, branches: int = 1, outputs: int = 1) -> Parts:
    """Gated attention, then a linear layer; without outputs, the pooled features themselves."""
    decoder = Branches(branches * width, outputs) if outputs else nn.Flatten()
    return GatedAttention(width, hidden, branches, gated), decoder


def clam_sb(width: int, hidden: int = 256, gated: bool = True, outputs: int = 1) -> Parts:
    """CLAM with one branch: `ab-mil` with its sizes."""
    return ab_mil(width, hidden, gated, outputs=outputs)


def clam_mb(width: int, hidden: int = 256, gated: bool = True, outputs: int = 1) -> Parts:
    """CLAM with an attention branch and a linear layer for each class; one output stands for two classes."""
    return GatedAttention(width, hidden, max(outputs, 2), gated), BranchPerClass(width, outputs)


def acmil(width: int, hidden: int = 128, branches: int = 5, outputs: int = 1) -> Parts:
    """ACMIL's attention branches, each with a classifier while training, and the classifier of their mean."""
    return GatedAttention(width, hidden, branches), BranchesAndMean(width, branches, outputs)


def simlp(width: int, hidden: int = 512, outputs: int = 1) -> Parts:
    """SiMLP: the mean of the features, then a layer with ReLU and a linear one."""
    return DeepSets("mean", width), nn.Sequential(nn.Linear(width, hidden), nn.ReLU(), nn.Linear(hidden, outputs))


def transmil(width: int, heads: int = 8, outputs: int = 1) -> Parts:
    """TransMIL, a baseline that needs the whole bag: train it with --gradient full."""
    return ChunkMean(TransMIL(width, heads=heads), width), nn.Linear(width, outputs)


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


def umbc_set_transformer(
    width: int, passes: int = 1, outputs: int = 1, layer_norm: bool = False, head_dropout: float = 0.25, **options: Any
) -> Parts:
    """UMBC, then SAB and PMA with dropout on the slots. With `passes`, a SAB makes the slots of each pass but the first."""
    # At first the attention is even, and the slots of all bags are nearly the same. Layer norms in the blocks enlarge these
    # slots, and with them each step of the head: too noisy for the attention to find rare instances. Dropout delays it, too.
    check_passes(passes)
    options = UMBC_OPTIONS | options
    first = UMBC(width, **options)
    later = [UMBC(width, first.num_slots, first.out_dim, first.out_dim, HEADS, slots="given") for _ in range(1, passes)]
    between = [SAB(first.out_dim, HEADS, layer_norm=layer_norm) for _ in later]
    pool = MultiPass([first, *later], between) if later else first
    return pool, set_transformer_head(first.out_dim, HEADS, head_dropout, outputs, layer_norm)


def umbc_diff_em(width: int, outputs: int = 1, **options: Any) -> Parts:
    """UMBC, then differentiable EM on the slots."""
    pool = UMBC(width, **(UMBC_OPTIONS | options))
    em = DiffEM(pool.out_dim, heads=1, components=5, steps=1)
    return pool, nn.Sequential(em, *_two_layers(pool.out_dim, outputs, em.out_dim))


def umbc_fspool(width: int, outputs: int = 1, **options: Any) -> Parts:
    """UMBC, then featurewise sort pooling of the slots."""
    pool = UMBC(width, **(UMBC_OPTIONS | options))
    return pool, nn.Sequential(FSPool(pool.out_dim), _two_layers(pool.out_dim, outputs))


#: Widths of phi's layers as published, where they are not [WIDTH].
WIDTHS: dict[Callable[..., Parts], list[int]] = {clam_sb: [512], clam_mb: [512], acmil: [512], simlp: [], transmil: [512]}
_PARTS: dict[str, Callable[..., Parts]] = {"ab-mil": ab_mil, "ds-mil": ds_mil, "deepsets": deepsets, "sse": sse}
_PARTS |= {"umbc+set-transformer": umbc_set_transformer}
_PARTS |= {"umbc+diff-em": umbc_diff_em, "umbc+fspool": umbc_fspool}
_PARTS |= {"clam-sb": clam_sb, "clam-mb": clam_mb, "acmil": acmil, "simlp": simlp, "transmil": transmil}
MODELS = variants(bag_model, _PARTS)
