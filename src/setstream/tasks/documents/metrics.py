"""F1 of many labels at once, from scores and truths (D, L).

    micro   2 TP / (2 TP + FP + FN)      counts over all documents and labels
    macro   the mean over labels of each label's F1; a label that is neither present nor predicted counts 0

Intervals are bootstraps over documents: a draw is the count of each document, w (D,), and TP of a label is w · tp.
"""

import torch
from torch import Tensor


def f1_scores(predicted: Tensor, truth: Tensor, weight: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Micro and macro F1 of bool (D, L); with weights (R, D) of documents, R of each."""
    if weight is None:
        micro, macro = f1_scores(predicted, truth, torch.ones(1, len(truth)))
        return micro[0], macro[0]
    hits = weight @ (predicted & truth).float()  # (R, L)
    total = weight @ (predicted.float() + truth.float())  # 2 TP + FP + FN
    micro = 2 * hits.sum(1).double() / total.sum(1).double().clamp(min=1)
    return micro, (2 * hits.double() / total.double().clamp(min=1)).mean(1)


def best_threshold(scores: Tensor, truth: Tensor) -> float:
    """The threshold with the highest micro F1, halfway between two neighbouring scores."""
    order = scores.flatten().double().sort(descending=True)
    hits = truth.flatten()[order.indices].double().cumsum(0)
    taken = torch.arange(1, len(hits) + 1, dtype=torch.float64)
    micro = 2 * hits / (taken + truth.sum())
    values = order.values
    ends = torch.cat([values[1:] < values[:-1], torch.tensor([True])])  # equal scores are taken together
    best = int(micro.masked_fill(~ends, -1.0).argmax())
    below = float(values[best + 1]) if best + 1 < len(values) else 0.0
    return (float(values[best]) + below) / 2


def intervals(predicted: Tensor, truth: Tensor, draws: int = 1000, seed: int = 0, level: float = 0.95) -> dict[str, float]:
    """Bootstrap intervals of micro and macro F1 over documents: `micro_f1_low`, `micro_f1_high` and so on."""
    generator = torch.Generator().manual_seed(seed)
    scores = []
    for start in range(0, draws, 100):
        index = torch.randint(len(truth), (min(100, draws - start), len(truth)), generator=generator)
        weight = torch.zeros(index.shape).scatter_add_(1, index, torch.ones(index.shape))
        scores.append(f1_scores(predicted, truth, weight))
    ends = torch.tensor([(1 - level) / 2, (1 + level) / 2], dtype=torch.float64)
    result = {}
    for name, values in zip(("micro_f1", "macro_f1"), zip(*scores, strict=True), strict=True):
        result[f"{name}_low"], result[f"{name}_high"] = torch.quantile(torch.cat(values), ends).tolist()
    return result


def summary(scores: Tensor, truth: Tensor, threshold: float) -> dict[str, float]:
    """Micro and macro F1 at 0.5 and at a tuned threshold."""
    metrics = {"threshold": threshold}
    for suffix, limit in (("", 0.5), ("_tuned", threshold)):
        micro, macro = f1_scores(scores >= limit, truth)
        metrics |= {f"micro_f1{suffix}": float(micro), f"macro_f1{suffix}": float(macro)}
    return metrics
