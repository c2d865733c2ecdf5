"""The base of all estimators: their options, and how a network is built and fitted."""

import copy
import math
from collections.abc import Callable, Sequence, Sized
from contextlib import AbstractContextManager
from dataclasses import dataclass
from math import inf
from numbers import Real
from pathlib import Path
from typing import Any, ClassVar, Self, cast

import numpy as np
import torch
from sklearn.base import BaseEstimator
from sklearn.utils import check_random_state
from sklearn.utils.validation import check_is_fitted
from torch import Tensor

from setstream._utils.threads import threads
from setstream.errors import ConfigurationError
from setstream.gradients.encode import GRADIENTS
from setstream.integrations.sklearn.columns import TableColumns, fit_columns
from setstream.integrations.sklearn.ensemble import Members, Plan, RowLoss, number_rows, split
from setstream.integrations.sklearn.explain import Explanation, explain
from setstream.integrations.sklearn.fitting import MOST, Loss, Training, batches, encode_sets
from setstream.integrations.sklearn.network import MODELS, EnsembleHead, StreamsHead
from setstream.integrations.sklearn.saving import load_estimator, save_estimator
from setstream.integrations.sklearn.sets import Sources, naming_the_set, read_sets
from setstream.models.model import SetModel
from setstream.models.stream import evaluating
from setstream.training.config import TrainConfig
from setstream.training.processes import choose_device
from setstream.training.task import Encode

#: Options that are numbers, by their range; and those of them that may be "auto".
NUMBERS = {
    (1, inf): ("num_slots", "heads", "members", "epochs", "batch_size", "chunk_size", "grad_chunks", "n_iter_no_change"),
    (0, inf): ("min_steps", "learning_rate", "weight_decay"),
    (0, 1): ("dropout", "validation_fraction"),
}
AUTO = ("members", "epochs", "min_steps", "batch_size", "learning_rate")
#: Elements that a member sees in training, for "auto" epochs: fewer epochs of large data.
ELEMENTS = 600_000
#: Elements per step, for "auto" batches of more than 16 sets, and of more than 8.
BATCH, LARGEST = 4096, 2**16


