"""Which elements of a bag a trained model attends to, and in which direction they count.

    attention    a_j, the mean over slots and heads of its weight         how much x_j counts; sums to one over the bag
    alone        y({x_j}), the bag logit of a bag that holds x_j only     in which direction
    evidence     a_j σ(y({x_j}))                                          both; without attention, σ(y({x_j}))
    instance     w·φ_j + b                                                the instance stream's logit, where there is one

Attention takes two passes in constant memory: one for the state of the whole bag, one that divides the weights of each chunk by
the state's normaliser; for ds-mil, whose state takes two passes, three. Models that need their whole bag keep all its features.
If weights sum to one over the bag, all slots of a bag {x_j} are equal: V φ_j. Attention over K equal slots is the same as over
one, so a Set Transformer after the pool reads one slot per element, and `alone` costs little more than φ.
"""

from collections.abc import Callable, Collection
from itertools import dropwhile
from typing import NamedTuple

import torch
from torch import Tensor, nn

from setstream.errors import ConfigurationError, DataError
from setstream.models.model import SetModel
from setstream.models.stream import evaluating
from setstream.nn import PMA, SAB
from setstream.pools import DSMIL, UMBC, GatedAttention, HierarchicalSSE, Parallel, Projected
from setstream.sets.source import SetSource
from setstream.states.state import State
from setstream.tasks.mil.models import BagHead

SCORES = ("evidence", "alone", "attention", "instance")
Weigh = Callable[[Tensor], Tensor]  #: features (n, in_dim) to one number (n,) for each
SINGLES = 64  #: bags of one element per call of the head: each is as large as the slots of a whole bag


class Scores(NamedTuple):
    """The logits (S,) of one bag, and the scores (N,) of its elements by name."""

    logits: Tensor
    elements: dict[str, Tensor]

    @property
    def probability(self) -> float:
        """The bag's probability: the mean over the streams."""
        return float(self.logits.sigmoid().mean())


def element_scores(model: SetModel, source: SetSource, chunk_size: int = 1024, scores: Collection[str] | None = None) -> Scores:
    """The logits of a bag, and the scores of its elements in the order of the source; `scores`: some of `SCORES`, or all."""
    encoder, pool = model.encoder, model.encoder.pool
    streams = dict(pool.pools.items()) if isinstance(pool, Parallel) else {}
    bag, instance = streams.get("bag", pool), streams.get("instance")
    device = encoder.device or torch.device("cpu")
    with evaluating(model):
        pieces = (encoder.features(chunk.to(device)) for chunk in source.chunks(chunk_size))
        if pool.consistent:
            state = encoder.empty(1)
            for number in range(encoder.passes):
                state = encoder.next_pass(state) if number else state
                for chunk in source.chunks(chunk_size):
                    state = encoder.update(state, chunk.to(device)[None])
            logits, attention = model.finalize(state), _attention(bag, state if bag is pool else state.select("bag"))
        elif not len(source):
            raise DataError(f"{source.id or 'this bag'} has no elements, and this model needs at least one")
        else:
            whole = torch.cat(list(pieces))
            logits, attention, pieces = model.head(pool(whole[None])), _attention(bag, None), (rows for rows in [whole])
        rules = {"alone": _alone(model, bag)} | ({} if attention is None else {"attention": attention})
        if isinstance(instance, Projected):
            rules["instance"] = lambda features: instance.module(features)[:, 0]
        elif isinstance(pool, DSMIL):
            rules["instance"] = lambda features: pool.score(features)[:, 0]
        known = [name for name in SCORES if name in rules or name == "evidence"]
        if missing := [name for name in scores or () if name not in known]:
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


def _alone(model: SetModel, bag: nn.Module) -> Weigh:
    """The bag logit of each element as a bag with one element; `bag` is the pool of the bag stream."""
    pool, head = model.encoder.pool, model.head
    # If all slots of such a bag are equal, and only attention mixes them up to the seeds that read them, they count as one.
    blocks = head.decoder if isinstance(head, BagHead) and isinstance(head.decoder, nn.Sequential) else nn.Sequential()
    reader = next(dropwhile(lambda block: isinstance(block, SAB | nn.Dropout), blocks), None)
    equal_slots = type(bag) is UMBC and bag.activation.normalise and not bag.slot_residual
    if isinstance(bag, UMBC) and equal_slots and isinstance(reader, PMA):
        return lambda features: blocks(bag.norm(bag.value(features)).unsqueeze(1))[:, -1]
    return lambda features: torch.cat([head(pool(rows.unsqueeze(1)))[:, -1] for rows in features.split(SINGLES)])


def _attention(bag: nn.Module, state: State | None) -> Weigh | None:
    """Mean weights over heads and slots, given the state of a consistent pool; None if there are none, or all are equal."""
    first = bag.first if isinstance(bag, HierarchicalSSE) else bag
    if state is None or not isinstance(first, UMBC | GatedAttention | DSMIL):
        return None
    if isinstance(first, UMBC) and first.activation.name.startswith("slot-") and not first.activation.normalise:
        return None  # the weights of each element sum to one over the slots
    return lambda features: first.attention(features[None], state)[0].mean((0, 1))
