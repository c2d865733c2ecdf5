"""Multiple instance learning: a label for each bag, none for its instances.

loss = mean over the streams of w_y BCE(logit, y)          p = mean over the streams of sigmoid(logit),   ŷ = [p ≥ τ]

w_y is one, or n / (2 n_y) where classes are balanced. τ is 0.5, or the best threshold on the validation bags.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from setstream.data import SetSource
from setstream.errors import ConfigurationError
from setstream.gradients.encode import encode as encode_sets
from setstream.models.model import SetModel
from setstream.tasks.mil.bags import CLASSIC, Bags, classic, folds, stored
from setstream.tasks.mil.metrics import best_threshold, intervals, summary
from setstream.tasks.mil.models import MODELS
from setstream.training.seeds import in_epochs, mix
from setstream.training.task import Batch, Encode, Task

Bag = Tensor | SetSource
#: With fewer test bags an interval says nothing.
ENOUGH = 20


class Mil(Task):
    """Bags with labels: a classic benchmark, or files of features or images of your own.

    data:           musk1, musk2, elephant or ucsb; or a path that `ss.data.open` knows: features of slides, folders of images.
    labels:         of such files: a CSV with ids and labels; positive: the label that counts as 1, where labels have names.
    split:          a CSV that says what is train, val and test; without one, folds:
    fold, count:    which of how many folds is held out; repeat: another way of folding.
    validation:     share of the training bags that chooses the threshold, and what a run's `select` looks at.
    class_weights:  weigh both classes alike, however many bags they have.
    test_chunk:     instances at a time in a test.

    Features in memory are standardised by those of the training bags; those in files are taken as they are.
    Instances that are images are served from their files chunk by chunk, and never in memory as a whole.
    """

    name = "mil"
    summary = "multiple instance learning on bags: classic benchmarks, slides (accuracy, AUROC, F1)"
    models: ClassVar[dict[str, Callable[..., SetModel]]] = MODELS

    def __init__(
        self,
        data: str = "musk1",
        labels: str | None = None,
        split: str | None = None,
        positive: str | None = None,
        fold: int = 0,
        count: int = 10,
        repeat: int = 0,
        validation: float = 0.0,
        class_weights: bool = False,
        test_chunk: int = 256,
        bags: Bags | None = None,
    ) -> None:
        self.data, self.fold, self.count, self.repeat, self.test_chunk = data, fold, count, repeat, test_chunk
        own = bags is None and data not in CLASSIC and ("/" in data or Path(data).exists())
        sets, everything = stored(data, labels, positive) if own else (None, classic(data) if bags is None else bags)
        chosen: dict[str, list[int]] = {}
        if split is not None and sets is not None:
            places = {name: number for number, name in enumerate(sets.ids)}
            chosen = {name: [places[own] for own in part.ids] for name, part in sets.split(split).items()}
        else:
            chosen["test"] = folds(everything.labels, count, seed=mix(repeat, 7) % 2**32)[fold]
        held_out = {number for part in ("test", "val") for number in chosen.get(part, [])}
        rest = chosen.get("train", [number for number in range(len(everything)) if number not in held_out])
        if not 0 <= validation <= 0.5 or (validation and "val" in chosen):
            raise ConfigurationError(f"validation is a share up to 0.5, and the split must not name one, too; got {validation}")
        if validation:
            parts = folds(everything.labels[rest], max(2, round(1 / validation)), seed=mix(repeat, 11) % 2**32)
            chosen["val"] = [rest[number] for number in parts[0]]
            rest = [number for number in rest if number not in set(chosen["val"])]
        self.train, self.test = everything.select(rest), everything.select(chosen.get("test", chosen.get("val", [])))
        self.validation = everything.select(chosen["val"]) if "val" in chosen else None
        if isinstance(self.train.bags[0], Tensor):
            train = self.train
            self.train, self.test = train.standardised(train), self.test.standardised(train)
            self.validation = self.validation and self.validation.standardised(train)
        positive_share = float(self.train.labels.float().mean())
        self.weights = (0.5 / (1 - positive_share), 0.5 / positive_share) if class_weights else (1.0, 1.0)

    def build(self, model: str, **options: Any) -> SetModel:
        """One of the models, for instances like these."""
        shape = self.train.shape()
        return super().build(model, **({"in_dim": shape[0] if len(shape) == 1 else None} | options))

    def batch(self, step: int, size: int, generator: torch.Generator) -> Batch:
        """Bags in an order that is drawn anew for every epoch."""
        picked = self.train.select(in_epochs(step, size, len(self.train), self.seed, self.repeat))
        return {"bags": picked.bags, "label": picked.labels.float()}

    def loss(self, model: SetModel, batch: Batch, encode: Encode) -> Tensor:
        """Cross-entropy of every stream, averaged."""
        label = batch["label"].unsqueeze(1)
        sets = as_sets(batch["bags"], model.encoder.device, vectors=encode.gradient != "subset")
        logits = model.head(encode(model.encoder, sets))
        weight = torch.where(label > 0, self.weights[1], self.weights[0]).expand_as(logits)
        return F.binary_cross_entropy_with_logits(logits, label.expand_as(logits), weight)

    @torch.no_grad()
    def probabilities(self, model: SetModel, bags: Sequence[Bag]) -> Tensor:
        """p of each bag; in chunks, unless the model needs whole bags."""
        gradient = "none" if model.encoder.pool.consistent else "full"
        found = []
        for bag in bags:
            sets = as_sets([bag], model.encoder.device)
            z = encode_sets(model.encoder, sets, chunk_size=self.test_chunk, gradient=gradient)
            found.append(model.head(z).sigmoid().mean(1).cpu())
        return torch.cat(found)

    def evaluate(self, model: SetModel, *, quick: bool = False) -> dict[str, float]:
        """Accuracy, AUROC and F1 on held-out bags; while training goes on, on the validation bags if there are some."""
        if quick and self.validation is not None:
            return summary(self.probabilities(model, self.validation.bags), self.validation.labels)
        threshold = 0.5
        if self.validation is not None:
            threshold = best_threshold(self.probabilities(model, self.validation.bags), self.validation.labels)
        probability = self.probabilities(model, self.test.bags)
        found = summary(probability, self.test.labels, threshold)
        if not quick and len(self.test) >= ENOUGH:
            found |= intervals(probability, self.test.labels, threshold)
        return found | {"error": 1 - found["accuracy"], "bags": float(len(self.test))}


def as_sets(bags: Sequence[Bag], home: torch.device | None, *, vectors: bool = True) -> list[Any]:
    """Bags as `encode` takes them: in memory; but files of images, and of vectors unless they are to be read, as sources."""
    return [
        bag.to(home) if isinstance(bag, Tensor) else bag.tensor().to(home) if vectors and len(bag.shape) == 1 else bag
        for bag in bags
    ]
