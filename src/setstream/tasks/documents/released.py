"""The models of multisets of words as in the published code of the authors, which differs from the text.

    token ids --word vectors, layer norm, two layers--> features --pool--> z --decoder--> a logit for each label

docs/recipes.md lists the differences from `models.py`, layer by layer, and the two stages of training. The release has no
ToBERT and no Longformer.
"""

from typing import Any

from torch import nn

from setstream.models.encoder import SetEncoder
from setstream.models.model import SetModel
from setstream.pools import DeepSets
from setstream.tasks.documents.models import SLOT_DIM, SLOTS, Shared, WordFeatures, document_model
from setstream.tasks.registry import Builder, variants
from setstream.tasks.released import ONE_SLOT, NormedSlots

SIGMOID: dict[str, Any] = {"slot_dim": SLOT_DIM, "activation": "slot-sigmoid", "normalise": True}


def plain_layers(shared: Shared, width: int, init: str) -> nn.Sequential:
    """Three layers without dropout."""
    return shared._replace(dropout=0.0).three_layers(width, init)


def deepsets(shared: Shared, init: str = "torch") -> SetModel:
    """Mean pooling, three layers without dropout."""
    phi = WordFeatures(shared.words, init=init)
    return SetModel(SetEncoder(phi, DeepSets("mean", phi.width)), plain_layers(shared, phi.width, init))


def sse(shared: Shared, init: str = "torch", **options: Any) -> SetModel:
    """The Slot Set Encoder with one slot, which is a mean, layer norm, three layers without dropout."""
    phi = WordFeatures(shared.words, init=init)
    pool = NormedSlots(phi.width, **(SIGMOID | ONE_SLOT | options))
    return SetModel(SetEncoder(phi, pool), nn.Sequential(nn.Flatten(1), plain_layers(shared, phi.width, init)))


def umbc_bert(shared: Shared, init: str = "torch", num_slots: int = SLOTS, **options: Any) -> SetModel:
    """UMBC with Gaussian slots and slot-sigmoid, BERT without positions on [CLS] and the slots, dropout, a linear layer."""
    phi = WordFeatures(shared.words, init=init)
    pool = NormedSlots(phi.width, num_slots, **(SIGMOID | options))
    return SetModel(SetEncoder(phi, pool), shared.slots_reader(num_slots, "cls"))


_PARTS: dict[str, Builder] = {"deepsets": deepsets, "sse": sse, "umbc+bert": umbc_bert}
MODELS = {f"{name}-released": build for name, build in variants(document_model, _PARTS).items()}
