"""The forms of X that estimators accept, each read as a list of sources.

    [x_1, ..., x_B]      arrays, tensors, DataFrames or lists of lists (N_i, d), or SetSources; also an array of objects
    (x, ptr)             a tuple: set i is x[ptr[i]:ptr[i + 1]]
    (B, N, d)            an array of sets of one size
    (B, d)               an ordinary table: each row is a set of one element

Arrays that torch can read are not copied: arrays that are mapped from a file stay there.
"""

import warnings
from collections.abc import Iterator, ValuesView
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from sklearn.utils.validation import check_consistent_length, validate_data
from torch import Tensor

from setstream.data.dataset import SetDataset
from setstream.errors import NonFiniteError, ShapeError, wrong_width
from setstream.integrations.sklearn.columns import TableColumns
from setstream.sets.layout import from_array, pack
from setstream.sets.source import ArraySource, SetSource

Sources = list[SetSource]


def read_sets(estimator: Any, X: Any, *, reset: bool) -> Sources:
    """The sets of X; `reset` remembers the width of their elements as n_features_in_, otherwise it must be that."""
    if isinstance(X, dict | Iterator | ValuesView) and not hasattr(X, "shape"):  # a sparse matrix may be a dict
        kind, instead = ("dict", "list(X.values())") if isinstance(X, dict) else ("generator", "list(X)")
        raise ShapeError(f"X is a {kind}, but sets must be a list: pass {instead}")
    if isinstance(X, SetDataset):
        sets: Sources = list(X.sources)
    elif isinstance(X, tuple):
        packed = pack(tuple(_tensor(part, "x and ptr of (x, ptr)") for part in X))
        sets = [ArraySource(one) for one in packed.elements.split(packed.lengths)]
    elif _is_collection(X):
        sets = [one if isinstance(one, SetSource) else _source(one, f"set {i}") for i, one in enumerate(X)]
    elif getattr(X, "ndim", 2) == 3:
        sets = [ArraySource(one) for one in _tensor(X, "X")]
    else:
        return _read_table(estimator, X, reset)
    _check_elements(estimator, sets, reset)
    if reset:
        estimator.n_features_in_, estimator._takes_tables = sets[0].shape[0], False
        estimator._columns = columns = _columns_of(sets[0])
        vars(estimator).pop("feature_names_in_", None)
        if columns is not None:
            estimator.feature_names_in_ = np.array(columns.names, object)
    _check_columns(estimator, sets)
    return sets


def _columns_of(one: SetSource) -> TableColumns | None:
    return one.metadata.get("columns") if isinstance(one.metadata, dict) else None


def _check_columns(estimator: Any, sets: Sources) -> None:
    """Raise ShapeError if sets have other columns than those of `fit`. Sets without names are not compared."""
    known = estimator._columns
    for number, one in enumerate(sets) if known is not None else ():
        given = _columns_of(one)
        if given is None or given is known or given == known:
            continue
        if given.names != known.names:
            raise ShapeError(
                f"{type(estimator).__name__} was fitted on the columns {_listed(known.names)}; set {number} has "
                f"{_listed(given.names)}: choose the same, in the same order"
            )
        raise ShapeError(f"set {number} has other categories than those of fit: make it with the same FrameToSets")


def _listed(names: tuple[str, ...]) -> str:
    return ", ".join(names[:20]) + ", ..." * (len(names) > 20)


def _source(value: Any, what: str) -> ArraySource:
    """A set in memory, with the names of its columns where it is a DataFrame that has them."""
    names = tuple(getattr(value, "columns", ()))
    named = names and all(isinstance(name, str) for name in names)
    return ArraySource(_tensor(value, what), metadata={"columns": TableColumns(names)} if named else None)


def _read_table(estimator: Any, X: Any, reset: bool) -> Sources:
    """Sets of one element. A list of vectors of different lengths is no table: it may be meant as sets of numbers."""
    if isinstance(X, list) and all(getattr(one, "ndim", 0) == 1 for one in X) and len({len(one) for one in X}) > 1:
        raise ShapeError(
            f"a set is (N, d): elements that are vectors. Set 0 has shape {tuple(X[0].shape)}: if its elements are single "
            "numbers, pass x[:, None]"
        )
    finite = "allow-nan" if getattr(estimator, "missing", True) is True else True
    table = validate_data(estimator, X, reset=reset, dtype=(np.float64, np.float32), ensure_all_finite=finite)
    if reset:
        estimator._takes_tables, estimator._columns = True, None
    elif not estimator._takes_tables:
        warnings.warn(
            f"X is read as a table: {len(table)} sets of one element each, while {type(estimator).__name__} was fitted on "
            "larger sets. If X is one set, pass [X]",
            stacklevel=5,
        )
    return [ArraySource(row) for row in _tensor(table, "X").unsqueeze(1)]


