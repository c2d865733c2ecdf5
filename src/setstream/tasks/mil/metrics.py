"""Metrics of bag classifiers, from probabilities and labels."""

import math

import torch
from torch import Tensor

from setstream.tasks.registry import interval_ends


def auroc(probability: Tensor, label: Tensor) -> float:
    """The probability that a positive bag scores higher than a negative one; ties count half.

    >>> auroc(torch.tensor([0.1, 0.4, 0.35, 0.8]), torch.tensor([0, 0, 1, 1]))
    0.75
    """
    positive, negative = int(label.sum()), int((label == 0).sum())
    if not positive or not negative:
        return float("nan")
    _, inverse, counts = probability.double().unique(return_inverse=True, return_counts=True)
    ranks = (counts.cumsum(0) - (counts - 1) / 2)[inverse]  # mean rank of ties
    return float((ranks[label > 0].sum() - positive * (positive + 1) / 2) / (positive * negative))


def f1(predicted: Tensor, label: Tensor) -> float:
    """The harmonic mean of precision and recall of the positive class."""
    hits = int((predicted & (label > 0)).sum())
    total = int(predicted.sum()) + int(label.sum())
    return 2 * hits / total if total else 0.0


def best_threshold(probability: Tensor, label: Tensor, *, balanced: bool = False) -> float:
    """The threshold with the highest accuracy, halfway between two neighbouring probabilities.

    `balanced`: with the highest mean of the accuracies of both classes instead, which is that of Youden's index.
    """
    values = probability.unique()
    candidates = torch.cat([values[:1] - 1e-6, (values[1:] + values[:-1]) / 2, values[-1:] + 1e-6])
    right = ((probability[None] >= candidates[:, None]) == (label > 0)).double()
    if balanced and 0 < int(label.sum()) < len(label):
        score = right[:, label > 0].mean(1) + right[:, label == 0].mean(1)
    else:
        score = right.mean(1)
    return float(candidates[score.argmax()])


def summary(probability: Tensor, label: Tensor, threshold: float = 0.5) -> dict[str, float]:
    """Accuracy, AUROC, F1, and the mean of the first two, which the paper selects models by."""
    predicted = probability >= threshold
    accuracy, area = float((predicted == (label > 0)).double().mean()), auroc(probability, label)
    metrics = {"accuracy": accuracy, "auroc": area, "f1": f1(predicted, label), "threshold": threshold}
    return metrics if math.isnan(area) else metrics | {"selection": (accuracy + area) / 2}


def intervals(
    probability: Tensor, label: Tensor, threshold: float = 0.5, draws: int = 1000, seed: int = 0, level: float = 0.95
) -> dict[str, float]:
    """Bootstrap intervals of accuracy, AUROC and F1 over bags: `accuracy_low`, `accuracy_high` and so on."""
    index = torch.randint(len(label), (draws, len(label)), generator=torch.Generator().manual_seed(seed))
    drawn = [summary(probability[rows], label[rows], threshold) for rows in index]
    values = {name: torch.tensor([row[name] for row in drawn], dtype=torch.float64) for name in ("accuracy", "auroc", "f1")}
    return interval_ends(values, level)
