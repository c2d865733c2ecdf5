"""Labels that are classes: two of them, several, or several labels at once.

    binary       w_y BCE(logit, y)              p = mean over the streams of sigmoid(logit),    ŷ = [p ≥ τ]
    classes      w_y CE(logits, y)              p = mean over the streams of softmax(logits),   ŷ = argmax p
    multilabel   mean of BCE(logit_l, y_l)      p_l = mean of sigmoid(logit_l),                 ŷ_l = [p_l ≥ τ_l]

w_y is one, or n / (K n_y) with class weights. A label that is not known of a bag (an empty cell) does not count.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from setstream.data.dataset import as_number, column
from setstream.errors import ConfigurationError, DataError
from setstream.report.page import Page
from setstream.tasks.mil import metrics
from setstream.tasks.mil.targets import figures
from setstream.tasks.mil.targets.base import Answers, Rows, Target, label_column, numbers, over_streams


@dataclass(frozen=True)
class OneOfClasses(Target):
    """A class for each bag: the number of its name."""

    names: tuple[str, ...] = ()

    def truth(self, values: Tensor) -> dict[str, list[Any]]:
        return {"truth": [self.names[value] for value in values.tolist()]}

    def strata(self, values: Tensor) -> Tensor:
        return values


@dataclass(frozen=True)
class Binary(OneOfClasses):
    """Two classes; the second is the one that is looked for."""

    kind = "binary"
    reported = ("accuracy", "auroc", "f1")

    names: tuple[str, ...] = ("0", "1")
    threshold: float = 0.5
    weights: tuple[float, ...] = (1.0, 1.0)

    @classmethod
    def read(cls, rows: Rows, columns: Sequence[str], positive: str | None, where: str) -> tuple[Self, Tensor]:
        given = label_column(rows, columns, where)
        wanted = given if positive is None else [int(str(label) == str(positive)) for label in given]
        if any(label not in (0, 1) for label in wanted) or len(set(wanted)) < 2:
            kinds = ", ".join(sorted({str(label) for label in given})[:5])
            advice = "give a CSV of labels (task.labels), and if labels are names, the one that counts as 1 (task.positive)"
            several = "; for more than two, task.kind=classes" if len(set(given)) > 2 else ""
            raise DataError(f"{where}: expected bags with both labels, 0 and 1; got {kinds}: {advice}{several}")
        others = {str(label) for label in given} - {str(positive)}
        names = ("0", "1") if positive is None else (others.pop() if len(others) == 1 else f"not {positive}", str(positive))
        return cls(names), torch.tensor([int(label) for label in wanted])

    def fitted(self, values: Tensor, balanced: bool) -> Self:
        share = float(values.float().mean())
        return replace(self, weights=(0.5 / (1 - share), 0.5 / share)) if balanced else self

    def tuned(self, answers: Answers, youden: bool = False) -> Self:
        return replace(self, threshold=metrics.best_threshold(*answers, balanced=youden))

    def loss(self, logits: Tensor, values: Tensor) -> Tensor:
        label = values.to(logits.dtype)[:, None, None].expand_as(logits)
        return F.binary_cross_entropy_with_logits(logits, label, torch.where(label > 0, self.weights[1], self.weights[0]))

    def predict(self, logits: Tensor) -> Tensor:
        return logits.sigmoid().mean((1, 2))

    def summary(self, answers: Answers) -> dict[str, float]:
        found = metrics.summary(*answers, self.threshold)
        return found | {"error": 1 - found["accuracy"]}

    def table(self, predicted: Tensor) -> dict[str, list[Any]]:
        labels = [self.names[int(value >= self.threshold)] for value in predicted.tolist()]
        return {"probability": predicted.tolist(), "label": labels, "threshold": [self.threshold] * len(labels)}

    @classmethod
    def draw(cls, page: Page, folds: Sequence[tuple[Self, Answers]]) -> None:
        names, answers = folds[0][0].names, [fold for _, fold in folds]
        figures.add_roc(page, {names[1]: answers})
        label = torch.cat([(fold.predicted >= target.threshold).long() for target, fold in folds])
        figures.add_confusion(page, names, label, torch.cat([fold.values for fold in answers]))
        figures.add_calibration(page, {names[1]: answers})


@dataclass(frozen=True)
class Classes(OneOfClasses):
    """Several classes, one of which is right."""

    kind = "classes"
    reported = ("accuracy", "balanced_accuracy", "auroc", "kappa", "f1")

    weights: tuple[float, ...] = ()

    @classmethod
    def read(cls, rows: Rows, columns: Sequence[str], positive: str | None, where: str) -> tuple[Self, Tensor]:
        given = label_column(rows, columns, where)
        numeric = all(isinstance(label, int | float) for label in given)
        names = sorted(set(given)) if numeric else sorted({str(label) for label in given})
        if len(names) < 2 or "" in names:
            raise DataError(f"{where}: expected labels of at least two classes in every row; got {names}")
        known = {str(name): number for number, name in enumerate(names)}
        return cls(tuple(known)), torch.tensor([known[str(label)] for label in given])

    @property
    def outputs(self) -> int:
        return len(self.names)

    def fitted(self, values: Tensor, balanced: bool) -> Self:
        counts = values.bincount(minlength=self.outputs)
        if missing := [name for name, count in zip(self.names, counts.tolist(), strict=True) if not count]:
            raise DataError(f"no training bag has the label {missing[0]!r}: choose another split, or fewer classes")
        return replace(self, weights=tuple((len(values) / self.outputs / counts).tolist())) if balanced else self

    def loss(self, logits: Tensor, values: Tensor) -> Tensor:
        weights = logits.new_tensor(self.weights or [1.0] * self.outputs)[values]
        return over_streams(lambda stream: (weights * F.cross_entropy(stream, values, reduction="none")).mean(), logits)

    def predict(self, logits: Tensor) -> Tensor:
        return logits.softmax(-1).mean(1)

    def summary(self, answers: Answers) -> dict[str, float]:
        return metrics.class_summary(*answers)

    def table(self, predicted: Tensor) -> dict[str, list[Any]]:
        columns = {f"probability_{name}": column for name, column in zip(self.names, predicted.T.tolist(), strict=True)}
        return columns | {"label": [self.names[number] for number in predicted.argmax(1).tolist()]}

    @classmethod
    def draw(cls, page: Page, folds: Sequence[tuple[Self, Answers]]) -> None:
        names, answers = folds[0][0].names, [fold for _, fold in folds]
        each = {
            name: [Answers(fold.predicted[:, number], (fold.values == number).long()) for fold in answers]
            for number, name in enumerate(names)
        }
        figures.add_roc(page, each)
        label = torch.cat([fold.predicted.argmax(1) for fold in answers])
        figures.add_confusion(page, names, label, torch.cat([fold.values for fold in answers]))
        figures.add_calibration(page, each)


@dataclass(frozen=True)
class MultiLabel(Target):
    """Several labels at once, each yes, no or unknown: the columns of a table."""

    kind = "multilabel"
    reported = ("auroc", "f1", "accuracy")

    names: tuple[str, ...] = ()
    thresholds: tuple[float, ...] = ()

    @classmethod
    def read(cls, rows: Rows, columns: Sequence[str], positive: str | None, where: str) -> tuple[Self, Tensor]:
        if not columns:
            raise ConfigurationError('several labels at once need their columns: task.columns=["er", "pr", "her2"]')
        cells = [[str(cell) for cell in column(rows, [name], where)] for name in columns]
        if positive is not None:
            cells = [[cell and str(int(cell == str(positive))) for cell in label] for label in cells]
        values = torch.stack([numbers(label, name, where) for name, label in zip(columns, cells, strict=True)], 1)
        if wrong := [as_number(str(value)) for value in values.unique().tolist() if value == value and value not in (0, 1)]:
            raise DataError(
                f"{where}: labels must be 0, 1 or empty; got {wrong[0]}: task.positive names the one that counts as 1"
            )
        return cls(tuple(columns), (0.5,) * len(columns)), values

    @property
    def outputs(self) -> int:
        return len(self.names)

    def tuned(self, answers: Answers, youden: bool = False) -> Self:
        known = [_known(answers, number) for number in range(self.outputs)]
        best = (metrics.best_threshold(*label, balanced=youden) if len(label.values) else 0.5 for label in known)
        return replace(self, thresholds=tuple(best))

    def loss(self, logits: Tensor, values: Tensor) -> Tensor:
        values = values.to(logits.dtype)[:, None].expand_as(logits)
        known = ~values.isnan()
        return F.binary_cross_entropy_with_logits(logits[known], values[known], reduction="sum") / known.sum().clamp(min=1)

    def predict(self, logits: Tensor) -> Tensor:
        return logits.sigmoid().mean(1)

    def summary(self, answers: Answers) -> dict[str, float]:
        found = [metrics.summary(*_known(answers, number), self.thresholds[number]) for number in range(self.outputs)]
        each = {f"auroc_{name}": label["auroc"] for name, label in zip(self.names, found, strict=True)}
        means = {name: metrics.mean([label[name] for label in found]) for name in ("accuracy", "auroc", "f1")}
        return means | each | metrics.selection(means["accuracy"], means["auroc"])

    def table(self, predicted: Tensor) -> dict[str, list[Any]]:
        columns: dict[str, list[Any]] = {}
        for name, threshold, label in zip(self.names, self.thresholds, predicted.T, strict=True):
            columns |= {f"probability_{name}": label.tolist(), f"label_{name}": (label >= threshold).long().tolist()}
            columns[f"threshold_{name}"] = [threshold] * len(label)
        return columns

    def truth(self, values: Tensor) -> dict[str, list[Any]]:
        return {f"truth_{name}": column for name, column in zip(self.names, values.T.tolist(), strict=True)}

    def strata(self, values: Tensor) -> Tensor:
        return (values[:, 0] == 1).long()

    @classmethod
    def draw(cls, page: Page, folds: Sequence[tuple[Self, Answers]]) -> None:
        each = {name: [_known(fold, number) for _, fold in folds] for number, name in enumerate(folds[0][0].names)}
        figures.add_roc(page, each)
        figures.add_calibration(page, each)


def _known(answers: Answers, number: int) -> Answers:
    """The answers about one of several labels, where it is known."""
    known = ~answers.values[:, number].isnan()
    return Answers(answers.predicted[known, number], answers.values[known, number].long())
