"""SetFeaturizer: from sets to one row of features each, for any estimator of scikit-learn.

with y      the network of SetClassifier or SetRegressor, without its last layer
without     two random halves of one set must find each other among the halves of a batch (InfoNCE):
            loss_i = -log( e^(a_i·b_i / τ) / Σ_j e^(a_i·b_j / τ) ),  and the same from b_i to the a_j;   a, b of length one
"""

from typing import Any, Self

import numpy as np
import torch
import torch.nn.functional as F
from sklearn.base import ClassNamePrefixFeaturesOutMixin, TransformerMixin
from sklearn.utils import column_or_1d
from sklearn.utils.multiclass import type_of_target
from sklearn.utils.validation import check_is_fitted
from torch import Tensor

from setstream.integrations.sklearn.base import SetEstimator
from setstream.integrations.sklearn.classifier import class_loss
from setstream.integrations.sklearn.fitting import SetsEncode, rows_of
from setstream.integrations.sklearn.regressor import mean_and_scale, read_numbers, square_loss
from setstream.integrations.sklearn.sets import Sources, check_lengths, read_sets
from setstream.models.model import SetModel
from setstream.sets.source import ArraySource, PartSource, SetSource

TEMPERATURE = 0.1
#: Width of the space in which halves are compared.
PROJECTION = 32


def halves(one: SetSource, chunk_size: int) -> tuple[SetSource, SetSource]:
    """Two random halves of a set; of a set too large for memory, the first and the second half. A single element is both."""
    size = len(one)
    if size < 2:
        return one, one
    if size > chunk_size:
        return PartSource(one, 0, 2), PartSource(one, 1, 2)
    order, elements = torch.randperm(size), one.tensor()
    return ArraySource(elements[order[: size // 2]]), ArraySource(elements[order[size // 2 :]])


def contrast_loss(model: SetModel, encode: SetsEncode, sets: Sources, target: Tensor) -> Tensor:
    """InfoNCE between the halves of the sets of a batch, in both directions: (B,)."""
    pairs = [halves(one, encode.chunk_size) for one in sets]
    rows = rows_of(model)(encode(model, [one for one, _ in pairs] + [other for _, other in pairs]))[:, -1]
    a, b = F.normalize(rows, dim=-1).split(len(sets))
    logits = a @ b.T / TEMPERATURE
    number = torch.arange(len(sets), device=logits.device)
    return (F.cross_entropy(logits, number, reduction="none") + F.cross_entropy(logits.T, number, reduction="none")) / 2


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
        weights, strata = torch.ones(len(sets)), None
        if y is not None:
            check_lengths(sets, y)
        kind = "none" if y is None else type_of_target(y, input_name="y")
        if kind in ("binary", "multiclass"):
            classes, numbers = np.unique(column_or_1d(y, warn=True), return_inverse=True)
            target, strata = torch.from_numpy(numbers).long(), numbers
            outputs, loss = len(classes), class_loss
        elif y is not None:
            values = read_numbers(y).reshape(len(sets), -1)
            mean, scale = mean_and_scale(values)
            target = torch.from_numpy((values - mean) / scale).float()
            outputs, loss = target.shape[1], square_loss
        else:
            target, outputs, loss = torch.zeros(len(sets)), PROJECTION, contrast_loss
        self._fit(sets, target, weights, {"outputs": outputs}, loss, strata=strata)
        self._n_features_out = int([self.n_features_in_, *self.widths][-1])
        return self

    def transform(self, X: Any) -> np.ndarray:
        """One row of features for each set."""
        check_is_fitted(self)
        return self._outputs(X, self.model_.head).numpy()

    def __sklearn_tags__(self) -> Any:
        """Features are float32 for any input."""
        tags = super().__sklearn_tags__()
        tags.transformer_tags.preserves_dtype = ["float32"]
        return tags
