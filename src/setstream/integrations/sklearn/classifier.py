"""SetClassifier: from sets to classes.

loss = mean over the streams of CE(logits, y)          p = mean over the streams of softmax(logits)
"""

from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import torch
from sklearn.base import ClassifierMixin
from sklearn.utils import column_or_1d, compute_sample_weight
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import _check_sample_weight
from torch import Tensor

from setstream.errors import ConfigurationError
from setstream.integrations.sklearn.base import SetEstimator
from setstream.integrations.sklearn.fitting import class_loss
from setstream.integrations.sklearn.network import mean_softmax
from setstream.integrations.sklearn.sets import Sources, check_lengths, read_sets


@dataclass(kw_only=True, eq=False, repr=False)
class SetClassifier(ClassifierMixin, SetEstimator):
    """A classifier of sets of any size: UMBC and a Set Transformer beside an instance stream, as in multiple instance learning.

    Takes lists of arrays (N_i, d), pairs (x, ptr), lists of `SetSource`, dense arrays (B, N, d), or a table (B, d) whose rows
    are sets of one element.

    Args:
        class_weight: None, "balanced", or a dict. The other options are those of `SetEstimator`.

    >>> import numpy as np
    >>> rng = np.random.default_rng(0)
    >>> y = np.arange(40) % 2
    >>> bags = [rng.normal(size=(rng.integers(3, 9), 2)) + 3 * label for label in y]
    >>> model = SetClassifier(widths=(16,), num_slots=4, learning_rate=3e-3, min_steps=60, random_state=0).fit(bags, y)
    >>> model.predict(bags[:4]).tolist(), model.score(bags, y)
    ([0, 1, 0, 1], 1.0)
    """

    _network = "classifier"
    _with_elements = True

    class_weight: Any = None

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> Self:
        """Train from the beginning."""
        sets, target, weights = self._read(X, y, sample_weight, None)
        self._fit(sets, target, weights, self._answers(), class_loss, target.numpy())
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
        return mean_softmax(self._outputs(X).double()).numpy()

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
