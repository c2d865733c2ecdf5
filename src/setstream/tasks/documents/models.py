"""Document classifiers by name, each as the paper's appendix builds it.

    token ids --word vectors, layer norm, two layers--> features --pool--> z --decoder--> a logit for each label

Word vectors are those of the pretrained model, `learned` further or `frozen` (the option `words`). deepsets, sse, umbc+bert and
umbc+anchors+bert (without the two layers) see a document as a multiset of words, in any chunks. tobert and longformer read
words in order and need the whole document: their phi is the table of words alone, they are wrapped in `ChunkMean`, and train
with full gradients. `init` is the initialisation of phi's layers and of three-layer decoders: torch's or He's (see nn/mlp.py).
"""

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from setstream.errors import ConfigurationError
from setstream.models.encoder import SetEncoder
from setstream.models.model import SetModel
from setstream.nn.mlp import initialise, mlp
from setstream.pools import SSE, UMBC, ChunkMean, DeepSets
from setstream.tasks.documents.anchored import word_slots
from setstream.tasks.documents.language import Language, Pretrained, read_pretrained
from setstream.tasks.documents.longformer import Longformer
from setstream.tasks.documents.readers import SegmentReader, SlotReader, WholeReader

SLOTS, SLOT_DIM, DROPOUT = 256, 128, 0.1
WORDS = ("learned", "frozen")


def table(words: Tensor, kind: str) -> nn.Embedding:
    """The vectors of all words, learned or frozen."""
    if kind not in WORDS:
        raise ConfigurationError(f"words must be {' or '.join(WORDS)}; got {kind!r}")
    return nn.Embedding.from_pretrained(words.clone(), freeze=kind == "frozen")


class WordFeatures(nn.Module):
    """phi of the models of multisets: the table, a layer norm, `depth` layers, computed once per distinct word."""

    def __init__(self, words: Tensor, kind: str, depth: int = 2, init: str = "torch") -> None:
        super().__init__()
        if depth < 0:
            raise ConfigurationError(f"depth, the number of phi's layers, must be at least 0; got {depth}")
        self.width = words.shape[1]
        self.words, self.norm, self.layers = table(words, kind), nn.LayerNorm(self.width), mlp([self.width] * (1 + depth))
        initialise(self.layers, init)

    def forward(self, ids: Tensor) -> Tensor:
        """Features (M, width) of words (M,), most of which occur many times in a text."""
        distinct, place = ids.unique(return_inverse=True)
        return self.layers(self.norm(self.words(distinct))).index_select(0, place)


def classifier(width: int, labels: int, dropout: float) -> nn.Sequential:
    """Dropout and a linear layer."""
    return nn.Sequential(nn.Dropout(dropout), nn.Linear(width, labels))


def three_layers(width: int, labels: int, dropout: float, init: str) -> nn.Sequential:
    """The decoder of DeepSets and SSE."""
    hidden = mlp([width] * 3, dropout)
    initialise(hidden, init)
    return nn.Sequential(hidden, nn.Linear(width, labels))


def slots_reader(read: Pretrained, labels: int, dropout: float, num_slots: int, pooled: str) -> nn.Module:
    """BERT without positions on [CLS] and the slots, and the classifier."""
    language = Language(read.model, positions=False, pooled=pooled == "cls")
    if language.longest is not None and num_slots + 1 > language.longest:
        raise ConfigurationError(f"this model reads at most {language.longest - 1} slots; got num_slots = {num_slots}")
    reader = SlotReader(language, read.first, pooled)
    return nn.Sequential(OrderedDict(bert=reader, classify=classifier(language.out_width, labels, dropout)))


def read_in_order(read: Pretrained, reader: SegmentReader | WholeReader, words: str, labels: int, dropout: float) -> SetModel:
    """A reader of whole documents behind the table of words alone, and the classifier."""
    phi, language = nn.Sequential(OrderedDict(words=table(read.words, words))), reader.language
    return SetModel(SetEncoder(phi, ChunkMean(reader, language.width)), classifier(language.out_width, labels, dropout))


