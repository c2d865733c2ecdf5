"""Which elements of a bag a trained model looks at, and which way they count.

    attention    a_j, the mean over slots and heads of its weight         how much it counts; sums to one over the bag
    alone        y({x_j}), the bag logit of a bag that holds x_j only     which way it counts
    evidence     a_j σ(y({x_j}))                                          both; without attention, σ(y({x_j}))
    instance     w·φ_j + b                                                the instance stream's logit, where there is one

Attention takes two passes in constant memory: one for the state of the whole bag, one in which the weights of each chunk are
divided by the state's normaliser. Models that need their whole bag (ab-mil, ds-mil) keep the features of all elements, not
the elements.

Attention alone also falls on what speaks against the label, and gradients of the logit are no substitute: once a model is sure,
its head is saturated and they are noise.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from setstream.errors import DataError
from setstream.model import SetModel
from setstream.nn import GatedAttention
from setstream.pool import Pool
from setstream.pools import UMBC, ChunkMean, HierarchicalSSE, Parallel, Projected
from setstream.sets.source import SetSource
from setstream.state import State
from setstream.stream import evaluating
from setstream.tasks.mil.models import BothStreams

#: Bags of one element that go through the head at a time: each is as large as the slots of a whole bag.
SINGLES = 64


@dataclass(frozen=True)
class Scores:
    """What a model makes of one bag: its logits (S,), and for each element the scores that the model has, (N,) by name."""

    logits: Tensor
    elements: dict[str, Tensor]

    @property
    def probability(self) -> float:
        """Of the bag: the mean over the streams."""
        return float(self.logits.sigmoid().mean())


def element_scores(model: SetModel, source: SetSource, chunk_size: int = 1024) -> Scores:
    """The logits of a bag and the scores of its elements, in the order of the source."""
    encoder = model.encoder
    pool = encoder.pool
    device = encoder.home() or torch.device("cpu")
    with evaluating(model):
        if pool.consistent:
            state = encoder.empty(1)
            for chunk in source.chunks(chunk_size):
                state = encoder.update(state, chunk.to(device)[None])
            logits = model.finalize(state)
            pieces = (encoder.features(chunk.to(device)) for chunk in source.chunks(chunk_size))
            found = [_scores(model, features, _streamed_attention(pool, state)) for features in pieces]
        else:
            if not len(source):
                raise DataError(f"{source.id or 'this bag'} has no elements, and the model has no answer for that")
            whole = torch.cat([encoder.features(chunk.to(device)) for chunk in source.chunks(chunk_size)])
            logits = model.head(pool(whole[None]))
            found = [_scores(model, whole, _whole_attention(pool))]
        if not found:
            found = [_scores(model, encoder.features(source.read(0, 0).to(device)), _streamed_attention(pool, state))]
    return Scores(logits[0].cpu(), {name: torch.cat([own[name] for own in found]).cpu() for name in found[0]})


# Features (n, in_dim) to weights (n,).
Weigh = Callable[[Tensor], Tensor]


def _scores(model: SetModel, features: Tensor, weigh: Weigh | None) -> dict[str, Tensor]:
    """All scores of some elements, from their features."""
    pool = model.encoder.pool
    singles = [model.head(pool(own.unsqueeze(1)))[:, -1] for own in features.split(SINGLES) if len(own)]
    alone = torch.cat(singles) if singles else features.new_empty(0)
    scores = {"evidence": alone.sigmoid(), "alone": alone}
    if weigh is not None:
        scores["attention"] = weigh(features)
        scores["evidence"] = scores["attention"] * scores["evidence"]
    stream = pool.pools["instance"] if isinstance(pool, Parallel) and "instance" in pool.pools else None
    if isinstance(stream, Projected):
        scores["instance"] = stream.module(features)[:, 0]
    return scores


def _bag_pool(pool: Pool) -> Pool:
    """The pool of the bag stream."""
    inner = pool.pools["bag"] if isinstance(pool, Parallel) and "bag" in pool.pools else pool
    assert isinstance(inner, Pool)
    return inner


def _streamed_attention(pool: Pool, state: State) -> Weigh | None:
    """Mean weights over heads and slots; None where a model has none, or the same for every element."""
    bag = _bag_pool(pool)
    first = bag.first if isinstance(bag, HierarchicalSSE) else bag
    if not isinstance(first, UMBC):
        return None
    if first.activation.name.startswith("slot-") and not first.activation.normalise:
        return None  # each element shares out one unit of attention over the slots
    own = state if bag is pool else state.select("bag")
    return lambda features: first.attention(features[None], own)[0].mean((0, 1))


def _whole_attention(pool: Pool) -> Weigh | None:
    bag = _bag_pool(pool)
    module = bag.module if isinstance(bag, ChunkMean) else None
    if isinstance(module, BothStreams):
        return lambda features: module.dsmil.streams(features[None])[2][0].mean(-1)
    if isinstance(module, GatedAttention):
        return lambda features: module(features[None], return_attention=True)[1][0]
    return None
