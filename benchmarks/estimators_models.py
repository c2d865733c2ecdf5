"""What `benchmarks/estimators.py` compares: our estimators with their defaults, scikit-learn on summaries, two plain networks.

setstream               SetClassifier or SetRegressor with their defaults
logistic, boosting      mean, deviation, minimum, maximum and size of each set; logistic regression (ridge for numbers) with its
                        penalty chosen by cross-validation; gradient boosting of histograms
logistic-quantiles      the same on the quantiles 0, 5, 25, 50, 75, 95, 100 per cent of each feature, and the size
boosting-quantiles
deepsets, ab-mil        phi of widths 128, 64 as in setstream; a mean, or gated attention; a linear layer. Adam, a cosine, and
                        5 to 25 epochs in 150 steps and more; where there are 100 sets, a tenth chooses the weights
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from sklearn.ensemble import HistGradientBoostingClassifier, HistGradientBoostingRegressor
from sklearn.linear_model import LogisticRegressionCV, RidgeCV
from sklearn.model_selection import train_test_split
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from torch import Tensor, nn

import setstream as ss
from setstream.integrations.sklearn import SetClassifier, SetRegressor

#: Version of the defaults of `setstream`: another number for each change that changes its answers. Lines of results carry it.
DEFAULTS = 2
QUANTILES = (0.0, 0.05, 0.25, 0.5, 0.75, 0.95, 1.0)
Array = np.ndarray


def moments(sets: list[Array]) -> Array:
    rows = [np.concatenate([one.mean(0), one.std(0), one.min(0), one.max(0), [math.log1p(len(one))]]) for one in sets]
    return np.stack(rows)


def quantiles(sets: list[Array]) -> Array:
    return np.stack([np.append(np.quantile(one, QUANTILES, axis=0).ravel(), math.log1p(len(one))) for one in sets])


class OnSummaries:
    """An estimator of tables, on the summaries of sets."""

    def __init__(self, summary: Callable[[list[Array]], Array], estimator: Any) -> None:
        self.summary, self.estimator = summary, estimator

    def fit(self, sets: list[Array], y: Array) -> OnSummaries:
        self.estimator.fit(self.summary(sets), y)
        return self

    def predict_proba(self, sets: list[Array]) -> Array:
        return self.estimator.predict_proba(self.summary(sets))

    def predict(self, sets: list[Array]) -> Array:
        return self.estimator.predict(self.summary(sets))


def linear(regression: bool, y: Array) -> Any:
    if regression:
        return make_pipeline(StandardScaler(), RidgeCV(np.logspace(-2, 4, 7)))
    folds = max(2, min(3, int(np.bincount(y).min())))
    options = {
        "Cs": [1e-3, 1e-2, 0.1, 1.0, 10.0],
        "cv": folds,
        "scoring": "neg_log_loss",
        "max_iter": 300,
        "use_legacy_attributes": False,
    }
    return make_pipeline(StandardScaler(), LogisticRegressionCV(**options, l1_ratios=(0,)))


def boosting(regression: bool, y: Array, seed: int) -> Any:
    kind = HistGradientBoostingRegressor if regression else HistGradientBoostingClassifier
    return kind(random_state=seed, min_samples_leaf=20 if len(y) >= 500 else 5)


class PlainNetwork:
    """A mean or gated attention over phi, and a linear layer."""

    def __init__(self, kind: str, regression: bool, seed: int) -> None:
        self.kind, self.regression, self.seed = kind, regression, seed

    def fit(self, sets: list[Array], y: Array) -> PlainNetwork:
        torch.manual_seed(self.seed)
        torch.set_num_threads(1)
        rows = np.concatenate(sets)
        self.mean, self.std = rows.mean(0), np.where(rows.std(0) > 1e-9, rows.std(0), 1.0)
        self.classes, self.units = np.unique(y), (float(np.mean(y)), float(np.std(y)) or 1.0)
        outputs = 1 if self.regression else len(self.classes)
        target = torch.from_numpy((y - self.units[0]) / self.units[1] if self.regression else np.searchsorted(self.classes, y))
        target = target.float() if self.regression else target.long()
        self.phi = nn.Sequential(nn.Linear(rows.shape[1], 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU())
        self.attention, self.out = ss.nn.GatedAttention(64), nn.Linear(64, outputs)
        modules = nn.ModuleList([self.phi, self.attention, self.out])
        batch = max(16, min(len(sets) // 8, 4096 * len(sets) // len(rows)))
        steps = max(150, min(25, max(5, round(600_000 / len(rows)))) * math.ceil(len(sets) / batch))
        kept, held = np.arange(len(sets)), np.arange(0)
        if len(sets) >= 100:
            strata = None if self.regression or np.bincount(np.searchsorted(self.classes, y)).min() < 2 else y
            kept, held = train_test_split(
                kept,
                test_size=max(0.1, len(self.classes) / len(sets) if strata is not None else 0),
                random_state=self.seed,
                stratify=strata,
            )
        optimizer = torch.optim.Adam(modules.parameters(), 2e-3 * math.sqrt(min(128, batch) / 64), weight_decay=1e-4)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
        random, best, lowest = np.random.default_rng(self.seed), None, math.inf
        for step in range(steps):
            picked = random.choice(kept, min(batch, len(kept)), replace=False)
            loss = self._loss(self._outputs([sets[i] for i in picked]), target[picked])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            if len(held) and ((step + 1) % max(1, steps // 25) == 0):
                with torch.no_grad():
                    test = float(self._loss(self._all([sets[i] for i in held]), target[held]))
                if test < lowest:
                    lowest, best = test, copy.deepcopy(modules.state_dict())
        if best is not None:
            modules.load_state_dict(best)
        return self

    def _loss(self, outputs: Tensor, target: Tensor) -> Tensor:
        return F.mse_loss(outputs[:, 0], target) if self.regression else F.cross_entropy(outputs, target)

    def _outputs(self, sets: list[Array]) -> Tensor:
        x = nn.utils.rnn.pad_sequence(
            [torch.from_numpy((one - self.mean) / self.std).float() for one in sets], batch_first=True
        )
        mask = torch.arange(x.shape[1]) < torch.tensor([len(one) for one in sets])[:, None]
        h = self.phi(x)
        if self.kind == "ab-mil":
            return self.out(self.attention(h, mask))
        return self.out((h * mask.unsqueeze(-1)).sum(1) / mask.sum(1, keepdim=True))

    @torch.no_grad()
    def _all(self, sets: list[Array]) -> Tensor:
        return torch.cat([self._outputs(sets[start : start + 32]) for start in range(0, len(sets), 32)])

    def predict_proba(self, sets: list[Array]) -> Array:
        return self._all(sets).double().softmax(1).numpy()

    def predict(self, sets: list[Array]) -> Array:
        return self._all(sets)[:, 0].double().numpy() * self.units[1] + self.units[0]


Maker = Callable[[bool, Array, int], Any]
MODELS: dict[str, Maker] = {
    "setstream": lambda regression, y, seed: (SetRegressor if regression else SetClassifier)(random_state=seed),
    "logistic": lambda regression, y, seed: OnSummaries(moments, linear(regression, y)),
    "boosting": lambda regression, y, seed: OnSummaries(moments, boosting(regression, y, seed)),
    "logistic-quantiles": lambda regression, y, seed: OnSummaries(quantiles, linear(regression, y)),
    "boosting-quantiles": lambda regression, y, seed: OnSummaries(quantiles, boosting(regression, y, seed)),
    "deepsets": lambda regression, y, seed: PlainNetwork("deepsets", regression, seed),
    "ab-mil": lambda regression, y, seed: PlainNetwork("ab-mil", regression, seed),
}
SUMMARIES = ("logistic", "boosting", "logistic-quantiles", "boosting-quantiles")
