"""Document classifiers by name, each as the paper's appendix builds it.

    token ids --word vectors, layer norm, two layers--> features --pool--> z --decoder--> a logit for each label

Word vectors are those of the pretrained model, `learned` further or `frozen` (the option `words`). deepsets, sse, umbc+bert and
umbc+anchors+bert (without the two layers) see a document as a multiset of words, in any chunks. tobert and longformer read
words in order and need the whole document: their phi is the table of words alone, they are wrapped in `ChunkMean`, and train
with full gradients. `pooled` is cls, or the mean over the slots; `depth` is the number of phi's layers; `init` is their
initialisation, and that of three-layer decoders: torch's or He's (see nn/mlp.py).

`umbc+anchors+bert`: slots that are initialised as clusters of words; each attends to the words of a document in its cluster.

    φ(w)  = LN(v_w)                                     v the table of words
    a_k   = direction of Σ_{w in cluster k} (φ(w) - mean φ)        clusters: spherical k-means over the vocabulary
    l_kn  = s ⟨a_k, φ(w_n)⟩ / √d,   z_k = LN(Σ_n softmax_n(l_k) φ(w_n))        UMBC, one head, before anything is learned

So a document of any length becomes K words, near those that the BERT after it was trained on. All of it is learned further.
"""

from collections import OrderedDict
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from setstream.errors import ConfigurationError
from setstream.models.encoder import SetEncoder
from setstream.models.model import SetModel
from setstream.nn.mlp import begin_near, initialise, mlp
from setstream.pools import SSE, UMBC, ChunkMean, DeepSets
from setstream.tasks.documents import language as lm
from setstream.tasks.registry import Builder, variants

SLOTS, SLOT_DIM, DROPOUT = 256, 128, 0.1
WORDS = ("learned", "frozen")
SHARPNESS = 10.0  # s: a word whose vector is at 60° to an anchor has e^{s/2} times the weight of one at 90°
ROUNDS = 5


class WordFeatures(nn.Module):
    """phi of the models of multisets: the table, a layer norm, `depth` layers, computed once per distinct word."""

    def __init__(self, words: nn.Embedding, depth: int = 2, init: str = "torch") -> None:
        super().__init__()
        if depth < 0:
            raise ConfigurationError(f"depth, the number of phi's layers, must be at least 0; got {depth}")
        self.width = words.embedding_dim
        self.words, self.norm, self.layers = words, nn.LayerNorm(self.width), mlp([self.width] * (1 + depth))
        initialise(self.layers, init)

    def forward(self, ids: Tensor) -> Tensor:
        """Features (M, width) of words (M,), most of which occur many times in a text."""
        distinct, place = ids.unique(return_inverse=True)
        return self.layers(self.norm(self.words(distinct))).index_select(0, place)


class Shared(NamedTuple):
    """What all models share: a pretrained model, the number of labels, the table of words, and the dropout."""

    read: lm.Pretrained
    labels: int
    words: nn.Embedding
    dropout: float

    def classifier(self, width: int) -> nn.Sequential:
        return nn.Sequential(nn.Dropout(self.dropout), nn.Linear(width, self.labels))

    def three_layers(self, width: int, init: str) -> nn.Sequential:
        hidden = mlp([width] * 3, self.dropout)
        initialise(hidden, init)
        return nn.Sequential(hidden, nn.Linear(width, self.labels))

    def slots_reader(self, num_slots: int, pooled: str) -> nn.Module:
        """BERT without positions on [CLS] and the slots, and the classifier."""
        language = lm.Language(self.read.model, positions=False, pooled=pooled == "cls")
        if language.longest is not None and num_slots + 1 > language.longest:
            raise ConfigurationError(f"this model reads at most {language.longest - 1} slots; got num_slots = {num_slots}")
        reader = lm.SlotReader(language, self.read.first, pooled)
        return nn.Sequential(OrderedDict(bert=reader, classify=self.classifier(language.out_width)))

    def read_in_order(self, reader: lm.SegmentReader | lm.WholeReader) -> SetModel:
        """A reader of whole documents after the table of words alone, and the classifier."""
        phi, language = nn.Sequential(OrderedDict(words=self.words)), reader.language
        return SetModel(SetEncoder(phi, ChunkMean(reader, language.width)), self.classifier(language.out_width))


