"""Document classifiers by name, each as the paper's appendix builds it.

    token ids --word vectors, layer norm, two layers--> features --pool--> z --decoder--> a logit for each label

Word vectors are those of the pretrained model, `learned` further or `frozen` (the option `words`). deepsets, sse, umbc+bert and
umbc+anchors+bert (without the two layers) see a document as a multiset of words, in any chunks. tobert and longformer read
words in order and need the whole document: their phi is the table of words alone, they are wrapped in `ChunkMean`, and train
with full gradients. `init` is the initialisation of phi's layers and of three-layer decoders: torch's or He's (see nn/mlp.py).
"""

from collections import OrderedDict
from collections.abc import Callable
from typing import Any, NamedTuple

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


class Shared(NamedTuple):
    """The parts that all models share: a pretrained model, the number of labels, the kind of word vectors, and the dropout."""

    read: Pretrained
    labels: int
    words: str
    dropout: float

    def features(self, depth: int = 2, init: str = "torch") -> WordFeatures:
        """phi of the models of multisets."""
        return WordFeatures(self.read.words, self.words, depth, init)

    def slots_reader(self, num_slots: int, pooled: str) -> nn.Module:
        """BERT without positions on [CLS] and the slots, and the classifier."""
        language = Language(self.read.model, positions=False, pooled=pooled == "cls")
        if language.longest is not None and num_slots + 1 > language.longest:
            raise ConfigurationError(f"this model reads at most {language.longest - 1} slots; got num_slots = {num_slots}")
        reader = SlotReader(language, self.read.first, pooled)
        return nn.Sequential(OrderedDict(bert=reader, classify=classifier(language.out_width, self.labels, self.dropout)))

    def read_in_order(self, reader: SegmentReader | WholeReader) -> SetModel:
        """A reader of whole documents after the table of words alone, and the classifier."""
        phi, language = nn.Sequential(OrderedDict(words=table(self.read.words, self.words))), reader.language
        decoder = classifier(language.out_width, self.labels, self.dropout)
        return SetModel(SetEncoder(phi, ChunkMean(reader, language.width)), decoder)


def document_model(parts: Callable[..., SetModel]) -> Callable[..., SetModel]:
    """A builder with the options that all models share and those of `parts`, with the docstring of `parts`."""

    def build(labels: int, bert: str = "minilm", words: str = "learned", dropout: float = DROPOUT, **options: Any) -> SetModel:
        return parts(Shared(read_pretrained(bert), labels, words, dropout), **options)

    build.__doc__ = parts.__doc__
    return build


@torch.no_grad()
def initialise_bias(model: SetModel, rates: Tensor) -> None:
    """Initialise the output bias to the log-odds of the labels' rates (L,), which takes hundreds of steps to learn."""
    last = [layer for layer in model.head.modules() if isinstance(layer, nn.Linear)][-1]
    last.bias.copy_(rates.logit())


def deepsets(shared: Shared, init: str = "torch", pool: str = "mean") -> SetModel:
    """Mean pooling, three layers."""
    phi = shared.features(init=init)
    decoder = three_layers(phi.width, shared.labels, shared.dropout, init)
    return SetModel(SetEncoder(phi, DeepSets(pool, phi.width)), decoder)


def sse(shared: Shared, init: str = "torch", num_slots: int = SLOTS, normalise: bool = True, **options: Any) -> SetModel:
    """The Slot Set Encoder, the mean of its slots, three layers.

    Without `normalise`, the weights of a word sum to one over the slots, and the mean over the slots is a sum of the words.
    """
    phi = shared.features(init=init)
    defaults: dict[str, Any] = {"slot_dim": SLOT_DIM, "pool": "mean"}
    pool = SSE(phi.width, num_slots, normalise=normalise, **(defaults | options))
    return SetModel(SetEncoder(phi, pool), three_layers(phi.width, shared.labels, shared.dropout, init))


def umbc_bert(
    shared: Shared, init: str = "torch", num_slots: int = SLOTS, pooled: str = "cls", depth: int = 2, **options: Any
) -> SetModel:
    """UMBC with slot-sigmoid and layer norm, BERT without positions on [CLS] and the slots, dropout, a linear layer.

    `pooled` is cls, or the mean over the slots; `depth` the number of phi's layers.
    """
    phi = shared.features(depth, init)
    defaults: dict[str, Any] = {"slot_dim": SLOT_DIM, "activation": "slot-sigmoid", "norm_after": True}
    pool = UMBC(phi.width, num_slots, **(defaults | options))
    return SetModel(SetEncoder(phi, pool), shared.slots_reader(num_slots, pooled))


def umbc_anchors_bert(
    shared: Shared,
    init: str = "torch",
    num_slots: int = SLOTS,
    pooled: str = "mean",
    depth: int = 0,
    activation: str = "softmax",
) -> SetModel:
    """Slots initialised as clusters of words, the same BERT on them, the mean of its outputs, dropout, a linear layer."""
    phi, pool = shared.features(depth, init), word_slots(shared.read.words, num_slots, activation)
    return SetModel(SetEncoder(phi, pool), shared.slots_reader(num_slots, pooled))


def tobert(shared: Shared, segment: int = 200, layers: int = 2, heads: int = 4) -> SetModel:
    """ToBERT: segments of words through BERT, a transformer over their vectors, the mean of its outputs."""
    read = shared.read
    return shared.read_in_order(SegmentReader(Language(read.model), read.first, read.last, segment, layers, heads))


def longformer(shared: Shared, window: int = 256) -> SetModel:
    """A Longformer made from the same BERT, on the whole document."""
    read = shared.read
    return shared.read_in_order(WholeReader(Longformer(read.model, window), read.first, read.last))


MODELS: dict[str, Callable[..., SetModel]] = {
    "deepsets": document_model(deepsets),
    "sse": document_model(sse),
    "umbc+bert": document_model(umbc_bert),
    "umbc+anchors+bert": document_model(umbc_anchors_bert),
    "tobert": document_model(tobert),
    "longformer": document_model(longformer),
}