@dataclass(kw_only=True, eq=False, repr=False)
class SetEstimator(BaseEstimator):
    """The options of an estimator over sets.

    Args:
        widths: Widths of phi's layers, which see one element at a time; the last is a multiple of 4.
        num_slots: The number of rows (slots) that a set becomes.
        heads: Heads of the attention that computes the slots.
        dropout: Dropout in the layers that read the slots and the statistics.
        elements_stream: Use what single elements decide: a stream of the largest output of any element, and minima and maxima
            among the statistics. Without it, elements can be removed from states. "auto": with it.
        members: Networks that are averaged; each learns from another part of the sets, and the rest tells how much to trust its
            streams. "auto": 2 to 4, fewer the more sets there are.
        epochs: How often each member sees its sets at most. "auto": 5 to 25, fewer the more elements there are.
        min_steps: The least number of steps of each member, if it does not stop early. "auto": 150; 0 if `epochs` is given.
        batch_size: Sets per step. "auto": one in 8, at least 16 (8 of large sets), and else not more than 4,096
            elements.
        learning_rate: Learning rate of Adam, with a cosine schedule. "auto": 0.002 for 64 sets per step, less for fewer.
        weight_decay: Weight decay of Adam.
        gradient: As in `ss.encode`; "auto" is the full gradient, computed chunk by chunk ("exact") where sets are larger than
            chunk_size. Of sets with more than 8,192 elements, a step then reads so many at random; statistics, trust and
            calibration are those of whole sets.
        chunk_size: As in `ss.encode`.
        grad_chunks: As in `ss.encode`.
        early_stopping: Keep the weights that do best on the sets that a member does not learn from, and stop when they stop
            improving. "auto": if there are at least 40 sets.
        validation_fraction: With one member: the share of the sets that it does not learn from.
        n_iter_no_change: Tests on these sets without improvement before training stops.
        missing: Whether NaN is a missing value: it is replaced by the mean of its column, and the network is told. Infinity
            is an error always. "auto": in sets with named columns (of `FrameToSets`, or DataFrames).
        random_state: A seed, or a numpy RandomState.
        device: auto, cpu, cuda or mps.
        verbose: 1 shows progress: a bar on a terminal, a line per epoch elsewhere.
    """

    #: Which of `MODELS` it trains, and whether "auto" includes the stream of elements.
    _network: ClassVar[str]
    _with_elements: ClassVar[bool] = True
    #: The columns that it was fitted on, if they have names.
    _columns: ClassVar[TableColumns | None] = None

    widths: Sequence[int] = (128, 64)
    num_slots: int = 16
    heads: int = 4
    dropout: float = 0.5
    elements_stream: bool | str = "auto"
    members: int | str = "auto"
    epochs: int | str = "auto"
    min_steps: int | str = "auto"
    batch_size: int | str = "auto"
    learning_rate: float | str = "auto"
    weight_decay: float = 5e-3
    gradient: str = "auto"
    chunk_size: int = 4096
    grad_chunks: int = 1
    early_stopping: bool | str = "auto"
    validation_fraction: float = 0.1
    n_iter_no_change: int = 10
    missing: bool | str = "auto"
    random_state: Any = None
    device: str = "auto"
    verbose: int = 0

    def _check_options(self) -> None:
        known = ("auto", *(mode for mode in GRADIENTS if mode != "none"))
        if self.gradient not in known:
            raise ConfigurationError(f"gradient must be one of {', '.join(known)}; got {self.gradient!r}")
        if not isinstance(self.widths, list | tuple | np.ndarray):
            raise ConfigurationError(f"widths must be a list of the widths of phi's layers, like (64, 32); got {self.widths!r}")
        for name in ("elements_stream", "early_stopping", "missing"):
            if getattr(self, name) not in (True, False, "auto"):
                raise ConfigurationError(f"{name} must be True, False or 'auto'; got {getattr(self, name)!r}")
        for (least, most), name in ((limits, name) for limits, names in NUMBERS.items() for name in names):
            value = getattr(self, name)
            if value == "auto" and name in AUTO:
                continue
            if isinstance(value, bool) or not isinstance(value, Real) or not least <= float(value) <= most:
                raise ConfigurationError(f"{name} must be a number from {least:g} to {most:g}; got {value!r}")

    def _plan(self, sets: Sequence[Sized]) -> tuple[Plan, int]:
        """What "auto" means for these sets: how to train, and the number of members."""
        count, elements = len(sets), max(1, sum(min(len(one), MOST) for one in sets))
        members = self.members if self.members != "auto" else 4 if count <= 100 else 3 if count <= 3000 else 2
        fewest = max(8, min(16, LARGEST * count // elements))
        batch = self.batch_size if self.batch_size != "auto" else max(fewest, min(count // 8, BATCH * count // elements))
        rate = self.learning_rate if self.learning_rate != "auto" else 2e-3 * math.sqrt(min(128, int(batch)) / 64)
        epochs = self.epochs if self.epochs != "auto" else min(25, max(5, round(ELEMENTS / elements)))
        least = self.min_steps if self.min_steps != "auto" else 150 if self.epochs == "auto" else 0
        steps = max(1, int(least), int(epochs) * math.ceil(count / int(batch)))
        stop = count >= 40 if self.early_stopping == "auto" else bool(self.early_stopping)
        seed = int(check_random_state(self.random_state).randint(2**31 - 1))
        patience = int(self.n_iter_no_change) if stop else None
        return Plan(steps, int(batch), float(rate), float(self.weight_decay), patience, seed), int(members)

    def _build(self, sets: Sources, answers: dict[str, Any], seed: int, members: int | None) -> SetModel:
        """A new network, standardised by the sets; `answers`: the options of its head."""
        torch.manual_seed(seed)
        widths, with_elements = [int(width) for width in self.widths], self.elements_stream
        with_elements = self._with_elements if with_elements == "auto" else bool(with_elements)
        network = {"in_dim": int(self.n_features_in_), **answers, "widths": widths, "num_slots": int(self.num_slots)}
        network |= {"heads": int(self.heads), "dropout": float(self.dropout), "elements_stream": with_elements}
        network |= {} if members is None else {"members": members}
        chunk_size = max(int(self.chunk_size), 1024)
        columns, first = fit_columns(int(self.n_features_in_), self._columns, self._takes_nan, sets, chunk_size)
        network |= columns
        builder = MODELS[self._network]
        model = builder(**network).remember(builder, network)
        model.encoder.phi.get_submodule("0").load_state_dict(first.state_dict())
        return model.to(choose_device(self.device))

    @property
    def _takes_nan(self) -> bool:
        return self._columns is not None if self.missing == "auto" else bool(self.missing)

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.allow_nan = self.missing is True
        return tags

    @property
    def _encode(self) -> Encode:
        return Encode(self.gradient, self.chunk_size, self.grad_chunks)

    @property
    def _title(self) -> str | None:
        return type(self).__name__ if self.verbose else None

    def _threads(self, sets: Sources, batch: int) -> AbstractContextManager[None]:
        mean = sum(min(len(one), int(self.chunk_size)) for one in sets) / len(sets)
        numbers = mean * batch * max([int(self.n_features_in_), *map(int, self.widths)])
        return threads(None if numbers > 2**24 else 1)

    def _fit(
        self, sets: Sources, targets: Tensor, weights: Tensor, answers: dict[str, Any], loss: RowLoss, strata: Any
    ) -> None:
        """Train a new network of several members, without touching the caller's random numbers."""
        self._check_options()
        plan, members = self._plan(sets)
        share = float(self.validation_fraction) if plan.patience is not None else 0.0
        folds = split(len(sets), members, share, strata, plan.seed)
        if self.early_stopping is True and not all(len(held) for _, held in folds):
            raise ConfigurationError(f"early_stopping cannot hold sets out: there are {len(sets)} sets for {members} members")
        with torch.random.fork_rng(), naming_the_set(self, sets), self._threads(sets, plan.batch):
            model = self._build(sets, answers, plan.seed, members)
            training = Members(model, self._encode, sets, targets, weights / weights.mean(), loss, plan)
            training.fit(folds, self._title)
        self.model_: SetModel = model
        self.loss_curve_, self.n_iter_ = training.losses, len(training.losses)
        self.validation_losses_ = training.tests or None
        self._training: Training | None = None

    def _start(
        self,
        sets: Sources,
        answers: dict[str, Any],
        loss: Loss,
        steps: int | None,
        members: int | None,
        fitted: SetModel | None = None,
    ) -> Training:
        """A network in training as a whole, a new one, or one that was fitted before.

        `steps` None: a constant learning rate, for any number of calls.
        """
        plan, _ = self._plan(sets)
        rates: dict[str, Any] = {"lr": plan.rate, "weight_decay": plan.weight_decay, "steps": steps or 1}
        rates["schedule"] = "constant" if steps is None else "cosine"
        config = TrainConfig("sklearn", self._network, batch=plan.batch, seed=plan.seed, **rates)
        model = self._build(sets, answers, plan.seed, members) if fitted is None else copy.deepcopy(fitted)
        return Training(model, config, self._encode, loss, self._title)

    def _partial_fit(self, sets: Sources, targets: Tensor, weights: Tensor, answers: dict[str, Any], loss: Loss) -> None:
        """One pass over the sets, from the weights of earlier passes; the first pass standardises for all."""
        self._check_options()
        training = getattr(self, "_training", None)
        with torch.random.fork_rng(), naming_the_set(self, sets):
            if training is None:
                members = self._plan(sets)[1] if self.members != "auto" else 1
                fitted = getattr(self, "model_", None)
                training = self._start(sets, answers, loss, None, members, fitted)
                if fitted is None and isinstance(training.model.head, EnsembleHead):
                    plan = Plan(1, 1, 0.0, 0.0, None, 0)
                    Members(training.model, self._encode, sets, targets, weights, number_rows, plan).measure()
            with self._threads(sets, training.config.batch):
                losses = training.run(sets, targets, weights, math.ceil(len(sets) / training.config.batch))
        self._training, self.model_ = training, training.model
        self.loss_curve_ = [*getattr(self, "loss_curve_", []), *losses]
        self.n_iter_ = len(self.loss_curve_)

    def save_pretrained(self, folder: str | Path) -> Path:
        """Write the fitted estimator, as `SetModel.save_pretrained` writes its network: the folder can be served, too."""
        check_is_fitted(self)
        return save_estimator(self, folder)

    @classmethod
    def from_pretrained(cls, place: str | Path, *, revision: str | None = None) -> Self:
        """The estimator that `save_pretrained` wrote, from a folder or the hub."""
        return load_estimator(cls, place, revision)

    def explain(self, one: Any) -> Explanation:
        """What each branch of the network and each element of one set (N, d) added to the answer; see `Explanation`."""
        check_is_fitted(self)
        if not isinstance(self.model_.head, EnsembleHead):
            raise ConfigurationError(f"only answers of a classifier or a regressor are explained, not of {type(self).__name__}")
        sets = read_sets(self, [one], reset=False)
        with naming_the_set(self, sets):
            return explain(self.model_, sets[0].tensor().to(self.model_.encoder.device, torch.float32))

    def _outputs(self, X: Any, change: Callable[[Any], Tensor] | None = None) -> Tensor:
        """The output of a fitted network for sets: change(z), or a row of outputs per stream, (B, S, outputs)."""
        check_is_fitted(self)
        sets, encode = read_sets(self, X, reset=False), Encode("none", self.chunk_size, 1)
        change = change or cast(StreamsHead, self.model_.head).streams
        with self._threads(sets, 64), evaluating(self.model_), naming_the_set(self, sets):
            batched = batches(sets, self.chunk_size)
            return torch.cat([change(encode_sets(self.model_, encode, sets[batch])).cpu() for batch in batched])
