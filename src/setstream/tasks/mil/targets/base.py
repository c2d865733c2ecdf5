"""A kind of label: how it is read from a table, what a model is trained for, and how its answers are judged.

    values = read(rows)         (N, ...)             what the table says of each bag
    logits                      (B, S, outputs)      what the S streams of a model say
    loss(logits, values)        a number             a mean over the bags
    predict(logits)             (B, ...)             the answer, of all streams together
    summary(answers, values)    {name: number}       with `selection`, of which more is better

What a target learns from the training or validation bags (class weights, a threshold, the edges of intervals of time) are its
fields: `fitted` and `tuned` return another target. Fields are numbers and texts, which JSON can hold.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, NamedTuple, Self

import torch
from torch import Tensor

from setstream.data.dataset import LABEL_COLUMNS, as_number, column
from setstream.errors import DataError
from setstream.report.page import Page

Rows = list[dict[str, Any]]


class Answers(NamedTuple):
    """The answers (N, ...) about some bags, and what is known of them (N, ...)."""

    predicted: Tensor
    values: Tensor


@dataclass(frozen=True)
class Target(ABC):
    """One kind of label."""

    kind: ClassVar[str]
    #: Whether the loss compares the bags of a batch: then it is not the mean of the losses of its shares.
    compares: ClassVar[bool] = False
    #: Options of a run that suit it, where they differ from those of the task.
    defaults: ClassVar[dict[str, Any]] = {}
    #: The metrics for which a report gives intervals.
    reported: ClassVar[tuple[str, ...]]

    @classmethod
    @abstractmethod
    def read(cls, rows: Rows, columns: Sequence[str], positive: str | None, where: str) -> tuple[Self, Tensor]:
        """The target and the values (N, ...) of a table's rows; `columns`: those that the caller named, if any."""

    @property
    def outputs(self) -> int:
        """How many numbers each stream gives."""
        return 1

    def fitted(self, values: Tensor, balanced: bool) -> Self:
        """With what is learned from the training bags; `balanced`: with class weights."""
        return self

    def tuned(self, answers: Answers, youden: bool = False) -> Self:
        """With what is learned from the validation bags: thresholds; `youden`: those of the largest Youden's index."""
        return self

    @abstractmethod
    def loss(self, logits: Tensor, values: Tensor) -> Tensor:
        """The mean loss of the bags and streams."""

    @abstractmethod
    def predict(self, logits: Tensor) -> Tensor:
        """The answers of all streams together."""

    @abstractmethod
    def summary(self, answers: Answers) -> dict[str, float]:
        """Metrics; `selection` among them, unless these bags cannot tell."""

    @abstractmethod
    def table(self, predicted: Tensor) -> dict[str, list[Any]]:
        """Columns for a table of predictions."""

    @abstractmethod
    def truth(self, values: Tensor) -> dict[str, list[Any]]:
        """Columns with what is known."""

    @abstractmethod
    def strata(self, values: Tensor) -> Tensor:
        """A number for each bag (N,): folds have equal shares of each."""

    @classmethod
    @abstractmethod
    def draw(cls, page: Page, folds: Sequence[tuple[Self, Answers]]) -> None:
        """Figures and tables for a report about the test bags of one or several folds, each with its own thresholds."""

    def to_dict(self) -> dict[str, Any]:
        """Kind and fields, for JSON."""
        return {"kind": self.kind} | asdict(self)


def label_column(rows: Rows, columns: Sequence[str], where: str) -> list[Any]:
    """The cells of the only column of labels."""
    return [as_number(cell) if isinstance(cell, str) else cell for cell in column(rows, columns or LABEL_COLUMNS, where)]


def numbers(cells: Sequence[Any], name: str, where: str) -> Tensor:
    """Cells as numbers (N,); an empty one is NaN."""
    values = [as_number(str(cell)) if str(cell).strip() else float("nan") for cell in cells]
    if wrong := [value for value in values if isinstance(value, str)]:
        raise DataError(f"{where}: {name} must be numbers; got {wrong[0]!r}")
    return torch.tensor([float(value) for value in values])


def over_streams(loss: Callable[[Tensor], Tensor], logits: Tensor) -> Tensor:
    """The mean of a loss of (B, outputs) over the streams of (B, S, outputs)."""
    return torch.stack([loss(stream) for stream in logits.unbind(1)]).mean()
