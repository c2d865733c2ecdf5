"""Multiple instance learning: what is known of bags, nothing of their instances.

loss = mean over the streams of a model of the loss of the kind of label          answer = mean over the streams

Kinds of labels are in `targets`: two classes, several, several labels at once, a number, survival. The threshold is 0.5, or the
best one on the validation bags, or as in the paper.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from setstream.errors import ConfigurationError, DataError
from setstream.models.model import SetModel
from setstream.tasks.mil.bags import CLASSIC, Bag, Bags, classic, read_bags, slides_of, stored
from setstream.tasks.mil.metrics import intervals
from setstream.tasks.mil.models import MODELS
from setstream.tasks.mil.predictions import bag_logits, write_results
from setstream.tasks.mil.released import MODELS as RELEASED
from setstream.tasks.mil.splits import folds, positions, read_splits
from setstream.tasks.mil.targets import Answers, Binary, Target, target_class
from setstream.training.task import Batch, Encode, Task, in_epochs, mix

__all__ = ["CLASSIC", "Bag", "Bags", "Mil", "classic", "folds", "read_bags", "stored"]

ENOUGH = 20  #: with fewer test bags, no intervals are computed
#: Options of a run, and the share of the training bags that chooses weights and thresholds.
DEFAULTS: dict[str, Any] = {
    "epochs": 20, "batch": 1, "optimizer": "adamw", "lr": 1e-3, "weight_decay": 1e-2, "schedule": "cosine", "gradient": "exact",
    "chunk_size": 4096,
}  # fmt: skip
# Attention to rare instances is found suddenly, after up to 14 epochs without progress in simulated cohorts: be patient.
VALIDATION, PATIENCE = 0.2, 15


@dataclass(eq=False)
class Mil(Task):
    """Bags with labels: a classic benchmark, or your own files of features or images.

    Features in memory are standardised by those of the training bags; features in files are used as they are, and read chunk by
    chunk.
    """

    name = "mil"
    summary = "multiple instance learning on bags: classic benchmarks, slides, patients (classes, numbers, survival)"
    report = "setstream.tasks.mil.report:add_report"
    repeated = ("fold", "repeat", "inner")
    models = MODELS | RELEASED

    data: str = "musk1"  #: musk1, musk2, elephant or ucsb; or a path for `ss.data.open`: features of slides, folders of images
    labels: str | None = None  #: for files: a CSV with ids and labels
    kind: str = "binary"  #: for files: binary, classes, multilabel, regression, cox or discrete-time
    columns: Sequence[str] = ()  #: the columns of labels; without them, the usual names
    positive: str | None = None  #: the label that counts as 1, if labels are names
    patient: str | None = None  #: the column of patients, whose slides are one bag: case_id
    split: str | None = None  #: a file or folder of splits (see `tasks.mil.splits`); None: one of `count` folds is held out
    fold: int = 0
    count: int = 10
    repeat: int = 0  #: the seed of the folds
    inner: int | None = None  #: hold out this fold of the training bags instead of the test bags, to compare options
    inner_count: int = 5
    validation: float = 0.0  #: the share of the training bags for thresholds and `select`, unless the split has such bags
    threshold: str = (
        "validation"  #: "reported": Youden's threshold on the test bags themselves, as in the paper: too favourable
    )
    class_weights: bool = False  #: give all classes the same weight in the loss
    test_chunk: int = 256  #: instances per chunk in a test
    bags: Bags | None = None  #: the bags themselves, instead of `data`
    target: Target = field(init=False, default=Binary())

    def __post_init__(self) -> None:
        if self.threshold not in ("validation", "reported"):
            raise ConfigurationError(f"threshold is validation or reported; got {self.threshold!r}")
        if not 0 <= self.validation <= 0.5:
            raise ConfigurationError(f"validation must be a share from 0 to 0.5; got {self.validation}")
        whole = self._read()
        chosen = self._divide(whole)
        self.train, self.test = whole.select(chosen["train"]), whole.select(chosen.get("test", chosen.get("val", [])))
        self.val = whole.select(chosen["val"]) if "val" in chosen else None
        if not len(self.train) or not len(self.test):
            raise DataError(f"there are {len(self.train)} training and {len(self.test)} test bags: both must have some")
        if isinstance(self.train.bags[0], Tensor):
            raw = self.train
            self.train, self.test = raw.standardised(raw), self.test.standardised(raw)
            self.val = self.val and self.val.standardised(raw)
        self.target = whole.target.fitted(self.train.labels, self.class_weights)

    def _read(self) -> Bags:
        """All bags, each with an id."""
        bags, data = self.bags, self.data
        if bags is None and data not in CLASSIC and ("/" in data or Path(data).exists()):
            columns = [self.columns] if isinstance(self.columns, str) else self.columns
            bags = stored(data, self.labels, target_class(self.kind), columns, self.positive, self.patient)
        bags = classic(data) if bags is None else bags
        return bags if bags.ids else replace(bags, ids=[str(number) for number in range(len(bags))])

    def _divide(self, whole: Bags) -> dict[str, list[int]]:
        """The positions of the bags of each part: train, test, and perhaps val."""
        strata = whole.target.strata(whole.labels)
        if self.split is not None:
            splits, names = read_splits(self.split), [[id] for id in whole.ids]
            if not 0 <= self.fold < len(splits):
                raise ConfigurationError(f"{self.split} has {len(splits)} splits, 0 to {len(splits) - 1}; got fold {self.fold}")
            for known, bag in zip(names, whole.bags, strict=True):
                known += [] if isinstance(bag, Tensor) else [slide.id for slide in slides_of(bag)]
            chosen = positions(splits[self.fold], names, self.split)
        else:
            chosen = {"test": folds(strata, self.count, seed=mix(self.repeat, 7) % 2**32)[self.fold]}
        held_out = {number for part in ("test", "val") for number in chosen.get(part, [])}
        train = chosen.get("train", [number for number in range(len(whole)) if number not in held_out])
        if self.inner is not None:
            train = sorted([*train, *chosen.pop("val", [])])
            parts = folds(strata[train], self.inner_count, seed=mix(self.repeat, 13) % 2**32)
            chosen["test"] = [train[number] for number in parts[self.inner]]
            train = [number for number in train if number not in set(chosen["test"])]
        if self.validation and "val" not in chosen:
            parts = folds(strata[train], max(2, round(1 / self.validation)), seed=mix(self.repeat, 11) % 2**32)
            chosen["val"] = [train[number] for number in parts[0]]
            train = [number for number in train if number not in set(chosen["val"])]
        return chosen | {"train": train}

    @classmethod
    def defaults(cls, task_options: dict[str, Any]) -> dict[str, Any]:
        share = task_options.get("validation", VALIDATION)
        chosen = {"select": "-loss", "patience": PATIENCE} if share else {}
        return (
            DEFAULTS
            | chosen
            | {"task_options": {"validation": share}}
            | target_class(task_options.get("kind", cls.kind)).defaults
        )

    @classmethod
    def fold_count(cls, task_options: dict[str, Any]) -> int | None:
        split = task_options.get("split")
        return None if split is None else len(read_splits(split))

    @property
    def size(self) -> int:
        return len(self.train)

    @property
    def compares(self) -> bool:
        return self.target.compares

    @property
    def held_out(self) -> str:
        return "test" if self.val is None else "validation"

    def build(self, model: str, **options: Any) -> SetModel:
        bag, outputs = self.train.bags[0], self.target.outputs
        shape = bag.shape[1:] if isinstance(bag, Tensor) else bag.shape
        known = {"in_dim": shape[0] if len(shape) == 1 else None} | ({} if outputs == 1 else {"outputs": outputs})
        return super().build(model, **(known | options))

    def batch(self, step: int, size: int, generator: torch.Generator) -> Batch:
        picked = self.train.select(in_epochs(step, size, len(self.train), self.seed, self.repeat))
        return {"bags": picked.bags, "label": picked.labels}

    def loss(self, model: SetModel, batch: Batch, encode: Encode) -> Tensor:
        bags = [bag.to(model.encoder.device) if isinstance(bag, Tensor) else bag for bag in batch["bags"]]
        # Sources one after another: a batch of any size needs the memory of one chunk, and a state for each bag.
        one_by_one = encode.gradient not in ("full", "subset") and not isinstance(bags[0], Tensor)
        groups = [[bag] for bag in bags] if one_by_one else [bags]
        logits = torch.cat([model.head(encode(model.encoder, group)) for group in groups])
        return self.target.loss(logits.unflatten(1, (-1, self.target.outputs)), batch["label"])

    def logits(self, model: SetModel, bags: Iterable[Bag]) -> Tensor:
        """The logits (N, S, outputs) of the streams; in chunks, unless the model needs whole bags."""
        return bag_logits(model, bags, self.test_chunk).unflatten(1, (-1, self.target.outputs))

    def probabilities(self, model: SetModel, bags: Iterable[Bag]) -> Tensor:
        """The answer about each bag: of two classes, the probability."""
        return self.target.predict(self.logits(model, bags))

    def evaluate(self, model: SetModel, *, quick: bool = False) -> dict[str, float]:
        """Metrics of the test bags; if `quick`, of the validation bags if there are some."""
        return self._judge(model, quick)[0]

    def conclude(self, model: SetModel, folder: Path) -> dict[str, float]:
        """The metrics of the test bags; writes their predictions, and the model with its thresholds."""
        metrics, target, answers = self._judge(model, quick=False)
        write_results(folder, model, target, self.test.ids, answers)
        return metrics

    @torch.no_grad()
    def _judge(self, model: SetModel, quick: bool) -> tuple[dict[str, float], Target, Answers]:
        """Metrics, the target with thresholds, and the answers that were judged."""
        target, bags = self.target, self.test if self.val is None else self.val
        logits = self.logits(model, bags.bags)
        if self.val is not None:
            target = target.tuned(Answers(target.predict(logits), bags.labels))
            if not quick:
                bags, logits = self.test, self.logits(model, self.test.bags)
        answers = Answers(target.predict(logits), bags.labels)
        if self.threshold == "reported" and bags is self.test:
            target = target.tuned(answers, youden=True)
        metrics = target.summary(answers)
        if not quick and len(bags) >= ENOUGH:
            tested = target  # of the last assignment
            metrics |= intervals(lambda rows: tested.summary(Answers(*(x[rows] for x in answers))), len(bags), target.reported)
        return metrics | {"loss": float(target.loss(logits, bags.labels)), "bags": float(len(bags))}, target, answers
