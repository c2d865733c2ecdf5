"""From a long table, one row per element, to sets; and scikit-learn's transformers applied to elements.

patient  day  pressure  drug            patient 7: [[0.0, 120.0, 3.0],     numbers (days since the first), then codes
7        3    120       aspirin                     [2.0,   nan, 0.0]]
7        5              none            labels in the order of the ids, in which the sets are
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Self

import numpy as np
import torch
from sklearn.base import BaseEstimator, TransformerMixin, clone
from sklearn.utils.validation import check_is_fitted

from setstream.errors import ConfigurationError, DataError
from setstream.integrations.sklearn.columns import TableColumns
from setstream.integrations.sklearn.sets import Sources, read_sets
from setstream.sets.source import ArraySource

DAY = np.timedelta64(1, "D")


class FrameToSets(TransformerMixin, BaseEstimator):
    """Sets from a long table: a DataFrame (pandas, Polars), an Arrow table, or a mapping of columns.

    Each set is a `SetSource` with its id and its columns: first numbers (the time among them), then categories as codes.
    Missing numbers and categories are NaN, and so are categories that `fit` has not seen.

    Args:
        id: The column that says which set a row belongs to.
        time: A column of numbers or dates. Elements are sorted by it, and the time since the first element of the set, in days
            for dates, is their first number.
        numbers: Columns of numbers; "auto": all others that are numeric.
        categories: Columns of categories, of any type; "auto": all others that are not numeric.
        drop: Columns that "auto" leaves out: labels, for example.
        min_count: Categories in fewer rows than this are treated as unknown, so that there are some to learn from.

    >>> table = {"who": ["b", "a", "b"], "x": [1.0, 2.0, float("nan")], "kind": ["k", "k", "l"], "ill": [1, 0, 1]}
    >>> frame = FrameToSets(id="who", drop=["ill"], min_count=1)
    >>> sets = frame.fit_transform(table)
    >>> [(one.id, one.tensor().tolist()) for one in sets], frame.labels(table, "ill")
    ([('a', [[2.0, 0.0]]), ('b', [[1.0, 0.0], [nan, 1.0]])], array([0, 1]))
    """

    def __init__(
        self,
        id: str,
        *,
        time: str | None = None,
        numbers: Sequence[str] | str = "auto",
        categories: Sequence[str] | str = "auto",
        drop: Sequence[str] = (),
        min_count: int = 2,
    ) -> None:
        self.id, self.time, self.numbers, self.categories = id, time, numbers, categories
        self.drop, self.min_count = drop, min_count

    def fit(self, X: Any, y: Any = None) -> Self:
        """Find the columns, and the categories: the most frequent first."""
        drop = [self.drop] if isinstance(self.drop, str) else list(self.drop)
        apart = {self.id, self.time, *drop, *_given(self.numbers), *_given(self.categories)}
        for name in apart - {None}:
            _column(X, name)
        free = {name: _is_number(_column(X, name)) for name in _names(X) if name not in apart}
        numbers = [name for name in free if free[name]] if self.numbers == "auto" else _given(self.numbers)
        texts = [name for name in free if not free[name]] if self.categories == "auto" else _given(self.categories)
        given, texts_given = self.numbers != "auto", self.categories != "auto"
        if given != texts_given and (left := [name for name in free if free[name] == given]):
            raise ConfigurationError(
                f"the column {left[0]} holds {'numbers' if given else 'no numbers'}: name it among numbers, categories or drop"
            )
        self.numbers_ = [*([self.time] if self.time is not None else []), *numbers]
        #: The categories of each column; the place of a category is its code.
        self.categories_: dict[str, list[Any]] = {}
        for name in texts:
            counts = Counter(value for value in _objects(_column(X, name)) if not _is_missing(value))
            often = [value for value, count in counts.items() if count >= self.min_count]
            self.categories_[name] = sorted(often, key=lambda value: (-counts[value], str(value)))
        self.feature_names_in_ = np.array([*self.numbers_, *self.categories_], object)
        self.n_features_in_ = len(self.feature_names_in_)
        if not self.n_features_in_:
            raise ConfigurationError(f"no columns are left besides {', '.join(map(str, apart))}: elements need at least one")
        known = tuple(tuple(map(str, values)) for values in self.categories_.values())
        self.columns_ = TableColumns(tuple(map(str, self.feature_names_in_)), known)
        return self

    def transform(self, X: Any) -> Sources:
        """The sets, in the order of their ids."""
        check_is_fitted(self)
        ids, owner = self._ids(X)
        table = np.empty((len(owner), self.n_features_in_))
        times = None if self.time is None else _times(_column(X, self.time), self.time)
        for place, name in enumerate(self.numbers_):
            table[:, place] = times if name == self.time and times is not None else _floats(_column(X, name), name)
        for place, (name, values) in enumerate(self.categories_.items(), len(self.numbers_)):
            codes = {value: code for code, value in enumerate(values)}
            table[:, place] = [codes.get(value, np.nan) for value in _objects(_column(X, name))]
        order = np.argsort(owner, kind="stable") if times is None else np.lexsort((times, owner))
        pieces = np.split(table[order], np.cumsum(np.bincount(owner, minlength=len(ids)))[:-1])
        for piece in pieces if times is not None else ():
            piece[:, 0] -= piece[0, 0]
        shared = {"columns": self.columns_}
        return [ArraySource(torch.from_numpy(piece), str(one), metadata=shared) for one, piece in zip(ids, pieces, strict=True)]

    def labels(self, X: Any, y: Any) -> np.ndarray:
        """The label of each set, in the order of the sets.

        y: a column with the same label in all rows of a set, or a mapping (or Series) from id to label.
        """
        ids, owner = self._ids(X)
        if not isinstance(y, str):
            known = dict(y.items())
            if absent := [one for one in ids.tolist() if one not in known]:
                raise DataError(f"there is no label for {len(absent)} of {len(ids)} sets, {absent[0]!r} among them")
            return np.array([known[one] for one in ids.tolist()])
        values = np.asarray(_column(X, y))
        first = values[np.unique(owner, return_index=True)[1]]
        differs = values != first[owner]
        if differs.any():
            one = owner[differs.argmax()]
            raise DataError(f"{y} must be the same in all rows of a set; set {ids[one]} has {first[one]} and others")
        return first

    def _ids(self, X: Any) -> tuple[np.ndarray, np.ndarray]:
        """The ids, sorted, and the number of the set of each row."""
        values = np.asarray(_column(X, self.id))
        if not len(values):
            raise DataError("the table has no rows")
        if sum(missing := [_is_missing(value) for value in values.tolist()]):
            raise DataError(f"{sum(missing)} rows have no {self.id}, row {missing.index(True)} the first: leave them out")
        ids, owner = np.unique(values, return_inverse=True)
        return ids, owner.reshape(-1)

    def get_feature_names_out(self, input_features: Any = None) -> np.ndarray:
        """The names of the columns of the sets."""
        check_is_fitted(self)
        return self.feature_names_in_


class ElementWise(TransformerMixin, BaseEstimator):
    """A scikit-learn transformer applied to the elements of all sets, in a Pipeline: `ElementWise(StandardScaler())`.

    It sees one row per element, and the columns of numbers only: categories stay as they are. All elements are in memory.

    >>> from sklearn.preprocessing import StandardScaler
    >>> sets = [np.array([[1.0], [3.0]]), np.array([[5.0]])]
    >>> [one.tensor().round(decimals=2).tolist() for one in ElementWise(StandardScaler()).fit_transform(sets)]
    [[[-1.22], [0.0]], [[1.22]]]
    """

    _columns: ClassVar[TableColumns | None] = None

    def __init__(self, transformer: Any) -> None:
        self.transformer = transformer

    def fit(self, X: Any, y: Any = None) -> Self:
        """Fit the transformer on all elements. It is given no labels: those are of sets."""
        sets = read_sets(self, X, reset=True)
        self.transformer_ = clone(self.transformer).fit(self._rows(sets)[0])
        return self

    def transform(self, X: Any) -> Sources:
        """The same sets, with other elements."""
        check_is_fitted(self)
        sets = read_sets(self, X, reset=False)
        numbers, rest = self._rows(sets)
        changed = np.asarray(self.transformer_.transform(numbers) if len(numbers) else numbers)
        if changed.ndim != 2 or len(changed) != len(numbers):
            kind = type(self.transformer_).__name__
            raise DataError(f"{kind} made {changed.shape} of {numbers.shape}; expected an array with one row per element")
        columns, shared = self._columns, {}
        if columns is not None:
            names: Any = columns.names[: numbers.shape[1]]
            if hasattr(self.transformer_, "get_feature_names_out"):
                names = self.transformer_.get_feature_names_out(np.array(names, object))
            elif len(names) != changed.shape[1]:
                names = [f"x{number}" for number in range(changed.shape[1])]
            shared["columns"] = TableColumns((*map(str, names), *columns.names[numbers.shape[1] :]), columns.categories)
        table = torch.from_numpy(np.concatenate([changed.astype(np.float64), rest], axis=1))
        parts = table.split([len(one) for one in sets])
        return [ArraySource(part, one.id, one.label, one.metadata | shared) for part, one in zip(parts, sets, strict=True)]

    def _rows(self, sets: Sources) -> tuple[np.ndarray, np.ndarray]:
        """All elements: the numbers, and the codes of categories."""
        rows = torch.cat([one.tensor().double() for one in sets]).numpy()
        count = rows.shape[1] - (len(self._columns.categories) if self._columns is not None else 0)
        return rows[:, :count], rows[:, count:]


def _given(names: Sequence[str] | str) -> list[str]:
    return [] if isinstance(names, str) and names == "auto" else [names] if isinstance(names, str) else list(names)


def _names(table: Any) -> list[str]:
    """The names of the columns of a DataFrame, an Arrow table or a mapping."""
    names = getattr(table, "column_names", None)
    if names is None:
        names = table if isinstance(table, Mapping) else getattr(table, "columns", None)
    if names is None:
        raise DataError(f"expected a DataFrame, an Arrow table or a mapping of columns; got {type(table).__name__}")
    return list(names)


def _column(table: Any, name: Any) -> Any:
    if name not in (names := _names(table)):
        raise DataError(f"the table has no column {name!r}; its columns are {', '.join(map(str, names[:20]))}")
    return table[name]


def _is_number(column: Any) -> bool:
    if "ategor" in (kind := str(getattr(column, "dtype", getattr(column, "type", "")))) or "dictionary" in kind:
        return False
    values = np.asarray(column)
    if values.dtype != object:
        return values.dtype.kind in "fiub"
    known = [value for value in values.tolist() if not _is_missing(value)]
    return bool(known) and all(isinstance(value, int | float) for value in known)


def _floats(column: Any, name: str) -> np.ndarray:
    """Numbers, NaN where they are missing."""
    try:
        return np.asarray(column, dtype=np.float64)
    except (TypeError, ValueError):
        pass
    try:
        return np.array([np.nan if _is_missing(value) else value for value in _objects(column)], np.float64)
    except (TypeError, ValueError) as error:
        raise DataError(
            f"the column {name} does not hold numbers ({error}): name it among the categories, or drop it"
        ) from None


def _times(column: Any, name: str) -> np.ndarray:
    values = np.asarray(column)
    dates = values.dtype.kind == "M"
    times = np.where(np.isnat(values), np.nan, (values - np.nanmin(values)) / DAY) if dates else _floats(column, name)
    if not np.isfinite(times).all():
        raise DataError(f"{int((~np.isfinite(times)).sum())} rows have no {name}: leave them out, or use another column")
    return times


def _objects(column: Any) -> list[Any]:
    return np.asarray(column, dtype=object).tolist()


def _is_missing(value: Any) -> bool:
    return value is None or type(value).__name__ in ("NAType", "NaTType") or bool(value != value)
