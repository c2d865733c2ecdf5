"""SetFeaturizer: from sets to one row of features each, for any estimator of scikit-learn.

with y      the network of SetClassifier or SetRegressor, without its last layer
without     two random halves of one set must find each other among the halves of a batch (InfoNCE)
"""

from typing import Any, Self

import numpy as np
import torch
from sklearn.base import ClassNamePrefixFeaturesOutMixin, TransformerMixin
from sklearn.preprocessing import StandardScaler
from sklearn.utils import column_or_1d
from sklearn.utils.multiclass import type_of_target
from sklearn.utils.validation import check_is_fitted

from setstream.integrations.sklearn.base import SetEstimator
from setstream.integrations.sklearn.fitting import class_loss, contrast_loss, square_loss
from setstream.integrations.sklearn.regressor import read_numbers
from setstream.integrations.sklearn.sets import check_lengths, read_sets

#: Width of the space in which halves are compared.
PROJECTION = 32


class SetFeaturizer(ClassNamePrefixFeaturesOutMixin, TransformerMixin, SetEstimator):
    """Features (B, widths[-1]) of sets of any size, learned from labels if there are some, else from the sets alone.

    >>> import numpy as np
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

    def fit(self, X: Any, y: Any = None) -> Self:
        """Learn from the sets, and from y where it is given: classes, or numbers."""
        sets = read_sets(self, X, reset=True)
        strata = None
        if y is not None:
            check_lengths(sets, y)
        kind = "none" if y is None else type_of_target(y, input_name="y")
        if kind in ("binary", "multiclass"):
            classes, numbers = np.unique(column_or_1d(y, warn=True), return_inverse=True)
            target, strata = torch.from_numpy(numbers).long(), numbers
            outputs, loss = len(classes), class_loss
        elif y is not None:
            target = torch.from_numpy(StandardScaler().fit_transform(read_numbers(y).reshape(len(sets), -1))).float()
            outputs, loss = target.shape[1], square_loss
        else:
            target, outputs, loss = torch.zeros(len(sets)), PROJECTION, contrast_loss
        self._fit(sets, target, torch.ones(len(sets)), {"outputs": outputs}, loss, strata)
        self._n_features_out = int([self.n_features_in_, *self.widths][-1])
        return self

    def transform(self, X: Any) -> np.ndarray:
        """One row of features for each set."""
        check_is_fitted(self)
        return self._outputs(X, self.model_.head).numpy()

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.transformer_tags.preserves_dtype = ["float32"]
        return tags
