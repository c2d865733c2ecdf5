"""The five models of the slide experiment as in the published code of the authors, which differs from the text.

    instances --backbone with a projection, dropout 0.5--> h --+-- w·h + b, maximum over the bag --> instance logit
                                                               +-- set encoder, decoder -----------> bag logit

Both streams read the projection itself, with no layer in between (`widths`), and every model has both (`two_stream`).
docs/recipes.md lists the differences from `models.py`, layer by layer.
"""

from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from setstream.models.model import SetModel
from setstream.pools import DSMIL, UMBC, DeepSets, GatedAttention
from setstream.tasks.mil.models import SLOTS, WIDTH, Branches, Parts, bag_model
from setstream.tasks.registry import variants
from setstream.tasks.released import LAYER, ONE_SLOT, PMA

RESIDUAL = LAYER | {"slot_residual": True}


def released_model(
    parts: Callable[..., Parts],
    in_dim: int | None = None,
    widths: Sequence[int] = (),
    two_stream: bool = True,
    dropout: float = 0.5,
    **options: Any,
) -> SetModel:
    """A bag classifier with the pool and the decoder of `parts(width, **options)`, or of ds-mil, which has both streams."""
    streams = two_stream and parts is not ds_mil
    return bag_model(parts, in_dim, list(widths), streams, dropout=dropout, **options)


def _two_layers(width: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(width, WIDTH), nn.ReLU(), nn.Linear(WIDTH, outputs))


def ab_mil(width: int, outputs: int = 1) -> Parts:
    """Gated attention with 128 hidden units, then a linear layer."""
    return GatedAttention(width, WIDTH), Branches(width, outputs)


def ds_mil(width: int, outputs: int = 1) -> Parts:
    """DS-MIL in two passes over the bag, which pools the features themselves: both streams are its own."""
    return DSMIL(width, outputs, value=False), nn.Identity()


def deepsets(width: int, outputs: int = 1) -> Parts:
    """Maximum pooling, layer norm, two linear layers."""
    return DeepSets("max"), nn.Sequential(nn.LayerNorm(width), _two_layers(width, outputs))


def sse(width: int, outputs: int = 1, **options: Any) -> Parts:
    """The Slot Set Encoder with one slot, which is a mean, then two linear layers."""
    pool = UMBC(width, slot_dim=WIDTH, out_dim=WIDTH, **(RESIDUAL | ONE_SLOT | options))
    return pool, nn.Sequential(nn.Flatten(1), _two_layers(WIDTH, outputs))


def umbc_set_transformer(width: int, num_slots: int = SLOTS, outputs: int = 1, **options: Any) -> Parts:
    """UMBC, then PMA with dropout before and after it."""
    pool = UMBC(width, num_slots, WIDTH, WIDTH, **(RESIDUAL | options))
    pooled = nn.Dropout(0.5), PMA(WIDTH, WIDTH, 1, 1), nn.Flatten(1), nn.Dropout(0.5)
    return pool, nn.Sequential(*pooled, nn.Linear(WIDTH, outputs))


_PARTS: dict[str, Callable[..., Parts]] = {"ab-mil": ab_mil, "ds-mil": ds_mil, "deepsets": deepsets, "sse": sse}
_PARTS |= {"umbc+set-transformer": umbc_set_transformer}
MODELS = {f"{name}-released": build for name, build in variants(released_model, _PARTS).items()}
