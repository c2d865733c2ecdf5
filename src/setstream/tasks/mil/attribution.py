"""Which elements of a bag a trained model looks at.

    attention    a_j = mean over slots and heads of the weight of element j         sums to one over the bag
    instance     w·φ_j + b                                                          the instance stream's logit of element j

Attention takes two passes in constant memory: one for the state of the whole bag, one in which the weights of each chunk are
divided by the state's normaliser. Models that need their whole bag (ab-mil, ds-mil) keep the features of all elements, not
the elements.

Gradients of the bag's logit are no substitute: once a model is sure, its head is saturated and they are noise. On planted
lesions, attention and instance logits found them; gradient times feature did not.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from setstream.data.source import SetSource
from setstream.errors import MismatchError
from setstream.model import SetModel
from setstream.nn import GatedAttention
from setstream.pool import Pool
from setstream.pools import SSE, UMBC, ChunkMean, Parallel, Projected
from setstream.state import State
from setstream.stream import evaluating
from setstream.tasks.mil.models import BothStreams


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
    bag = pool.pools["bag"] if isinstance(pool, Parallel) and "bag" in pool.pools else pool
    assert isinstance(bag, Pool)
    _check(bag)
    device = encoder.home() or torch.device("cpu")
    found: dict[str, list[Tensor]] = {}
    with evaluating(model):
        if isinstance(bag, ChunkMean):
            features = [encoder.features(chunk.to(device)) for chunk in source.chunks(chunk_size)]
            whole = torch.cat(features) if features else encoder.features(source.read(0, 0).to(device))
            logits = model.head(pool(whole[None]))[0]
            found = {"attention": [_whole_attention(bag, whole)]} | _instance(pool, whole)
        else:
            state = encoder.empty(1)
            for chunk in source.chunks(chunk_size):
                state = encoder.update(state, chunk.to(device)[None])
            logits = model.finalize(state)[0]
            for chunk in source.chunks(chunk_size):
                features_of = encoder.features(chunk.to(device))
                found.setdefault("attention", []).append(_attention(pool, bag, features_of, state))
                for name, values in _instance(pool, features_of).items():
                    found.setdefault(name, []).extend(values)
    nothing = {"attention": [torch.empty(0)]} | ({"instance": [torch.empty(0)]} if _instances(pool) else {})
    return Scores(logits.cpu(), {name: torch.cat(values).cpu() for name, values in (nothing | found).items()})


def _attention(pool: Pool, bag: Pool, features: Tensor, state: State) -> Tensor:
    """(n,): the mean over heads and slots."""
    own = state if bag is pool else state.select("bag")
    weights: Tensor = bag.attention(features[None], own)  # type: ignore[operator]
    return weights[0].mean((0, 1))


def _whole_attention(bag: ChunkMean, features: Tensor) -> Tensor:
    if isinstance(bag.module, BothStreams):
        return bag.module.dsmil.streams(features[None])[2][0].mean(-1)
    weights: Tensor = bag.module(features[None], return_attention=True)[1]
    return weights[0]


def _instances(pool: Pool) -> Projected | None:
    stream = pool.pools["instance"] if isinstance(pool, Parallel) and "instance" in pool.pools else None
    return stream if isinstance(stream, Projected) else None


def _instance(pool: Pool, features: Tensor) -> dict[str, list[Tensor]]:
    stream = _instances(pool)
    return {} if stream is None else {"instance": [stream.module(features)[:, 0]]}


def _check(bag: Any) -> None:
    if isinstance(bag, ChunkMean) and isinstance(bag.module, GatedAttention | BothStreams):
        return
    first = bag.first if isinstance(bag, SSE) else bag
    if not isinstance(first, UMBC):
        raise MismatchError(f"{type(bag).__name__} has no attention to show: use umbc, ab-mil or ds-mil")
    if first.activation.name.startswith("slot-") and not first.activation.normalise:
        raise MismatchError(
            f"{first.activation.name} shares out one unit of attention for every element over the slots, so all elements get "
            "the same: there is nothing to show. Use softmax, or normalise=True"
        )
