"""What an answer consists of, and which columns matter::

    y = Σ_s trust_s rows_s + offset                 streams: the terms of this sum, one per branch of the network
    y({x_1, ..., x_N}) - y(without x_i)             elements: each left out, by merging the states of all others

y: numbers in the units of the targets; of classes, log-probabilities less their mean over the classes, so that the difference
of two columns is a change of the log-odds. States before and after each element are merged in log N steps of all elements.
"""

from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from sklearn.metrics import check_scoring
from sklearn.utils import Bunch, check_random_state
from torch import Tensor

from setstream.errors import ShapeError
from setstream.integrations.sklearn.network import EnsembleHead, EnsembleNumbers
from setstream.integrations.sklearn.sets import Sources, read_sets
from setstream.models.model import SetModel
from setstream.models.stream import evaluating
from setstream.sets.source import ArraySource
from setstream.states.state import State

STREAMS = ("linear", "statistics", "elements", "set")


@dataclass(frozen=True)
class Explanation:
    """What each branch and each element added to the answer for one set; columns are classes, or outputs."""

    answer: np.ndarray  #: (outputs,)
    offset: np.ndarray  #: (outputs,), of every set: answer = offset + the sum of `streams`
    streams: dict[str, np.ndarray]  #: (outputs,) of each branch
    elements: np.ndarray  #: (N, outputs): the answer less that without the element


def explain(model: SetModel, one: Tensor) -> Explanation:
    """Explain a network's answer for one set (N, d)."""
    head, encoder = cast(EnsembleHead, model.head), model.encoder

    def parts(z: Any) -> tuple[Tensor, Tensor]:
        """The terms (B, S, outputs) and the offset."""
        terms, offset = head.streams(z).double() * head.trust.double().unsqueeze(-1), head.offset.double()
        if isinstance(head, EnsembleNumbers):
            return terms * head.scale, offset * head.scale + head.mean
        return terms - terms.mean(-1, keepdim=True), offset - offset.mean()

    with evaluating(model):
        terms, offset = parts(encoder([one]))
        answer = terms[0].sum(0) + offset
        rest = parts(encoder.finalize(without_each(model, one)))[0].sum(1) + offset if len(one) else terms[:0, 0]
    names = STREAMS if terms.shape[1] == len(STREAMS) else tuple(name for name in STREAMS if name != "elements")
    streams = {name: term.cpu().numpy() for name, term in zip(names, terms[0], strict=True)}
    return Explanation(answer.cpu().numpy(), offset.cpu().numpy(), streams, (answer - rest).cpu().numpy())


def without_each(model: SetModel, one: Tensor) -> State:
    """The states of the set without its first element, without its second, ...: (N sets)."""
    encoder, size = model.encoder, len(one)
    ones = encoder.update(None, one.unsqueeze(1))
    back = list(range(size - 1, -1, -1))
    nothing = encoder.empty(1)
    before = State.cat([nothing, _running(ones)])[:size]
    after = State.cat([nothing, _running(ones[back])])[:size][back]
    return before + after


def _running(states: State) -> State:
    """The sums of the first, of the first two, ...: each step doubles how many are summed."""
    step = 1
    while step < len(states):
        states = State.cat([states[:step], states[step:] + states[:-step]])
        step *= 2
    return states


def permutation_importance(
    estimator: Any, X: Any, y: Any, *, scoring: Any = None, n_repeats: int = 5, random_state: Any = None
) -> Bunch:
    """How much the score falls if a column is shuffled over all elements of all sets, as in scikit-learn.

    Returns:
        `importances` (columns, n_repeats), `importances_mean`, `importances_std`, and `names` of the columns.
    """
    sets, score = read_sets(estimator, X, reset=False), check_scoring(estimator, scoring=scoring)
    if not any(map(len, sets)):
        raise ShapeError("columns cannot be shuffled: the sets have no elements")
    rows = torch.cat([one.tensor() for one in sets])
    before, random = score(estimator, sets, y), check_random_state(random_state)
    found = np.zeros((rows.shape[1], n_repeats))
    for column, repeat in np.ndindex(*found.shape):
        shuffled = rows.clone()
        shuffled[:, column] = rows[torch.from_numpy(random.permutation(len(rows))), column]
        parts = shuffled.split([len(one) for one in sets])
        changed: Sources = [ArraySource(part, metadata=one.metadata) for part, one in zip(parts, sets, strict=True)]
        found[column, repeat] = before - score(estimator, changed, y)
    names = getattr(estimator, "feature_names_in_", np.array([f"x{number}" for number in range(len(found))], object))
    return Bunch(importances=found, importances_mean=found.mean(1), importances_std=found.std(1), names=names)
