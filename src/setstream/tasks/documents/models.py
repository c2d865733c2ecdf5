"""Document classifiers by name, each as the paper's appendix builds it.

    token ids --word vectors, layer norm, two layers--> features --pool--> z --decoder--> a logit for each label

Word vectors are those of the pretrained model; `words` says whether they learn. deepsets, sse, umbc+bert and umbc+anchors+bert
(ours, without the two layers) see a document as a multiset of words and do not care how it is cut. tobert and longformer read
words in order and need the whole document: their phi is the table of words alone, they stand in `ChunkMean`, and train with
full gradients. `init` is how the layers around pools begin: as torch has it, or as He (see nn/mlp.py).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from setstream.encoder import SetEncoder
from setstream.errors import ConfigurationError
from setstream.model import SetModel
from setstream.nn.mlp import initialise, mlp
from setstream.pool import Pool
from setstream.pools import SSE, UMBC, ChunkMean, DeepSets
from setstream.tasks.documents.anchored import word_slots
from setstream.tasks.documents.language import Language, Pretrained, read_pretrained
from setstream.tasks.documents.longformer import Longformer
from setstream.tasks.documents.readers import SegmentReader, SlotReader, WholeReader

SLOTS, SLOT_DIM, DROPOUT = 256, 128, 0.1
WORDS = ("learned", "frozen")


def table(words: Tensor, kind: str) -> nn.Embedding:
    """The vectors of all words, learned on or frozen."""
    if kind not in WORDS:
        raise ConfigurationError(f"words are {' or '.join(WORDS)}; got {kind!r}")
    return nn.Embedding.from_pretrained(words.clone(), freeze=kind == "frozen")


class WordFeatures(nn.Module):
    """phi of the models that see multisets: the table, a layer norm, `depth` layers, once for each different word."""

    def __init__(self, words: Tensor, kind: str, depth: int) -> None:
        super().__init__()
        width = words.shape[1]
        self.words, self.norm, self.layers = table(words, kind), nn.LayerNorm(width), mlp([width] * (1 + depth))

    def forward(self, ids: Tensor) -> Tensor:
        """Features (M, width) of words (M,): most words of a text come again and again."""
        different, place = ids.unique(return_inverse=True)
        found: Tensor = self.layers(self.norm(self.words(different)))
        return found.index_select(0, place)


def classifier(width: int, labels: int, dropout: float) -> nn.Sequential:
    """Dropout and a linear layer."""
    return nn.Sequential(nn.Dropout(dropout), nn.Linear(width, labels))


def three_layers(width: int, labels: int, dropout: float) -> nn.Sequential:
    """The decoder of DeepSets and SSE."""
    return nn.Sequential(mlp([width] * 3, dropout), nn.Linear(width, labels))


@torch.no_grad()
def begin_at_rates(model: SetModel, rates: Tensor) -> None:
    """Let the last layer begin by saying how often each label comes (L,): else the first hundreds of steps learn that alone."""
    last = [layer for layer in model.head.modules() if isinstance(layer, nn.Linear)][-1]
    last.bias.copy_(rates.logit())


# what was read, the number of labels, dropout, options -> the pool, and the decoder behind it
Parts = Callable[..., tuple[Pool, nn.Module]]


def document_model(parts: Parts, depth: int = 2) -> Callable[..., SetModel]:
    """A builder of models that differ in pool and decoder, and in the depth of phi; it has the docstring of `parts`."""

    def build(
        labels: int,
        bert: str = "minilm",
        words: str = "learned",
        dropout: float = DROPOUT,
        init: str = "torch",
        **options: Any,
    ) -> SetModel:
        read = read_pretrained(bert)
        pool, decoder = parts(read, labels, dropout, **options)
        phi: nn.Module
        if pool.consistent:
            phi = WordFeatures(read.words, words, depth)
            initialise(phi, init)
        else:
            phi = nn.Sequential(OrderedDict(words=table(read.words, words)))
        if not hasattr(decoder, "bert"):  # what is pretrained stays as it is
            initialise(decoder, init)
        return SetModel(SetEncoder(phi, pool), decoder)

    build.__doc__ = parts.__doc__
    return build


def deepsets(read: Pretrained, labels: int, dropout: float, pool: str = "mean") -> tuple[Pool, nn.Module]:
    """Mean pooling, three layers."""
    width = read.words.shape[1]
    return DeepSets(pool, width), three_layers(width, labels, dropout)


def sse(
    read: Pretrained, labels: int, dropout: float, num_slots: int = SLOTS, normalise: bool = True, **options: Any
) -> tuple[Pool, nn.Module]:
    """The Slot Set Encoder, the mean of its slots, three layers.

    Without normalise the weights of a word sum to one over the slots (slot-sigmoid), so the mean over the slots would be a
    mere sum of the words.
    """
    width = read.words.shape[1]
    defaults: dict[str, Any] = {"slot_dim": SLOT_DIM, "pool": "mean"}
    pool = SSE(width, num_slots, normalise=normalise, **(defaults | options))
    return pool, three_layers(width, labels, dropout)


def umbc_bert(
    read: Pretrained, labels: int, dropout: float, num_slots: int = SLOTS, pooled: str = "cls", **options: Any
) -> tuple[Pool, nn.Module]:
    """UMBC with slot-sigmoid and layer norm, BERT without positions on [CLS] and the slots, dropout, a linear layer.

    pooled: cls, or the mean over the slots. With one head, `normalise` changes nothing behind the layer norm.
    """
    defaults: dict[str, Any] = {"slot_dim": SLOT_DIM, "activation": "slot-sigmoid", "norm_after": True}
    pool = UMBC(read.words.shape[1], num_slots, **(defaults | options))
    return pool, slots_reader(read, labels, dropout, num_slots, pooled)


def umbc_anchors_bert(
    read: Pretrained, labels: int, dropout: float, num_slots: int = SLOTS, pooled: str = "mean"
) -> tuple[Pool, nn.Module]:
    """Ours: slots that begin as kinds of words, the same BERT on them, the mean of its outputs, dropout, a linear layer."""
    return word_slots(read.words, num_slots), slots_reader(read, labels, dropout, num_slots, pooled)


def slots_reader(read: Pretrained, labels: int, dropout: float, num_slots: int, pooled: str) -> nn.Module:
    """BERT without positions on [CLS] and the slots, and the classifier."""
    language = Language(read.model, positions=False, pooled=pooled == "cls")
    if num_slots + 1 > language.longest:
        raise ConfigurationError(
            f"this model reads [CLS] and at most {language.longest - 1} slots; got num_slots = {num_slots}"
        )
    reader = SlotReader(language, read.first, pooled)
    return nn.Sequential(OrderedDict(bert=reader, classify=classifier(language.width, labels, dropout)))


def tobert(
    read: Pretrained,
    labels: int,
    dropout: float,
    segment: int = 200,
    layers: int = 2,
    heads: int = 4,
    longest: int | None = None,
) -> tuple[Pool, nn.Module]:
    """ToBERT: segments of words through BERT, a transformer over their vectors, the mean of its outputs.

    longest: read no more words than these, where memory does not suffice for all.
    """
    reader = SegmentReader(Language(read.model), read.first, read.last, segment, layers, heads, longest)
    return ChunkMean(reader, reader.language.width), classifier(reader.language.width, labels, dropout)


def longformer(
    read: Pretrained, labels: int, dropout: float, window: int = 256, longest: int | None = None
) -> tuple[Pool, nn.Module]:
    """A Longformer made of the same BERT, reading the whole document; or its `longest` first words, where memory is short."""
    reader = WholeReader(Longformer(read.model, window), read.first, read.last, longest)
    return ChunkMean(reader, reader.language.width), classifier(reader.language.width, labels, dropout)


MODELS: dict[str, Callable[..., SetModel]] = {
    "deepsets": document_model(deepsets),
    "sse": document_model(sse),
    "umbc+bert": document_model(umbc_bert),
    "umbc+anchors+bert": document_model(umbc_anchors_bert, depth=0),
    "tobert": document_model(tobert),
    "longformer": document_model(longformer),
}
