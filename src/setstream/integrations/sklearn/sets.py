"""What estimators take as X: sets in any of these forms, each of them read as a list of sources.

    [x_1, ..., x_B]      arrays, tensors or lists of lists (N_i, d), or SetSources; also an array of objects
    (x, ptr)             a tuple: set i is x[ptr[i]:ptr[i + 1]]
    (B, N, d)            an array of sets of one size
    (B, d)               an ordinary table: each row is a set of one element

Nothing is copied: arrays that are mapped from a file stay there.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from sklearn.utils.validation import validate_data
from torch import Tensor

from setstream.data.dataset import SetDataset
from setstream.data.source import ArraySource, SetSource
from setstream.errors import NonFiniteError, ShapeError

Sources = list[SetSource]
PAIR = "a tuple is the pair (x, ptr), where set i is x[ptr[i]:ptr[i + 1]]: give sets of their own as a list"


def read_sets(estimator: Any, X: Any, *, reset: bool) -> Sources:
    """The sets of X; `reset` remembers the width of their elements as n_features_in_, otherwise it must be that."""
    if isinstance(X, SetDataset):
        return _checked(estimator, list(X.sources), reset)
    if isinstance(X, tuple):
        if len(X) != 2:
            raise ShapeError(f"{PAIR}; got {len(X)} items")
        x, ptr = _tensor(X[0], "x of (x, ptr)"), np.asarray(X[1])
        if ptr.ndim != 1 or ptr.dtype.kind not in "iu":
            raise ShapeError(f"{PAIR}; the second of these two is {ptr.dtype} of shape {ptr.shape}")
        bounds = ptr.tolist()
        if not bounds or bounds[0] != 0 or bounds[-1] != len(x) or any(a > b for a, b in pairwise(bounds)):
            raise ShapeError(f"ptr must rise from 0 to len(x) = {len(x)}; got {bounds[:8]}")
        return _checked(estimator, [ArraySource(x[a:b]) for a, b in pairwise(bounds)], reset)
    if _is_collection(X):
        sets = [one if isinstance(one, SetSource) else ArraySource(_tensor(one, f"set {i}")) for i, one in enumerate(X)]
        return _checked(estimator, sets, reset)
    if getattr(X, "ndim", 2) == 3:
        return _checked(estimator, [ArraySource(one) for one in _tensor(X, "X")], reset)
    _check_table(estimator, X, reset)
    table = validate_data(estimator, X, reset=reset, dtype=(np.float64, np.float32))
    return [ArraySource(row) for row in _tensor(table, "X").unsqueeze(1)]


def _is_collection(X: Any) -> bool:
    """Whether X is a list of sets, and not a table written as lists."""
    if isinstance(X, np.ndarray):
        return X.dtype == object and X.ndim == 1 and len(X) > 0 and not np.isscalar(X[0])
    if not isinstance(X, list) or not X:
        return False
    first = X[0]
    nested = isinstance(first, list) and len(first) > 0 and isinstance(first[0], list)
    return nested or isinstance(first, SetSource) or getattr(first, "ndim", 0) == 2


def _check_table(estimator: Any, X: Any, reset: bool) -> None:
    """A table may be meant as something else: vectors as sets of numbers, one set instead of a list of it."""
    if isinstance(X, list) and X and all(getattr(one, "ndim", 0) == 1 for one in X) and len({len(one) for one in X}) > 1:
        raise ShapeError(
            f"a set is (N, d): elements that are vectors. Set 0 has shape {tuple(X[0].shape)}: if its elements are single "
            "numbers, pass x[:, None]"
        )
    if reset:
        estimator._takes_tables = True
    elif not estimator._takes_tables and getattr(X, "ndim", 0) == 2:
        warnings.warn(
            f"X of shape {tuple(X.shape)} is read as {len(X)} sets of one element each, while {type(estimator).__name__} was "
            "fitted on larger sets: if X is one set, pass [X]",
            stacklevel=5,
        )


def _tensor(value: Any, what: str) -> Tensor:
    if isinstance(value, Tensor):
        return value.detach()
    array = np.asarray(value)
    if array.dtype.kind not in "fiub":
        raise ShapeError(f"{what} must hold real numbers; got {array.dtype}")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")  # we only read
        return torch.from_numpy(array)


def _checked(estimator: Any, sets: Sources, reset: bool) -> Sources:
    if not sets:
        raise ShapeError("there are no sets: at least one is needed")
    for number, one in enumerate(sets):
        if len(one.shape) != 1:
            raise ShapeError(
                f"a set is (N, d): elements that are vectors. Set {number} has elements of shape {tuple(one.shape)}: flatten "
                "them, or train a SetModel with a phi of your own"
            )
    width = sets[0].shape[0] if reset else estimator.n_features_in_
    for number, one in enumerate(sets):
        if one.shape[0] != width:
            raise ShapeError(
                f"{type(estimator).__name__} expects elements of width {width}, as "
                f"{'set 0 has' if reset else 'it was fitted on'}; set {number} has elements of width {one.shape[0]}"
            )
    if reset:
        estimator.n_features_in_ = width
        estimator._takes_tables = False
    return sets


@contextmanager
def naming_the_set(sets: Sources, chunk_size: int) -> Iterator[None]:
    """Where NaN or infinity is found inside, say in which of the sets it is."""
    try:
        yield
    except NonFiniteError as error:
        for number, one in enumerate(sets):
            for start in range(0, len(one), chunk_size):
                finite = torch.isfinite(one.read(start, min(start + chunk_size, len(one)))).all(1)
                if not bool(finite.all()):
                    place = f"set {number}{f' ({one.id})' if one.id else ''}, element {start + int(finite.int().argmin())}"
                    raise NonFiniteError(f"NaN or infinity in {place}: clean it, or leave this element out") from error
        raise


def mean_and_scale(sets: Sources, chunk_size: int) -> tuple[Tensor, Tensor]:
    """Mean and deviation of each feature over all elements of all sets, in one pass, in float64; scale 1 where it is constant.

    NonFiniteError where there is NaN or infinity.

    n = n_a + n_b,   μ = μ_a + (μ_b - μ_a) n_b / n,   M = M_a + M_b + (μ_b - μ_a)² n_a n_b / n        (Chan et al.)

    >>> mean_and_scale([ArraySource(torch.tensor([[0.0], [2.0]])), ArraySource(torch.tensor([[4.0]]))], 2)[0].tolist()
    [2.0]
    """
    width = sets[0].shape[0]
    count, mean, moment = 0, torch.zeros(width, dtype=torch.float64), torch.zeros(width, dtype=torch.float64)
    for chunk in _together(sets, chunk_size):
        added = len(chunk)
        own = chunk.mean(0)
        apart = own - mean
        total = count + added
        mean = mean + apart * (added / total)
        moment = moment + (chunk - own).square().sum(0) + apart.square() * (count * added / total)
        count = total
    if not bool(torch.isfinite(moment).all()):
        raise NonFiniteError("the sets hold NaN or infinity, or numbers so large that their squares are infinite")
    scale = (moment / max(1, count)).sqrt()
    return mean.float(), torch.where(scale > 1e-7 * mean.abs(), scale, 1.0).float()


def _together(sets: Sources, chunk_size: int) -> Iterator[Tensor]:
    """The elements in float64, small sets joined until they make a chunk, large ones cut."""
    waiting: list[Tensor] = []
    size = 0
    for one in sets:
        for start in range(0, len(one), chunk_size):
            piece = one.read(start, min(start + chunk_size, len(one)))
            waiting.append(piece.double())
            size += len(piece)
            if size >= chunk_size:
                yield torch.cat(waiting)
                waiting, size = [], 0
    if waiting:
        yield torch.cat(waiting)
