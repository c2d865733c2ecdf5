"""A number for each bag: mean squared error, in units of its standard deviation among the training bags.

loss = mean of (logit - (y - μ) / σ)²        ŷ = μ + σ · (mean of the logits over the streams)
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from torch import Tensor

from setstream.errors import DataError
from setstream.report.page import Page
from setstream.tasks.mil import metrics
from setstream.tasks.mil.targets import figures
from setstream.tasks.mil.targets.base import Answers, Rows, Target, label_column, numbers


@dataclass(frozen=True)
class Regression(Target):
    """A number."""

    kind = "regression"
    reported = ("mae", "rmse", "r2", "spearman")

    centre: float = 0.0
    scale: float = 1.0

    @classmethod
    def read(cls, rows: Rows, columns: Sequence[str], positive: str | None, where: str) -> tuple[Self, Tensor]:
        values = numbers(label_column(rows, columns, where), "labels", where)
        if not bool(values.isfinite().all()):
            raise DataError(
                f"{where}: every bag needs a finite number; row {int((~values.isfinite()).nonzero()[0]) + 1} has none"
            )
        return cls(), values

    def fitted(self, values: Tensor, balanced: bool) -> Self:
        scale = float(values.std()) if len(values) > 1 else 0.0
        return replace(self, centre=float(values.mean()), scale=scale if scale > 0 else 1.0)

    def loss(self, logits: Tensor, values: Tensor) -> Tensor:
        return (logits - ((values.to(logits.dtype) - self.centre) / self.scale)[:, None, None]).square().mean()

    def predict(self, logits: Tensor) -> Tensor:
        return self.centre + self.scale * logits.mean((1, 2))

    def summary(self, answers: Answers) -> dict[str, float]:
        return metrics.regression_summary(*answers)

    def table(self, predicted: Tensor) -> dict[str, list[Any]]:
        return {"prediction": predicted.tolist()}

    def truth(self, values: Tensor) -> dict[str, list[Any]]:
        return {"truth": values.tolist()}

    def strata(self, values: Tensor) -> Tensor:
        inner = torch.tensor([0.25, 0.5, 0.75])
        return torch.bucketize(values, values.float().quantile(inner).to(values.dtype))

    @classmethod
    def draw(cls, page: Page, folds: Sequence[tuple[Self, Answers]]) -> None:
        figures.add_scatter(page, [fold for _, fold in folds])
