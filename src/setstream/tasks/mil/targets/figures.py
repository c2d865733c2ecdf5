"""Figures of a report about the test bags of one or several folds: ROC, confusion, calibration, scatter, Kaplan-Meier."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from setstream.report.page import Page, pyplot
from setstream.tasks.mil import metrics
from setstream.tasks.mil.targets.base import Answers

Labels = Mapping[str, Sequence[Answers]]  # for each label, the probabilities and labels of every fold
BINS = 5


def _axes(**options: Any) -> tuple[Any, Any]:
    figure, axis = pyplot().subplots(figsize=(5, 4.2), constrained_layout=True)
    axis.set(**options)
    return figure, axis


def roc(answers: Answers) -> tuple[Tensor, Tensor]:
    """False and true positive rates, from the largest threshold to the smallest; ties are one step."""
    order = answers.predicted.argsort(descending=True)
    score, label = answers.predicted[order], (answers.values[order] > 0).double()
    ends = torch.cat([(score.diff() != 0).nonzero().flatten(), torch.tensor([len(score) - 1])])
    true, false = label.cumsum(0)[ends], (1 - label).cumsum(0)[ends]
    zero = torch.zeros(1, dtype=torch.float64)
    return torch.cat([zero, false / false[-1].clamp(min=1)]), torch.cat([zero, true / true[-1].clamp(min=1)])


def pooled(folds: Sequence[Answers]) -> Answers:
    """The answers of all folds together."""
    return Answers(torch.cat([fold.predicted for fold in folds]), torch.cat([fold.values for fold in folds]))


def add_roc(page: Page, labels: Labels) -> None:
    """ROC curves: a thin line per fold, a thick one of all folds together."""
    figure, axis = _axes(xlabel="false positive rate", ylabel="true positive rate")
    axis.plot([0, 1], [0, 1], color="0.8", linewidth=1)
    for number, (name, folds) in enumerate(labels.items()):
        for fold in folds if len(folds) > 1 else ():
            axis.plot(*roc(fold), color=f"C{number % 10}", linewidth=0.6, alpha=0.5)
        whole = pooled(folds)
        axis.plot(*roc(whole), color=f"C{number % 10}", linewidth=2, label=f"{name}: {metrics.auroc(*whole):.3f}")
    axis.legend(loc="lower right", title="AUROC of all folds together")
    page.figure(figure, "ROC curves of the test bags")


def add_confusion(page: Page, names: Sequence[str], predicted: Tensor, label: Tensor) -> None:
    """How often each class got each answer."""
    counts = metrics.confusion(predicted, label, len(names)).tolist()
    rows = [[name, *map(str, row)] for name, row in zip(names, counts, strict=True)]
    page.table(["truth", *(f"answer {name}" for name in names)], rows, "Confusion matrix of the test bags of all folds.")


def add_calibration(page: Page, labels: Labels) -> None:
    """How often a label was right, against its mean probability, in bins with as many bags each."""
    figure, axis = _axes(xlabel="mean probability", ylabel="share of bags with the label", xlim=(0, 1), ylim=(0, 1))
    axis.plot([0, 1], [0, 1], color="0.8", linewidth=1)
    for name, folds in labels.items():
        whole = pooled(folds)
        parts = whole.predicted.argsort().tensor_split(BINS)
        points = [(float(whole.predicted[p].mean()), float((whole.values[p] > 0).double().mean())) for p in parts if len(p)]
        axis.plot(*zip(*points, strict=True), marker="o", label=name)
    axis.legend()
    page.figure(figure, f"Calibration on the test bags, in {BINS} bins with equal numbers of bags")


def add_scatter(page: Page, folds: Sequence[Answers]) -> None:
    """Predicted against true numbers."""
    figure, axis = _axes(xlabel="truth", ylabel="prediction")
    for fold in folds:
        axis.plot(fold.values, fold.predicted, ".", markersize=4)
    ends = [float(end) for end in pooled(folds).values.aminmax()]
    axis.plot(ends, ends, color="0.8", linewidth=1)
    page.figure(figure, "Predictions for the test bags; a colour per fold")


def add_kaplan_meier(page: Page, values: Tensor, high: Tensor) -> None:
    """Survival of the patients with high and low risk."""
    figure, axis = _axes(xlabel="time", ylabel="share without the event", ylim=(0, 1.02))
    for name, group in {"high risk": high, "low risk": ~high}.items():
        time, event = values[group].T
        times, survival = metrics.kaplan_meier(time, event)
        last = torch.cat([times, time.max()[None]]) if len(time) else times
        axis.step(last, torch.cat([survival, survival[-1:]])[: len(last)], where="post", label=f"{name} ({len(time)})")
    time, event = values.T
    p = metrics.logrank(time, event, high)
    axis.legend(title=f"log-rank p = {p:.2g}")
    page.figure(figure, "Kaplan-Meier curves of the test patients, divided at the median risk of their fold")