@torch.no_grad()
def initialise_bias(model: SetModel, rates: Tensor) -> None:
    """Initialise the output bias to the log-odds of the labels' rates (L,), which takes hundreds of steps to learn."""
    last = [layer for layer in model.head.modules() if isinstance(layer, nn.Linear)][-1]
    last.bias.copy_(rates.logit())


def deepsets(
    labels: int, bert: str = "minilm", words: str = "learned", dropout: float = DROPOUT, init: str = "torch", pool: str = "mean"
) -> SetModel:
    """Mean pooling, three layers."""
    phi = WordFeatures(read_pretrained(bert).words, words, init=init)
    return SetModel(SetEncoder(phi, DeepSets(pool, phi.width)), three_layers(phi.width, labels, dropout, init))


def sse(
    labels: int,
    bert: str = "minilm",
    words: str = "learned",
    dropout: float = DROPOUT,
    init: str = "torch",
    num_slots: int = SLOTS,
    normalise: bool = True,
    **options: Any,
) -> SetModel:
    """The Slot Set Encoder, the mean of its slots, three layers.

    Without `normalise`, the weights of a word sum to one over the slots, and the mean over the slots is a sum of the words.
    """
    phi = WordFeatures(read_pretrained(bert).words, words, init=init)
    defaults: dict[str, Any] = {"slot_dim": SLOT_DIM, "pool": "mean"}
    pool = SSE(phi.width, num_slots, normalise=normalise, **(defaults | options))
    return SetModel(SetEncoder(phi, pool), three_layers(phi.width, labels, dropout, init))


def umbc_bert(
    labels: int,
    bert: str = "minilm",
    words: str = "learned",
    dropout: float = DROPOUT,
    init: str = "torch",
    num_slots: int = SLOTS,
    pooled: str = "cls",
    depth: int = 2,
    **options: Any,
) -> SetModel:
    """UMBC with slot-sigmoid and layer norm, BERT without positions on [CLS] and the slots, dropout, a linear layer.

    `pooled` is cls, or the mean over the slots; `depth` the number of phi's layers.
    """
    read = read_pretrained(bert)
    phi = WordFeatures(read.words, words, depth, init)
    defaults: dict[str, Any] = {"slot_dim": SLOT_DIM, "activation": "slot-sigmoid", "norm_after": True}
    pool = UMBC(phi.width, num_slots, **(defaults | options))
    return SetModel(SetEncoder(phi, pool), slots_reader(read, labels, dropout, num_slots, pooled))


def umbc_anchors_bert(
    labels: int,
    bert: str = "minilm",
    words: str = "learned",
    dropout: float = DROPOUT,
    init: str = "torch",
    num_slots: int = SLOTS,
    pooled: str = "mean",
    depth: int = 0,
    activation: str = "softmax",
) -> SetModel:
    """Slots initialised as clusters of words, the same BERT on them, the mean of its outputs, dropout, a linear layer."""
    read = read_pretrained(bert)
    phi, pool = WordFeatures(read.words, words, depth, init), word_slots(read.words, num_slots, activation)
    return SetModel(SetEncoder(phi, pool), slots_reader(read, labels, dropout, num_slots, pooled))


def tobert(
    labels: int,
    bert: str = "minilm",
    words: str = "learned",
    dropout: float = DROPOUT,
    segment: int = 200,
    layers: int = 2,
    heads: int = 4,
) -> SetModel:
    """ToBERT: segments of words through BERT, a transformer over their vectors, the mean of its outputs."""
    read = read_pretrained(bert)
    reader = SegmentReader(Language(read.model), read.first, read.last, segment, layers, heads)
    return read_in_order(read, reader, words, labels, dropout)


def longformer(
    labels: int, bert: str = "minilm", words: str = "learned", dropout: float = DROPOUT, window: int = 256
) -> SetModel:
    """A Longformer made of the same BERT, reading the whole document."""
    read = read_pretrained(bert)
    reader = WholeReader(Longformer(read.model, window), read.first, read.last)
    return read_in_order(read, reader, words, labels, dropout)


MODELS: dict[str, Callable[..., SetModel]] = {
    "deepsets": deepsets,
    "sse": sse,
    "umbc+bert": umbc_bert,
    "umbc+anchors+bert": umbc_anchors_bert,
    "tobert": tobert,
    "longformer": longformer,
}
