"""Survival: a time, and whether the event happened then (1) or the patient was last seen without it (0).

Cox, r_i the mean logit of the streams, over the patients of a batch (Breslow's way with equal times)::

    loss = - (1 / events) Σ_(i: event)  r_i - log Σ_(j: t_j ≥ t_i) exp r_j

Discrete time, K intervals with as many events each, hazards h_k = sigmoid(logit_k), S_k = Π_(l ≤ k) (1 - h_l), y the interval::

    event       - log S_(y-1) - log h_y        S_(-1) = 1        risk = - Σ_k S_k
    censored    - log S_y

Cox compares the patients of a batch, so its batches are large. The batch costs no memory: with `exact`, every patient is a
state that carries the gradient, and the elements are read again in the backward pass.
"""

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from setstream.data.dataset import column
from setstream.errors import ConfigurationError, DataError
from setstream.report.page import Page
from setstream.tasks.mil import metrics
from setstream.tasks.mil.targets import figures
from setstream.tasks.mil.targets.base import Answers, Rows, Target, numbers, over_streams

TIMES, EVENTS = ("time", "survival_months", "os_months", "os_days"), ("event", "status", "os_event", "dead")
CENSORED = ("censorship", "censored")  #: 1 where the event did not happen, as in the files of CLAM's survival models


def cox_loss(risk: Tensor, time: Tensor, event: Tensor) -> Tensor:
    """The negative log partial likelihood per event, of log risks (B,); zero without an event."""
    at_risk = time[None] >= time[:, None]
    log_sums = risk[None].expand_as(at_risk).masked_fill(~at_risk, float("-inf")).logsumexp(1)
    return ((log_sums - risk) * event).sum() / event.sum().clamp(min=1)


def discrete_loss(logits: Tensor, interval: Tensor, event: Tensor) -> Tensor:
    """The negative log-likelihood per patient, of the logits (B, K) of hazards; `interval` (B,) is that of the time."""
    log_survival = F.logsigmoid(-logits).cumsum(1)
    before = F.pad(log_survival, (1, 0)).gather(1, interval[:, None])[:, 0]
    after = log_survival.gather(1, interval[:, None])[:, 0]
    happened = before + F.logsigmoid(logits).gather(1, interval[:, None])[:, 0]
    return -torch.where(event > 0, happened, after).mean()


@dataclass(frozen=True)
class Survival(Target):
    """Values (N, 2): time and event. Answers are turned into a risk: more is worse."""

    reported = ("c_index",)

    cut: float = 0.0  #: patients with a larger risk than this are the group `high`

    @classmethod
    def read(cls, rows: Rows, columns: Sequence[str], positive: str | None, where: str) -> tuple[Self, Tensor]:
        if columns and len(columns) != 2:
            raise ConfigurationError(f'survival needs two columns, task.columns=["time", "event"]; got {list(columns)}')
        names = {name.lower(): name for name in rows[0]}
        time_names = columns[:1] or [names.get(name, name) for name in TIMES]
        event_names = columns[1:] or [names.get(name, name) for name in (*EVENTS, *CENSORED)]
        time, event = (numbers(column(rows, some, where), some[0], where) for some in (time_names, event_names))
        used = next(name for name in event_names if name in rows[0])
        event = 1 - event if used.lower() in CENSORED else event
        if not bool(time.isfinite().all()) or float(time.min()) < 0 or not set(event.tolist()) <= {0.0, 1.0}:
            raise DataError(f"{where}: every row needs a time of at least 0, and {used} that is 0 or 1")
        if not float(event.sum()):
            raise DataError(f"{where}: no row has an event, so there is nothing to learn; {used} is 1 where it happened")
        return cls(), torch.stack([time, event], 1)

    @abstractmethod
    def risk(self, predicted: Tensor) -> Tensor:
        """The risk (N,) of answers."""

    def tuned(self, answers: Answers, youden: bool = False) -> Self:
        return replace(self, cut=float(self.risk(answers.predicted).median()))

    def summary(self, answers: Answers) -> dict[str, float]:
        index = metrics.c_index(self.risk(answers.predicted), *answers.values.T)
        found = {"c_index": index, "events": float(answers.values[:, 1].sum())}
        return found if index != index else found | {"selection": index}

    def table(self, predicted: Tensor) -> dict[str, list[Any]]:
        risk = self.risk(predicted)
        return {"risk": risk.tolist(), "group": ["high" if value > self.cut else "low" for value in risk.tolist()]}

    def truth(self, values: Tensor) -> dict[str, list[Any]]:
        return {"time": values[:, 0].tolist(), "event": values[:, 1].long().tolist()}

    def strata(self, values: Tensor) -> Tensor:
        return values[:, 1].long()

    @classmethod
    def draw(cls, page: Page, folds: Sequence[tuple[Self, Answers]]) -> None:
        risks = [target.risk(fold.predicted) for target, fold in folds]
        high = torch.cat([risk > risk.median() for risk in risks])
        figures.add_kaplan_meier(page, torch.cat([fold.values for _, fold in folds]), high)


@dataclass(frozen=True)
class Cox(Survival):
    """Proportional hazards: one log risk."""

    kind = "cox"
    compares = True
    defaults: ClassVar[dict[str, Any]] = {"batch": 16}

    def loss(self, logits: Tensor, values: Tensor) -> Tensor:
        time, event = values.to(logits.dtype).T
        return over_streams(lambda stream: cox_loss(stream[:, 0], time, event), logits)

    def predict(self, logits: Tensor) -> Tensor:
        return logits.mean((1, 2))

    def risk(self, predicted: Tensor) -> Tensor:
        return predicted


@dataclass(frozen=True)
class DiscreteTime(Survival):
    """Hazards in intervals of time; answers are the survival (N, K) at their ends."""

    kind = "discrete-time"

    bins: int = 4
    edges: tuple[float, ...] = ()

    @property
    def outputs(self) -> int:
        return self.bins

    def fitted(self, values: Tensor, balanced: bool) -> Self:
        times = values[values[:, 1] > 0, 0].double()
        inner = torch.linspace(0, 1, self.bins + 1, dtype=torch.float64)[1:-1]
        return replace(self, edges=tuple(times.quantile(inner).tolist()))

    def loss(self, logits: Tensor, values: Tensor) -> Tensor:
        edges = values.new_tensor(self.edges)
        interval = torch.bucketize(values[:, 0].contiguous(), edges, right=True)
        return over_streams(lambda stream: discrete_loss(stream, interval, values[:, 1]), logits)

    def predict(self, logits: Tensor) -> Tensor:
        return (1 - logits.sigmoid().mean(1)).cumprod(1)

    def risk(self, predicted: Tensor) -> Tensor:
        return -predicted.sum(1)

    def table(self, predicted: Tensor) -> dict[str, list[Any]]:
        ends = [f"{edge:g}" for edge in self.edges]
        survival = {f"survival_{end}": column for end, column in zip(ends, predicted.T.tolist(), strict=False)}
        return super().table(predicted) | survival