def _is_collection(X: Any) -> bool:
    """Whether X is a list of sets, and not a table written as lists."""
    if isinstance(X, np.ndarray):
        return X.dtype == object and X.ndim == 1 and len(X) > 0 and not np.isscalar(X[0])
    if not isinstance(X, list) or not X:
        return isinstance(X, list)
    first = next((one for one in X if not isinstance(one, list) or one), X[0])  # an empty list is ambiguous
    nested = isinstance(first, list) and len(first) > 0 and isinstance(first[0], list)
    return nested or isinstance(first, SetSource) or getattr(first, "ndim", 0) >= 2


def _tensor(value: Any, what: str) -> Tensor:
    if isinstance(value, Tensor):
        return value.detach()
    try:
        array = np.asarray(value)
    except ValueError as error:
        raise ShapeError(f"{what} must be (N, d), rows of one length: {error}") from error
    if array.dtype.kind not in "fiub":
        texts = [str(name) for name, kind in getattr(value, "dtypes", {}).items() if kind.kind not in "fiub"]
        where = f" in the columns {', '.join(texts[:5])}" if texts else ""
        raise ShapeError(f"{what} must hold real numbers; got {array.dtype}{where}: convert it, as with astype(float)")
    return from_array(array)


def _check_elements(estimator: Any, sets: Sources, reset: bool) -> None:
    if not sets:
        raise ShapeError("there are no sets: at least one is needed")
    for number, one in enumerate(sets):
        if len(one.shape) != 1:
            raise ShapeError(
                f"a set is (N, d): elements that are vectors. Set {number} has elements of shape {tuple(one.shape)}: flatten "
                "them, or train a SetModel with your own phi"
            )
        width = sets[0].shape[0] if reset else estimator.n_features_in_
        if one.shape[0] != width:
            raise ShapeError(
                wrong_width(type(estimator).__name__, width, f"those of set {number}", one.shape[0])
                + (" (as set 0 has)" if reset else " (it was fitted on the former)")
                + (f", the columns {_listed(estimator._columns.names)}" if estimator._columns and not reset else "")
                + (". Sets are (N, d), one row per element; are these transposed?" if len(one) == width else "")
            )


def check_lengths(sets: Sources, y: Any) -> None:
    """Raise ShapeError unless there is one label per set; it says how X was read."""
    try:
        check_consistent_length(sets, y)
    except ValueError as error:
        single = all(len(one) == 1 for one in sets)
        read = "each of one element: if X is one set, pass [X]" if single else "of one element and more"
        raise ShapeError(f"{error}: X was read as {len(sets)} sets {read}") from error


@contextmanager
def naming_the_set(estimator: Any, sets: Sources) -> Iterator[None]:
    """Name the set and the column in errors about NaN or infinity that are raised inside."""
    columns, chunk_size = estimator._columns or TableColumns(()), int(estimator.chunk_size)
    try:
        yield
    except NonFiniteError as error:
        for number, one in enumerate(sets):
            for start in range(0, len(one), chunk_size):
                chunk = one.read(start, min(start + chunk_size, len(one)))
                may_be_nan = torch.full(chunk.shape[1:], estimator._takes_nan)
                may_be_nan[len(may_be_nan) - len(columns.categories) :] = True
                bad = (~torch.isfinite(chunk) & ~(torch.isnan(chunk) & may_be_nan)).nonzero()
                if len(bad):
                    row, column = bad[0].tolist()
                    place = f"set {number}{f' ({one.id})' if one.id else ''}, element {start + row}"
                    place += f", column {columns.names[column]}" if columns.names else ""
                    hint = "" if estimator._takes_nan else ". missing=True takes NaN as missing values"
                    raise NonFiniteError(f"NaN or infinity in {place}: clean it, or leave this element out{hint}") from error
        raise
