"""The estimators, for sets with classes, with numbers, and with or without either.

SetClassifier    loss = mean over the streams of CE(logits, y)                      p = mean over the streams of softmax(logits)
SetRegressor     loss = mean over the streams of ((y - mean) / scale - output)²     ŷ = mean of output · scale + mean
SetFeaturizer    with y: one of these networks, without its last layer
                 without: two random halves of one set must find each other among the halves of a batch (InfoNCE)
"""

from dataclasses import dataclass
from typing import Any, Self, cast

import numpy as np
import torch
from sklearn.base import ClassifierMixin, ClassNamePrefixFeaturesOutMixin, RegressorMixin, TransformerMixin
from sklearn.preprocessing import StandardScaler
from sklearn.utils import column_or_1d, compute_sample_weight
from sklearn.utils.multiclass import check_classification_targets, type_of_target
from sklearn.utils.validation import _check_sample_weight, check_array, check_is_fitted
from torch import Tensor, nn

from setstream.errors import ConfigurationError
from setstream.integrations.sklearn.base import SetEstimator
from setstream.integrations.sklearn.ensemble import class_rows, number_rows
from setstream.integrations.sklearn.fitting import Loss, class_loss, contrast_loss, square_loss
from setstream.integrations.sklearn.network import ClassesHead, FeaturesHead, NumbersHead
from setstream.integrations.sklearn.sets import Sources, check_lengths, naming_the_set, read_sets

PROJECTION = 32  # width of the space in which halves are compared


@dataclass(kw_only=True, eq=False, repr=False)
class SetClassifier(ClassifierMixin, SetEstimator):
    """A classifier of sets of any size: UMBC and a Set Transformer beside an instance stream, as in multiple instance learning.

    Takes lists of arrays (N_i, d), pairs (x, ptr), lists of `SetSource`, dense arrays (B, N, d), or a table (B, d) whose rows
    are sets of one element.

    Args:
        class_weight: None, "balanced", or a dict. The other options are those of `SetEstimator`.

    >>> rng = np.random.default_rng(0)
    >>> y = np.arange(40) % 2
    >>> bags = [rng.normal(size=(rng.integers(3, 9), 2)) + 3 * label for label in y]
    >>> model = SetClassifier(widths=(16,), num_slots=4, learning_rate=3e-3, min_steps=60, random_state=0).fit(bags, y)
    >>> model.predict(bags[:4]).tolist(), model.score(bags, y)
    ([0, 1, 0, 1], 1.0)
    """

    _network = "classifier"

    class_weight: Any = None

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> Self:
        """Train from the beginning."""
        sets, target, weights = self._read(X, y, sample_weight, None)
        self._fit(sets, target, weights, self._answers(), class_rows, target.numpy())
        return self

    def partial_fit(self, X: Any, y: Any, classes: Any = None, sample_weight: Any = None) -> Self:
        """One more pass over these sets. The first call names all classes, unless its own sets show them."""
        known = getattr(self, "classes_", None)
        if known is not None and classes is not None and not np.array_equal(known, np.unique(classes)):
            got = np.unique(classes).tolist()
            raise ConfigurationError(f"the classes are {known.tolist()} since the first call; got {got}")
        sets, target, weights = self._read(X, y, sample_weight, known if classes is None else np.unique(classes))
        self._partial_fit(sets, target, weights, self._answers(), class_loss)
        return self

    def predict_proba(self, X: Any) -> np.ndarray:
        """p of every class, (B, classes), in the order of `classes_`."""
        rows = self._outputs(X).double()
        return cast(ClassesHead, self.model_.head).probabilities(rows).numpy()

    def decision_function(self, X: Any) -> np.ndarray:
        """The log odds of the second class, (B,); of more than two classes, the log-probabilities, (B, classes)."""
        logs = np.log(self.predict_proba(X).clip(1e-300))
        return logs[:, 1] - logs[:, 0] if len(self.classes_) == 2 else logs

    def predict(self, X: Any) -> np.ndarray:
        """The most probable class of each set."""
        probabilities = self.predict_proba(X)  # first: an estimator that is not fitted has no classes
        return self.classes_[probabilities.argmax(1)]

    def _answers(self) -> dict[str, Any]:
        return {"classes": [one if isinstance(one, str | int | float) else str(one) for one in self.classes_.tolist()]}

    def _read(self, X: Any, y: Any, sample_weight: Any, classes: np.ndarray | None) -> tuple[Sources, Tensor, Tensor]:
        if y is None:
            raise ValueError("This SetClassifier estimator requires y to be passed, but the target y is None")
        sets = read_sets(self, X, reset=classes is None or not hasattr(self, "n_features_in_"))
        y = column_or_1d(y, warn=True)
        check_classification_targets(y)
        check_lengths(sets, y)
        self.classes_ = np.unique(y) if classes is None else classes
        if len(self.classes_) < 2:
            raise ConfigurationError(f"a classifier needs at least two classes; got one class: {self.classes_.tolist()}")
        if len(unknown := np.setdiff1d(y, self.classes_)):
            raise ConfigurationError(f"y holds {unknown.tolist()}, but the classes are {self.classes_.tolist()}")
        numbers = np.searchsorted(self.classes_, y)
        weights = _check_sample_weight(sample_weight, sets) * compute_sample_weight(self.class_weight, y)
        return sets, torch.from_numpy(numbers).long(), torch.from_numpy(weights).float()


