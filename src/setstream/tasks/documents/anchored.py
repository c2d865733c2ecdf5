"""`umbc+anchors+bert`: slots that are initialised as clusters of words; each attends to the words of a document in its cluster.

    φ(w)  = LN(v_w)                                     v the table of words
    a_k   = direction of Σ_{w in cluster k} (φ(w) - mean φ)        clusters: spherical k-means over the vocabulary
    l_kn  = s ⟨a_k, φ(w_n)⟩ / √d,   z_k = LN(Σ_n softmax_n(l_k) φ(w_n))        UMBC, one head, before anything is learned

So each slot is a mean of similar words, near the word vectors that the pretrained BERT after it was trained on: a document of
any length becomes K words. Anchors, projections and word vectors are learned.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from setstream.nn.mlp import begin_near
from setstream.pools import UMBC

# s: a word whose vector is at 60° to an anchor has e^{s/2} times the weight of one at 90°.
SHARPNESS = 10.0
ROUNDS = 5


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


@torch.no_grad()
def word_slots(words: Tensor, num_slots: int, activation: str = "softmax") -> UMBC:
    """The pool over normalised vectors of these words, (B, N, width) to (B, num_slots, width)."""
    width = words.shape[1]
    pool = UMBC(width, num_slots, activation=activation, slot_norm=False, norm_after=True)
    pool.slots.mean.copy_(word_clusters(words, num_slots))
    begin_near(pool.query, pool.key, torch.tensor([SHARPNESS / width**0.5]), width)
    pool.value.weight.copy_(torch.eye(width))
    nn.init.zeros_(pool.value.bias)
    return pool
