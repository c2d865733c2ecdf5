"""Multiple instance learning: a label for each bag, none for its instances.

loss = mean over the streams of BCE(logit, label)          p = mean over the streams of sigmoid(logit)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from setstream.model import SetModel
from setstream.tasks.mil.bags import Bags, classic, folds
from setstream.tasks.mil.metrics import summary
from setstream.tasks.mil.models import MODELS
from setstream.training.seeds import mix
from setstream.training.task import Batch, Encode, Task


class Mil(Task):
    """A classic benchmark, one fold of a cross-validation.

    data:         musk1, musk2, elephant or ucsb.
    fold, count:  which of how many folds is held out; repeat: another way of folding.
    """

    name = "mil"
    summary = "multiple instance learning on bags: classic benchmarks in cross-validation (accuracy, AUROC, F1)"
    models: ClassVar[dict[str, Callable[..., SetModel]]] = MODELS

    def __init__(self, data: str = "musk1", fold: int = 0, count: int = 10, repeat: int = 0, bags: Bags | None = None) -> None:
        self.data, self.fold, self.count, self.repeat = data, fold, count, repeat
        everything = classic(data) if bags is None else bags
        held_out = folds(everything.labels, count, seed=mix(repeat, 7) % 2**32)[fold]
        rest = [i for i in range(len(everything)) if i not in set(held_out)]
        train, test = everything.select(rest), everything.select(held_out)
        self.train, self.test = train.standardised(train), test.standardised(train)

    def build(self, model: str, **options: Any) -> SetModel:
        """One of the models, for features of this width."""
        return super().build(model, **({"in_dim": self.train.bags[0].shape[1]} | options))

    def batch(self, step: int, size: int, generator: torch.Generator) -> Batch:
        """Bags in an order that is drawn anew for every epoch."""
        total = len(self.train)
        chosen = []
        for number in range(step * size, (step + 1) * size):
            order = torch.Generator().manual_seed(mix(self.repeat, number // total, 5))
            chosen.append(int(torch.randperm(total, generator=order)[number % total]))
        picked = self.train.select(chosen)
        return {"bags": picked.bags, "label": picked.labels.float()}

    def loss(self, model: SetModel, batch: Batch, encode: Encode) -> Tensor:
        """Cross-entropy of every stream, averaged."""
        logits = model.head(encode(model.encoder, batch["bags"]))
        return F.binary_cross_entropy_with_logits(logits, batch["label"].unsqueeze(1).expand_as(logits))

    @torch.no_grad()
    def probabilities(self, model: SetModel, bags: list[Tensor]) -> Tensor:
        """p of each bag, whole bags at a time."""
        device = next(model.parameters()).device
        return torch.cat([model([bag.to(device)]).sigmoid().mean(1).cpu() for bag in bags])

    def evaluate(self, model: SetModel, *, quick: bool = False) -> dict[str, float]:
        """Accuracy, AUROC and F1 on the fold that is held out."""
        probability = self.probabilities(model, self.test.bags)
        found = summary(probability, self.test.labels)
        return found | {"error": 1 - found["accuracy"], "bags": float(len(self.test))}
