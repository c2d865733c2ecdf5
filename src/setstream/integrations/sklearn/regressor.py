"""SetRegressor: from sets to numbers.

loss = mean over the streams of ((y - mean) / scale - output)²          ŷ = mean over the streams of output · scale + mean
"""

from typing import Any, Self, cast

import numpy as np
import torch
from sklearn.base import RegressorMixin
from sklearn.preprocessing import StandardScaler
from sklearn.utils.validation import _check_sample_weight, check_array
from torch import Tensor

from setstream.integrations.sklearn.base import SetEstimator
from setstream.integrations.sklearn.fitting import square_loss
from setstream.integrations.sklearn.network import NumbersHead
from setstream.integrations.sklearn.sets import Sources, check_lengths, read_sets


def read_numbers(y: Any) -> np.ndarray:
    """Targets (B,) or (B, K), unchanged."""
    if y is None:
        raise ValueError("This SetRegressor estimator requires y to be passed, but the target y is None")
    return check_array(y, ensure_2d=False, dtype=np.float64, input_name="y")


class SetRegressor(RegressorMixin, SetEstimator):
    """A regressor on sets of any size, of one number per set or several. Takes what `SetClassifier` takes.

    >>> import numpy as np
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
        self._fit(sets, target, weights, {"outputs": target.shape[1]}, square_loss, None)
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
        numbers = self._outputs(X).double().mean(1).numpy() * self.target_scale_ + self.target_mean_
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
