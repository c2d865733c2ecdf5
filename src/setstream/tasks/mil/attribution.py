"""Which elements of a bag a trained model looks at, and which way they count.

    attention    a_j, the mean over slots and heads of its weight         how much it counts; sums to one over the bag
    alone        y({x_j}), the bag logit of a bag that holds x_j only     which way it counts
    evidence     a_j σ(y({x_j}))                                          both; without attention, σ(y({x_j}))
    instance     w·φ_j + b                                                the instance stream's logit, where there is one

Attention takes two passes in constant memory: one for the state of the whole bag, one in which the weights of each chunk are
divided by the state's normaliser. Models that need their whole bag (ab-mil, ds-mil) keep the features of all elements, not
the elements.

Where weights sum to one over the bag, all slots of a bag {x_j} are equal: V φ_j. Attention over K equal slots gives what it
gives for one, so a Set Transformer behind the pool reads one slot for each element, and `alone` costs little more than φ.

Attention alone also falls on what speaks against the label, and gradients of the logit are no substitute: once a model is sure,
its head is saturated and they are noise.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass

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

#: By name, as they are written.
SCORES = ("evidence", "alone", "attention", "instance")
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


def element_scores(model: SetModel, source: SetSource, chunk_size: int = 1024, scores: Collection[str] | None = None) -> Scores:
    """The logits of a bag and the scores of its elements, in the order of the source.

    scores: which ones are computed; all that the model has unless given.
    """
    encoder = model.encoder
    pool = encoder.pool
    device = encoder.device or torch.device("cpu")
    with evaluating(model):
        if pool.consistent:
            state = encoder.empty(1)
            for chunk in source.chunks(chunk_size):
                state = encoder.update(state, chunk.to(device)[None])
            logits = model.finalize(state)
            rules = _chosen(_rules(model, _streamed_attention(pool, state)), scores)
            pieces = (encoder.features(chunk.to(device)) for chunk in source.chunks(chunk_size))
            return Scores(logits[0].cpu(), _filled(rules, pieces, len(source)))
        if not len(source):
            raise DataError(f"{source.id or 'this bag'} has no elements, and the model has no answer for that")
        whole = torch.cat([encoder.features(chunk.to(device)) for chunk in source.chunks(chunk_size)])
        logits = model.head(pool(whole[None]))
        rules = _chosen(_rules(model, _whole_attention(pool)), scores)
        return Scores(logits[0].cpu(), _filled(rules, iter([whole]), len(whole)))


def _filled(rules: dict[str, Rule], pieces: Iterator[Tensor], count: int) -> dict[str, Tensor]:
    """The scores of all elements, written in place: nothing of a chunk is kept."""
    found = {name: torch.empty(count) for name in SCORES if name in rules}
    start = 0
    for features in pieces:
        stop = start + len(features)
        known: dict[str, Tensor] = {}
        for name, rule in rules.items():
            known[name] = rule(features, known)
            found[name] = found[name].to(known[name].dtype)  # float64 models have scores of that type
            found[name][start:stop] = known[name]
        start = stop
    return found


# Features (n, in_dim) to weights (n,).
Weigh = Callable[[Tensor], Tensor]


# Features (n, in_dim), and the scores that are computed before it, to one score (n,).
Rule = Callable[[Tensor, dict[str, Tensor]], Tensor]


def _rules(model: SetModel, weigh: Weigh | None) -> dict[str, Rule]:
    """How each score that a model has is computed. Those that others are made of come first."""
    pool = model.encoder.pool
    alone = _alone(model)
    rules: dict[str, Rule] = {"alone": lambda features, _: alone(features)}
    if weigh is not None:
        rules["attention"] = lambda features, _: weigh(features)
    rules["evidence"] = lambda _, known: known["alone"].sigmoid() * known.get("attention", 1.0)
    stream = pool.pools["instance"] if isinstance(pool, Parallel) and "instance" in pool.pools else None
    if isinstance(stream, Projected):
        rules["instance"] = lambda features, _: stream.module(features)[:, 0]
    return rules


def _chosen(rules: dict[str, Rule], scores: Collection[str] | None) -> dict[str, Rule]:
    """The scores that are asked for, and those that they are made of."""
    missing = [name for name in scores or () if name not in rules]
    if missing:
        raise ConfigurationError(
            f"this model has no {missing[0]!r} scores; it has {', '.join(name for name in SCORES if name in rules)}"
        )
    wanted = set(rules if scores is None else scores)
    wanted |= {"alone", "attention"} if "evidence" in wanted else set()
    return {name: rule for name, rule in rules.items() if name in wanted}


def _alone(model: SetModel) -> Weigh:
    """The bag logit of each element as a bag of its own."""
    pool, head = model.encoder.pool, model.head
    bag = _bag_pool(pool)
    if isinstance(bag, UMBC) and _equal_slots(bag) and isinstance(head, BagHead) and _ignores_repeats(head.decoder):
        return lambda features: head.decoder(bag.norm(bag.value(features)).unsqueeze(1))[:, -1]
    return lambda features: torch.cat([model.head(pool(own.unsqueeze(1)))[:, -1] for own in features.split(SINGLES)])


def _equal_slots(pool: UMBC) -> bool:
    """Whether all slots of a bag with one element hold its value."""
    return type(pool) is UMBC and pool.activation.normalise and not pool.slot_residual


def _ignores_repeats(decoder: nn.Module) -> bool:
    """Whether nothing but attention mixes the slots, up to the seeds that read them: equal slots count as one then."""
    for module in decoder if isinstance(decoder, nn.Sequential) else ():
        if isinstance(module, PMA):
            return True
        if not isinstance(module, SAB | nn.Dropout):
            return False
    return False


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
