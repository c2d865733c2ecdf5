"""Metrics from answers and what is known: of labels, classes, numbers and survival."""

import math
from collections.abc import Callable, Iterable, Sequence

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
    ranks = _ranks(probability.double())
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


def mean(values: Sequence[float]) -> float:
    """The mean of the values that are known; NaN if none is."""
    known = [value for value in values if not math.isnan(value)]
    return sum(known) / len(known) if known else float("nan")


def selection(accuracy: float, area: float) -> dict[str, float]:
    """The mean of both, which the paper selects models by; nothing where the area is not known."""
    return {} if math.isnan(area) else {"selection": (accuracy + area) / 2}


def summary(probability: Tensor, label: Tensor, threshold: float = 0.5) -> dict[str, float]:
    """Accuracy, AUROC, F1 and `selection` of one label."""
    predicted = probability >= threshold
    accuracy, area = float((predicted == (label > 0)).double().mean()), auroc(probability, label)
    metrics = {"accuracy": accuracy, "auroc": area, "f1": f1(predicted, label), "threshold": threshold}
    return metrics | selection(accuracy, area)


def confusion(predicted: Tensor, label: Tensor, classes: int) -> Tensor:
    """How often a class (rows) was answered with a class (columns)."""
    return (label.long() * classes + predicted.long()).bincount(minlength=classes**2).view(classes, classes)


def kappa(counts: Tensor, *, quadratic: bool = False) -> float:
    """Cohen's kappa of a confusion matrix; `quadratic`: disagreements weigh as the squares of their distances.

    >>> kappa(torch.tensor([[20, 5], [10, 15]]))
    0.4
    """
    counts, number = counts.double(), torch.arange(len(counts))
    weights = (number[:, None] - number).double().square() if quadratic else (number[:, None] != number).double()
    expected = counts.sum(1)[:, None] * counts.sum(0) / counts.sum()
    chance = float((weights * expected).sum())
    return round(1 - float((weights * counts).sum()) / chance, 12) if chance else float("nan")


def class_summary(probability: Tensor, label: Tensor) -> dict[str, float]:
    """Metrics of several classes from probabilities (N, K): means over the classes of AUROC (one against all others) and F1."""
    predicted, classes = probability.argmax(1), probability.shape[1]
    counts = confusion(predicted, label, classes)
    recalls = [float(row[number] / row.sum()) if row.sum() else float("nan") for number, row in enumerate(counts)]
    each = [(predicted == number, (label == number).long(), probability[:, number]) for number in range(classes)]
    balanced, area = mean(recalls), mean([auroc(score, truth) for _, truth, score in each])
    return {
        "accuracy": float(counts.diag().sum() / counts.sum()),
        "balanced_accuracy": balanced,
        "auroc": area,
        "kappa": kappa(counts),
        "quadratic_kappa": kappa(counts, quadratic=True),
        "f1": mean([f1(answer, truth) for answer, truth, _ in each]),
    } | selection(balanced, area)


def regression_summary(predicted: Tensor, value: Tensor) -> dict[str, float]:
    """Mean absolute and root mean square error, R² (the `selection`) and Spearman's rank correlation."""
    predicted, value = predicted.double(), value.double()
    error, spread = predicted - value, (value - value.mean()).square().sum()
    found = {"mae": float(error.abs().mean()), "rmse": float(error.square().mean().sqrt())}
    ranks = torch.stack([_ranks(predicted), _ranks(value)])
    rank = float(torch.corrcoef(ranks)[0, 1]) if len(value) > 1 else float("nan")
    found |= {"r2": float(1 - error.square().sum() / spread) if spread else float("nan"), "spearman": rank}
    return found if math.isnan(found["r2"]) else found | {"selection": found["r2"]}


def _ranks(values: Tensor) -> Tensor:
    """Ranks from 1, the mean rank for ties."""
    _, inverse, counts = values.unique(return_inverse=True, return_counts=True)
    return (counts.cumsum(0) - (counts - 1) / 2)[inverse]


def c_index(risk: Tensor, time: Tensor, event: Tensor) -> float:
    """Harrell's concordance: of all pairs of which the first is known to have the event before the second, how many have the
    larger risk first; ties of the risk count half.

    >>> c_index(torch.tensor([3.0, 2.0, 1.0]), torch.tensor([1.0, 2.0, 3.0]), torch.tensor([1, 1, 0]))
    1.0
    """
    later = (time[None] > time[:, None]) | ((time[None] == time[:, None]) & (event[None] == 0) & (event[:, None] > 0))
    pairs = later & (event[:, None] > 0)
    right = (risk[:, None] > risk[None]).double() + 0.5 * (risk[:, None] == risk[None]).double()
    return float((right * pairs).sum() / pairs.sum()) if bool(pairs.any()) else float("nan")


def kaplan_meier(time: Tensor, event: Tensor) -> tuple[Tensor, Tensor]:
    """The times of events, from 0, and the share of patients without the event after each.

    >>> kaplan_meier(torch.tensor([1.0, 2.0, 3.0, 4.0]), torch.tensor([1, 0, 1, 1]))
    (tensor([0., 1., 3., 4.]), tensor([1.0000, 0.7500, 0.3750, 0.0000]))
    """
    times = time[event > 0].unique()
    at_risk = (time[None] >= times[:, None]).sum(1)
    events = ((time[None] == times[:, None]) & (event > 0)[None]).sum(1)
    survival = (1 - events / at_risk).cumprod(0)
    return torch.cat([times.new_zeros(1), times]), torch.cat([survival.new_ones(1), survival])


def logrank(time: Tensor, event: Tensor, group: Tensor) -> float:
    """The p-value of the log-rank test that two groups (a bool each) have the same survival."""
    times = time[event > 0].unique()
    at_risk = (time[None] >= times[:, None]).double()
    events = ((time[None] == times[:, None]) & (event > 0)[None]).double()
    total, ours, deaths = at_risk.sum(1), at_risk[:, group].sum(1), events.sum(1)
    share = ours / total
    variance = float((deaths * share * (1 - share) * (total - deaths) / (total - 1).clamp(min=1)).sum())
    observed = float(events[:, group].sum() - (deaths * share).sum())
    return math.erfc(math.sqrt(observed**2 / variance / 2)) if variance > 0 else float("nan")


def intervals(
    measure: Callable[[Tensor], dict[str, float]],
    count: int,
    names: Iterable[str],
    draws: int = 1000,
    seed: int = 0,
    level: float = 0.95,
) -> dict[str, float]:
    """Bootstrap intervals over `count` bags of the named metrics of `measure(rows)`: `accuracy_low`, `accuracy_high`, ..."""
    index = torch.randint(count, (draws, count), generator=torch.Generator().manual_seed(seed))
    drawn = [measure(rows) for rows in index]
    values = {name: torch.tensor([row[name] for row in drawn], dtype=torch.float64) for name in names}
    return interval_ends(values, level)