def read_numbers(y: Any) -> np.ndarray:
    """Targets (B,) or (B, K), unchanged."""
    if y is None:
        raise ValueError("This SetRegressor estimator requires y to be passed, but the target y is None")
    return check_array(y, ensure_2d=False, dtype=np.float64, input_name="y")


class SetRegressor(RegressorMixin, SetEstimator):
    """A regressor on sets of any size, of one number per set or several. Takes what `SetClassifier` takes.

    >>> rng = np.random.default_rng(0)
    >>> y = rng.normal(size=60)
    >>> sets = [rng.normal(size=(20, 2)) + mean for mean in y]
    >>> model = SetRegressor(widths=(32,), num_slots=4, learning_rate=3e-3, dropout=0.0, min_steps=150, random_state=0)
    >>> bool(model.fit(sets, y).score(sets, y) > 0.8)
    True
    """

    _network = "regressor"

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> Self:
        """Train from the beginning."""
        sets, target, weights = self._read(X, y, sample_weight, first=True)
        self._fit(sets, target, weights, {"outputs": target.shape[1]}, number_rows, None)
        self._remember_units()
        return self

    def partial_fit(self, X: Any, y: Any, sample_weight: Any = None) -> Self:
        """One more pass over these sets; the first call's targets define mean and scale."""
        sets, target, weights = self._read(X, y, sample_weight, first=not hasattr(self, "target_mean_"))
        self._partial_fit(sets, target, weights, {"outputs": target.shape[1]}, square_loss)
        self._remember_units()
        return self

    def predict(self, X: Any) -> np.ndarray:
        """The numbers of each set: (B,), or (B, K) as y was."""
        rows = self._outputs(X).double()  # first: an estimator that is not fitted has no network
        numbers = cast(NumbersHead, self.model_.head).numbers(rows).numpy()
        return numbers if self._several else numbers[:, 0]

    def _read(self, X: Any, y: Any, sample_weight: Any, *, first: bool) -> tuple[Sources, Tensor, Tensor]:
        sets = read_sets(self, X, reset=first)
        given = read_numbers(y)
        check_lengths(sets, given)
        numbers = given.reshape(len(given), -1)
        weights = _check_sample_weight(sample_weight, sets)
        if first:
            self._several = given.ndim > 1
            units = StandardScaler().fit(numbers)
            self.target_mean_, self.target_scale_ = units.mean_, units.scale_
        target = (numbers - self.target_mean_) / self.target_scale_
        return sets, torch.from_numpy(target).float(), torch.from_numpy(weights).float()

    def _remember_units(self) -> None:
        """Let the network itself predict in the units of y."""
        head = cast(NumbersHead, self.model_.head)
        head.mean.copy_(torch.from_numpy(self.target_mean_))
        head.scale.copy_(torch.from_numpy(self.target_scale_))

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.target_tags.multi_output = True
        return tags


class SetFeaturizer(ClassNamePrefixFeaturesOutMixin, TransformerMixin, SetEstimator):
    """Features (B, widths[-1]) of sets of any size, learned from labels if there are some, else from the sets alone.

    >>> from sklearn.linear_model import LogisticRegression
    >>> from sklearn.pipeline import make_pipeline
    >>> rng = np.random.default_rng(0)
    >>> y = np.arange(40) % 2
    >>> sets = [rng.normal(size=(20, 2)) * (1 + label) for label in y]
    >>> features = SetFeaturizer(widths=(16,), num_slots=4, learning_rate=3e-3, min_steps=60, random_state=0)
    >>> features.fit_transform(sets).shape
    (40, 16)
    """

    _network = "featurizer"
    _with_elements = False

    def fit(self, X: Any, y: Any = None) -> Self:
        """Learn from the sets, and from y where it is given: classes, or numbers."""
        sets = read_sets(self, X, reset=True)
        if y is not None:
            check_lengths(sets, y)
        kind = "none" if y is None else type_of_target(y, input_name="y")
        if kind in ("binary", "multiclass"):
            classes, numbers = np.unique(column_or_1d(y, warn=True), return_inverse=True)
            target = torch.from_numpy(numbers).long()
            outputs, loss = len(classes), class_loss
        elif y is not None:
            target = torch.from_numpy(StandardScaler().fit_transform(read_numbers(y).reshape(len(sets), -1))).float()
            outputs, loss = target.shape[1], square_loss
        else:
            target, outputs, loss = torch.zeros(len(sets)), PROJECTION, contrast_loss
        self._fit_alone(sets, target, outputs, loss)
        self._n_features_out = cast(nn.Linear, cast(FeaturesHead, self.model_.head).decoder[-1]).in_features
        return self

    def _fit_alone(self, sets: Sources, target: Tensor, outputs: int, loss: Loss) -> None:
        """Train one network, without members."""
        self._check_options()
        with torch.random.fork_rng(), naming_the_set(self, sets):
            steps = self._plan(sets)[0].steps
            training = self._start(sets, {"outputs": outputs}, loss, steps, None)
            with self._threads(sets, training.config.batch):
                self.loss_curve_ = training.run(sets, target, torch.ones(len(sets)), steps)
        self.model_, self.n_iter_ = training.model, len(self.loss_curve_)

    def transform(self, X: Any) -> np.ndarray:
        """One row of features for each set."""
        check_is_fitted(self)
        return self._outputs(X, self.model_.head).numpy()

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.transformer_tags.preserves_dtype = ["float32"]
        return tags
