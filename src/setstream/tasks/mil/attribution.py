"""Which elements of a bag a trained model attends to, and in which direction they count.

    attention    a_j, the mean over slots and heads of its weight         how much x_j counts; sums to one over the bag
    attention-k  the weight in branch k, where attention has several      the same, of that branch (in clam-mb, of a class)
    alone        y({x_j}), the bag logit of a bag that holds x_j only     in which direction
    evidence     a_j σ(y({x_j}))                                          both; without attention, σ(y({x_j}))
    instance     w·φ_j + b                                                the instance stream's logit, where there is one

Gated attention takes one pass: its logits, one number per element and branch, are kept until all are known. Other attention
takes two passes in constant memory: one for the state of the whole bag, one that divides the weights of each chunk by the
state's normaliser. A model of several passes, like ds-mil, takes one more than it has, and its last pass is shown. Models that
need their whole bag keep all its features. With several classes, `alone` is the log-odds of the last one,
l_C - log Σ_(c<C) e^(l_c), whose sigmoid is its probability.
If weights sum to one over the bag, all slots of a bag {x_j} are equal: V φ_j. Attention over K equal slots is the same as over
one, so a Set Transformer after the pool reads one slot per element, and `alone` costs little more than φ. With gated attention
a bag {x_j} is φ_j itself.
"""

from collections.abc import Callable, Collection, Iterator
from itertools import dropwhile
from typing import NamedTuple

import torch
from torch import Tensor, nn

from setstream.errors import ConfigurationError, DataError
from setstream.models.model import SetModel
from setstream.models.stream import evaluating
from setstream.nn import PMA, SAB
from setstream.pools import DSMIL, UMBC, GatedAttention, HierarchicalSSE, MultiPass, Parallel, Projected
from setstream.pools.base import parameter_dtype
from setstream.sets.layout import pack
from setstream.sets.source import SetSource
from setstream.tasks.mil.models import BagHead

SCORES = ("evidence", "alone", "attention", "instance")
Weigh = Callable[[Tensor], Tensor]  #: features (n, in_dim) to one number (n,) for each
SINGLES = 64  #: bags of one element per call of the head: each is as large as the slots of a whole bag


class Scores(NamedTuple):
    """The logits (S,) of one bag, of its streams or its classes, and the scores (N,) of its elements by name."""

    logits: Tensor
    elements: dict[str, Tensor]
    classes: bool = False

    @property
    def probability(self) -> float:
        """The bag's probability: the mean over the streams; of several classes, that of the last."""
        return float(self.logits.softmax(0)[-1] if self.classes else self.logits.sigmoid().mean())