def document_model(
    parts: Builder, labels: int, bert: str = "minilm", words: str = "learned", dropout: float = DROPOUT, **options: Any
) -> SetModel:
    """One of the models below, with the options that all of them share."""
    if words not in WORDS:
        raise ConfigurationError(f"words must be {' or '.join(WORDS)}; got {words!r}")
    read = lm.read_pretrained(bert)
    table = nn.Embedding.from_pretrained(read.words.clone(), freeze=words == "frozen")
    return parts(Shared(read, labels, table, dropout), **options)


def word_clusters(words: Tensor, count: int) -> Tensor:
    """Unit vectors (count, width): the centres of `count` clusters of a table of words (V, width); deterministic."""
    normed = F.layer_norm(words, words.shape[1:])
    directions = F.normalize(normed - normed.mean(0), dim=1)
    chosen = torch.randperm(len(words), generator=torch.Generator("cpu").manual_seed(0), device="cpu")[:count].to(words.device)
    centres = directions[chosen.repeat(-(-count // len(chosen)))[:count]]
    for _ in range(ROUNDS):
        nearest = (directions @ centres.T).argmax(1)
        sums = torch.zeros_like(centres).index_add_(0, nearest, directions)
        empty = sums.norm(dim=1, keepdim=True) == 0
        centres = torch.where(empty, centres, F.normalize(sums, dim=1))
    return centres


def deepsets(shared: Shared, init: str = "torch", pool: str = "mean") -> SetModel:
    """Mean pooling, three layers."""
    phi = WordFeatures(shared.words, init=init)
    return SetModel(SetEncoder(phi, DeepSets(pool, phi.width)), shared.three_layers(phi.width, init))


def sse(shared: Shared, init: str = "torch", num_slots: int = SLOTS, normalise: bool = True, **options: Any) -> SetModel:
    """The Slot Set Encoder, the mean of its slots (without `normalise`, a sum of the words), three layers."""
    phi = WordFeatures(shared.words, init=init)
    defaults: dict[str, Any] = {"slot_dim": SLOT_DIM, "pool": "mean"}
    pool = SSE(phi.width, num_slots, normalise=normalise, **(defaults | options))
    return SetModel(SetEncoder(phi, pool), shared.three_layers(phi.width, init))


def umbc_bert(
    shared: Shared, init: str = "torch", num_slots: int = SLOTS, pooled: str = "cls", depth: int = 2, **options: Any
) -> SetModel:
    """UMBC with slot-sigmoid and layer norm, BERT without positions on [CLS] and the slots, dropout, a linear layer."""
    phi = WordFeatures(shared.words, depth, init)
    defaults: dict[str, Any] = {"slot_dim": SLOT_DIM, "activation": "slot-sigmoid", "norm_after": True}
    pool = UMBC(phi.width, num_slots, **(defaults | options))
    return SetModel(SetEncoder(phi, pool), shared.slots_reader(num_slots, pooled))


def umbc_anchors_bert(
    shared: Shared, init: str = "torch", num_slots: int = SLOTS, pooled: str = "mean", depth: int = 0, **options: Any
) -> SetModel:
    """Slots initialised as clusters of words, the same BERT on them, the mean of its outputs, dropout, a linear layer."""
    phi = WordFeatures(shared.words, depth, init)
    pool = UMBC(phi.width, num_slots, slot_norm=False, norm_after=True, **options)
    begin_near(pool.query, pool.key, torch.tensor([SHARPNESS / phi.width**0.5]), phi.width)
    with torch.no_grad():
        pool.slots.mean.copy_(word_clusters(shared.read.words, num_slots))
        pool.value.weight.copy_(torch.eye(phi.width))
        pool.value.bias.zero_()
    return SetModel(SetEncoder(phi, pool), shared.slots_reader(num_slots, pooled))


def tobert(shared: Shared, segment: int = 200, layers: int = 2, heads: int = 4) -> SetModel:
    """ToBERT: segments of words through BERT, a transformer over their vectors, the mean of its outputs."""
    return shared.read_in_order(lm.SegmentReader(lm.Language(shared.read.model), shared.read, segment, layers, heads))


def longformer(shared: Shared, window: int = 256) -> SetModel:
    """A Longformer made from the same BERT, on the whole document."""
    return shared.read_in_order(lm.WholeReader(lm.Longformer(shared.read.model, window), shared.read))


_PARTS: dict[str, Builder] = {"deepsets": deepsets, "sse": sse, "umbc+bert": umbc_bert}
_PARTS |= {"umbc+anchors+bert": umbc_anchors_bert, "tobert": tobert, "longformer": longformer}
MODELS = variants(document_model, _PARTS)
