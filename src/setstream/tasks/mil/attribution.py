"""Which elements of a bag a trained model attends to, and in which direction they count.

    attention    a_j, the mean over slots and heads of its weight         how much x_j counts; sums to one over the bag
    alone        y({x_j}), the bag logit of a bag that holds x_j only     in which direction
    evidence     a_j σ(y({x_j}))                                          both; without attention, σ(y({x_j}))
    instance     w·φ_j + b                                                the instance stream's logit, where there is one

Attention takes two passes in constant memory: one for the state of the whole bag, one that divides the weights of each chunk by
the state's normaliser. For models that need their whole bag (ab-mil, ds-mil), the features of all elements are kept in memory.

If weights sum to one over the bag, all slots of a bag {x_j} are equal: V φ_j. Attention over K equal slots is the same as over
one, so a Set Transformer after the pool reads one slot per element, and `alone` costs little more than φ.

Attention is also high on elements that count against the label. Gradients of the logit are no substitute: the head of a
confident model is saturated, and its gradients are noise.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn

from setstream.errors import ConfigurationError, DataError
from setstream.models.model import SetModel
from setstream.models.stream import evaluating
from setstream.nn import PMA, SAB, GatedAttention
from setstream.pools import UMBC, ChunkMean, HierarchicalSSE, Parallel, Projected
from setstream.pools.base import Pool
from setstream.sets.source import SetSource
from setstream.states.state import State
from setstream.tasks.mil.models import BagHead, BothStreams

#: The names of the scores.
SCORES = ("evidence", "alone", "attention", "instance")
#: Features (n, in_dim) to one number (n,) for each.
Weigh = Callable[[Tensor], Tensor]
#: Bags of one element per call of the head: each is as large as the slots of a whole bag.
SINGLES = 64


@dataclass(frozen=True)
class Scores:
    """The logits (S,) of one bag, and the scores (N,) of its elements by name."""

    logits: Tensor
    elements: dict[str, Tensor]

    @property
    def probability(self) -> float:
        """The bag's probability: the mean over the streams."""
        return float(self.logits.sigmoid().mean())


def element_scores(model: SetModel, source: SetSource, chunk_size: int = 1024, scores: Collection[str] | None = None) -> Scores:
    """The logits of a bag and the scores of its elements, in the order of the source.

    Args:
        model: a trained bag classifier.
        source: the bag.
        chunk_size: elements per chunk.
        scores: the names of the scores to compute (see `SCORES`); all that the model has by default.
    """
    encoder, pool = model.encoder, model.encoder.pool
    device = encoder.device or torch.device("cpu")
    with evaluating(model):
        pieces = (encoder.features(chunk.to(device)) for chunk in source.chunks(chunk_size))
        if pool.consistent:
            state = encoder.empty(1)
            for chunk in source.chunks(chunk_size):
                state = encoder.update(state, chunk.to(device)[None])
            logits, attention = model.finalize(state), _streamed_attention(pool, state)
        elif not len(source):
            raise DataError(f"{source.id or 'this bag'} has no elements, and this model needs at least one")
        else:
            whole = torch.cat(list(pieces))
            logits, attention, pieces = model.head(pool(whole[None])), _whole_attention(pool), (rows for rows in [whole])
        rules = {"alone": _alone(model)} | ({} if attention is None else {"attention": attention})
        stream = pool.pools["instance"] if isinstance(pool, Parallel) and "instance" in pool.pools else None
        if isinstance(stream, Projected):
            rules["instance"] = lambda features: stream.module(features)[:, 0]
        known = [name for name in SCORES if name in rules or name == "evidence"]
        missing = [name for name in scores or () if name not in known]
        if missing:
            raise ConfigurationError(f"this model has no {missing[0]!r} scores; it has {', '.join(known)}")
        wanted = set(known if scores is None else scores)
        wanted |= {"alone", "attention"} if "evidence" in wanted else set()
        parts: dict[str, list[Tensor]] = {name: [torch.empty(0)] for name in known if name in wanted}
        for features in pieces:
            values = {name: rule(features) for name, rule in rules.items() if name in wanted}
            if "evidence" in wanted:
                values["evidence"] = values["alone"].sigmoid() * values.get("attention", 1.0)
            for name, value in values.items():
                parts[name].append(value.cpu())
        return Scores(logits[0].cpu(), {name: torch.cat(values) for name, values in parts.items()})


def _alone(model: SetModel) -> Weigh:
    """The bag logit of each element as a bag with one element."""
    pool, head = model.encoder.pool, model.head
    bag = _bag_pool(pool)
    # Whether all slots of a bag with one element hold its value, and the head counts equal slots as one.
    equal_slots = type(bag) is UMBC and bag.activation.normalise and not bag.slot_residual
    if isinstance(bag, UMBC) and equal_slots and isinstance(head, BagHead) and _ignores_repeats(head.decoder):
        return lambda features: head.decoder(bag.norm(bag.value(features)).unsqueeze(1))[:, -1]
    return lambda features: torch.cat([model.head(pool(rows.unsqueeze(1)))[:, -1] for rows in features.split(SINGLES)])


def _ignores_repeats(decoder: nn.Module) -> bool:
    """Whether only attention mixes the slots, up to the seeds that read them: equal slots then count as one."""
    for module in decoder if isinstance(decoder, nn.Sequential) else ():
        if isinstance(module, PMA):
            return True
        if not isinstance(module, SAB | nn.Dropout):
            return False
    return False


def _bag_pool(pool: Pool) -> Pool:
    """The pool of the bag stream."""
    return cast(Pool, pool.pools["bag"]) if isinstance(pool, Parallel) and "bag" in pool.pools else pool


def _streamed_attention(pool: Pool, state: State) -> Weigh | None:
    """Mean weights over heads and slots; None if the model has none, or equal ones for all elements."""
    bag = _bag_pool(pool)
    first = bag.first if isinstance(bag, HierarchicalSSE) else bag
    if not isinstance(first, UMBC):
        return None
    if first.activation.name.startswith("slot-") and not first.activation.normalise:
        return None  # the weights of each element sum to one over the slots
    bag_state = state if bag is pool else state.select("bag")
    return lambda features: first.attention(features[None], bag_state)[0].mean((0, 1))


def _whole_attention(pool: Pool) -> Weigh | None:
    bag = _bag_pool(pool)
    module = bag.module if isinstance(bag, ChunkMean) else None
    if isinstance(module, BothStreams):
        return lambda features: module.dsmil.streams(features[None])[2][0].mean(-1)
    if isinstance(module, GatedAttention):
        return lambda features: module(features[None], return_attention=True)[1][0]
    return None