def element_scores(model: SetModel, source: SetSource, chunk_size: int = 1024, scores: Collection[str] | None = None) -> Scores:
    """The logits of a bag, and the scores of its elements in the order of the source; `scores`: some of `SCORES`, or all."""
    encoder, pool = model.encoder, model.encoder.pool
    streams = dict(pool.pools.items()) if isinstance(pool, Parallel) else {}
    bag, instance = streams.get("bag", pool), streams.get("instance")
    device = encoder.device or torch.device("cpu")
    rules: dict[str, Weigh] = {"alone": _alone(model, bag)}
    if isinstance(instance, Projected):
        rules["instance"] = lambda features: instance.module(features)[:, 0]
    elif isinstance(pool, DSMIL):
        rules["instance"] = lambda features: pool.score(features)[:, 0]
    attentive = _attentive(bag) if pool.consistent else None
    gated = attentive if isinstance(attentive, GatedAttention) else None
    branches = [f"attention-{k}" for k in range(gated.branches if gated is not None and gated.branches > 1 else 0)]
    has = rules.keys() | ({"attention"} if attentive is not None else set())
    known = [*(name for name in SCORES if name in has or name == "evidence"), *branches]
    if missing := [name for name in scores or () if name not in known]:
        raise ConfigurationError(f"this model has no {missing[0]!r} scores; it has {', '.join(known)}")
    chosen = set(known if scores is None else scores)
    needed = chosen | ({"alone", "attention"} if "evidence" in chosen else set())
    # Where results are written; small tensors, kept between large ones that are freed, would fragment the memory.
    nothing = torch.empty(0, dtype=torch.promote_types(parameter_dtype(model) or torch.float32, torch.float32))
    elements = {name: nothing.new_empty(len(source)) for name in rules if name in needed}
    weights = nothing.new_empty(0 if gated is None else gated.branches, len(source))  # first as logits
    attends = attentive is not None and bool(needed & {"attention", *branches})
    logits_of_bag = "logits" if bag is pool else "bag/logits"

    def collect(features: Tensor, start: int) -> None:
        place = slice(start, start + len(features))
        for name, values in elements.items():
            values[place] = rules[name](features)

    def chunks() -> Iterator[tuple[int, Tensor, Tensor]]:
        start = 0
        for chunk in source.chunks(chunk_size):
            chunk = chunk.to(device)
            yield start, chunk, encoder.features(chunk)
            start += len(chunk)

    with evaluating(model):
        if pool.consistent:
            state = encoder.empty(1)
            for number in range(encoder.passes):
                state = encoder.next_pass(state) if number else state
                context = pool.prepare(state)
                for start, chunk, features in chunks():
                    if gated is not None and attends:  # once for the state and the scores
                        context[logits_of_bag] = gated.logits(features[None])
                        weights[:, start : start + len(features)] = context[logits_of_bag][0]
                    state = state + encoder.absorb(state, context, pack(chunk[None]), features)
                    context.pop(logits_of_bag, None)
                    if number == 0:
                        collect(features, start)
            logits = model.finalize(state)
        elif not len(source):
            raise DataError(f"{source.id or 'this bag'} has no elements, and this model needs at least one")
        else:
            whole = torch.cat([features for _, _, features in chunks()])
            logits = model.head(pool(whole[None]))
            collect(whole, 0)
        if gated is not None and attends:
            weights = weights.softmax(1)
            elements |= {"attention": weights.mean(0)} | dict(zip(branches, weights, strict=False))
        elif attentive is not None and attends:
            own = state if bag is pool else state.select("bag")
            elements["attention"] = nothing.new_empty(len(source))
            for start, _, features in chunks():
                own_weights = attentive.attention(features[None], own)[0].mean((0, 1))
                elements["attention"][start : start + len(features)] = own_weights
        if "evidence" in chosen:
            elements["evidence"] = elements["alone"].sigmoid() * elements.get("attention", 1.0)
        ordered = {name: elements[name] for name in known if name in needed}
        return Scores(logits[0].cpu(), ordered, not streams and not isinstance(pool, DSMIL) and logits.shape[1] > 1)


def _log_odds(logits: Tensor, classes: bool) -> Tensor:
    """The last logit (n,) of (n, S); if they are those of classes, against all others."""
    return logits[:, -1] - logits[:, :-1].logsumexp(1) if classes and logits.shape[1] > 1 else logits[:, -1]


def _alone(model: SetModel, bag: nn.Module) -> Weigh:
    """The bag logit of each element as a bag with one element; `bag` is the pool of the bag stream."""
    pool, head = model.encoder.pool, model.head
    classes = bag is pool and not isinstance(pool, DSMIL)
    decoder = head.decoder if isinstance(head, BagHead) else None
    if isinstance(bag, GatedAttention) and decoder is not None:
        return lambda features: _log_odds(decoder(features.unsqueeze(1).expand(-1, bag.branches, -1)), classes)
    # If all slots of such a bag are equal, and only attention mixes them up to the seeds that read them, they count as one.
    blocks = decoder if isinstance(decoder, nn.Sequential) else nn.Sequential()
    reader = next(dropwhile(lambda block: isinstance(block, SAB | nn.Dropout), blocks), None)
    equal_slots = type(bag) is UMBC and bag.activation.normalise and not bag.slot_residual
    if isinstance(bag, UMBC) and equal_slots and isinstance(reader, PMA):
        return lambda features: _log_odds(blocks(bag.norm(bag.value(features)).unsqueeze(1)), classes)
    return lambda features: torch.cat([_log_odds(head(pool(rows[:, None])), classes) for rows in features.split(SINGLES)])


def _attentive(bag: nn.Module) -> UMBC | GatedAttention | MultiPass | None:
    """The pool whose weights are the attention; None if there is none, or all weights are equal."""
    if isinstance(bag, MultiPass) and not isinstance(bag, DSMIL):
        return None if _attentive(bag.pool(bag.passes)) is None else bag
    first = bag.first if isinstance(bag, HierarchicalSSE) else bag
    if isinstance(first, UMBC) and first.activation.name.startswith("slot-") and not first.activation.normalise:
        return None  # the weights of each element sum to one over the slots
    return first if isinstance(first, UMBC | GatedAttention | DSMIL) else None
