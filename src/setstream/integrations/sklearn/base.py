"""The base of all estimators: their options, and how a network is built and fitted."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf
from numbers import Real
from typing import Any, ClassVar, cast

import numpy as np
import torch
from sklearn.base import BaseEstimator
from sklearn.model_selection import train_test_split
from sklearn.utils import check_random_state
from sklearn.utils.validation import check_is_fitted
from torch import Tensor

from setstream.errors import ConfigurationError
from setstream.gradients.encode import GRADIENTS
from setstream.integrations.sklearn.fitting import Loss, Training, batches, encode_sets
from setstream.integrations.sklearn.network import MODELS, StreamsHead
from setstream.integrations.sklearn.sets import Sources, naming_the_set, read_sets
from setstream.models.model import SetModel
from setstream.models.stream import evaluating
from setstream.nn.standardise import Standardise
from setstream.training.config import TrainConfig
from setstream.training.processes import choose_device
from setstream.training.task import Encode

#: Options that are numbers, by their range.
NUMBERS = {
    (1, inf): ("num_slots", "heads", "epochs", "batch_size", "chunk_size", "grad_chunks", "n_iter_no_change"),
    (0, inf): ("min_steps", "learning_rate", "weight_decay"),
    (0, 1): ("dropout", "validation_fraction"),
}


@dataclass(kw_only=True, eq=False, repr=False)
class SetEstimator(BaseEstimator):
    """The options of an estimator over sets.

    Args:
        widths: Widths of phi's layers, which see one element at a time; the last is a multiple of 4.
        num_slots: The number of rows (slots) that a set becomes.
        heads: Heads of the attention that computes the slots.
        dropout: Dropout in the Set Transformer that reads the slots.
        elements_stream: Add a second stream, the largest output of any element; "auto": for classifiers.
        epochs: How often all sets are seen.
        min_steps: The least number of steps.
        batch_size: Sets per step.
        learning_rate: Learning rate of Adam, with a cosine schedule.
        weight_decay: Weight decay of Adam.
        gradient: As in `ss.encode`; "auto" is the full gradient, computed chunk by chunk ("exact") where sets are larger than
            chunk_size.
        chunk_size: As in `ss.encode`.
        grad_chunks: As in `ss.encode`.
        early_stopping: Hold sets out, keep the weights that do best on them, and stop when they stop improving.
        validation_fraction: The share of the sets to hold out.
        n_iter_no_change: Epochs without improvement before training stops.
        random_state: A seed, or a numpy RandomState.
        device: auto, cpu, cuda or mps.
        verbose: 1 shows progress: a bar on a terminal, a line per epoch elsewhere.
    """

    #: Which of `MODELS` it trains, and whether "auto" includes the stream of elements.
    _network: ClassVar[str]
    _with_elements: ClassVar[bool] = False

    widths: Sequence[int] = (256, 128, 64)
    num_slots: int = 64
    heads: int = 4
    dropout: float = 0.5
    elements_stream: bool | str = "auto"
    epochs: int = 30
    min_steps: int = 300
    batch_size: int = 8
    learning_rate: float = 2e-4
    weight_decay: float = 5e-3
    gradient: str = "auto"
    chunk_size: int = 1024
    grad_chunks: int = 1
    early_stopping: bool = False
    validation_fraction: float = 0.1
    n_iter_no_change: int = 10
    random_state: Any = None
    device: str = "auto"
    verbose: int = 0

    def _check_options(self) -> None:
        known = ("auto", *(mode for mode in GRADIENTS if mode != "none"))
        if self.gradient not in known:
            raise ConfigurationError(f"gradient must be one of {', '.join(known)}; got {self.gradient!r}")
        if not isinstance(self.widths, list | tuple | np.ndarray):
            raise ConfigurationError(f"widths must be a list of the widths of phi's layers, like (64, 32); got {self.widths!r}")
        if self.elements_stream not in (True, False, "auto"):
            raise ConfigurationError(f"elements_stream must be True, False or 'auto'; got {self.elements_stream!r}")
        for (least, most), name in ((limits, name) for limits, names in NUMBERS.items() for name in names):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, Real) or not least <= float(value) <= most:
                raise ConfigurationError(f"{name} must be a number from {least:g} to {most:g}; got {value!r}")

    def _start(self, sets: Sources, answers: dict[str, Any], loss: Loss, steps: int | None) -> Training:
        """A new network, standardised by the sets; `steps` None: a constant learning rate, for any number of calls."""
        device = choose_device(self.device)
        seed = int(check_random_state(self.random_state).randint(2**31 - 1))
        rates: dict[str, Any] = {"lr": float(self.learning_rate), "weight_decay": float(self.weight_decay), "steps": steps or 1}
        rates["schedule"] = "constant" if steps is None else "cosine"
        config = TrainConfig("sklearn", self._network, batch=int(self.batch_size), seed=seed, **rates)
        torch.manual_seed(seed)
        widths, with_elements = [int(width) for width in self.widths], self.elements_stream
        with_elements = self._with_elements if with_elements == "auto" else bool(with_elements)
        network = {"in_dim": int(self.n_features_in_), **answers, "widths": widths, "num_slots": int(self.num_slots)}
        network |= {"heads": int(self.heads), "dropout": float(self.dropout), "elements_stream": with_elements}
        builder = MODELS[self._network]
        model = builder(**network).remember(builder, network)
        cast(Standardise, model.encoder.phi.get_submodule("0")).fit(sets, max(int(self.chunk_size), 1024))
        encode = Encode(self.gradient, self.chunk_size, self.grad_chunks)
        return Training(model.to(device), config, encode, loss, type(self).__name__ if self.verbose else None)

    def _fit(self, sets: Sources, targets: Tensor, weights: Tensor, answers: dict[str, Any], loss: Loss, strata: Any) -> None:
        """Train a new network, without touching the caller's random numbers; `answers`: the options of its head."""
        self._check_options()
        given, held_out = sets, None
        if self.early_stopping:
            seed = check_random_state(self.random_state).randint(2**31 - 1)
            split = {"test_size": self.validation_fraction, "random_state": seed, "stratify": strata}
            try:
                kept, out = train_test_split(np.arange(len(sets)), **split)
            except ValueError as error:
                raise ConfigurationError(f"early_stopping cannot hold sets out: {error}") from error
            held_out = [sets[i] for i in out], targets[out]
            sets, targets, weights = [sets[i] for i in kept], targets[kept], weights[kept]
        steps = max(int(self.min_steps), int(self.epochs) * math.ceil(len(sets) / int(self.batch_size)))
        with torch.random.fork_rng(), naming_the_set(given, int(self.chunk_size)):
            training = self._start(sets, answers, loss, steps)
            losses, tests = training.run(sets, targets, weights / weights.mean(), steps, held_out, self.n_iter_no_change)
        self.model_: SetModel = training.model
        self.loss_curve_, self.n_iter_ = losses, len(losses)
        self.validation_losses_ = tests if self.early_stopping else None
        self._training: Training | None = None

    def _partial_fit(self, sets: Sources, targets: Tensor, weights: Tensor, answers: dict[str, Any], loss: Loss) -> None:
        """One pass over the sets, from the weights of earlier passes; the first pass standardises for all."""
        self._check_options()
        training = getattr(self, "_training", None)
        with torch.random.fork_rng(), naming_the_set(sets, int(self.chunk_size)):
            if training is None:
                training = self._start(sets, answers, loss, None)
                if hasattr(self, "model_"):  # fitted before: train its network further
                    training.model.load_state_dict(self.model_.state_dict())
            losses, _ = training.run(sets, targets, weights, math.ceil(len(sets) / int(self.batch_size)))
        self._training, self.model_ = training, training.model
        self.loss_curve_ = [*getattr(self, "loss_curve_", []), *losses]
        self.n_iter_ = len(self.loss_curve_)

    def _outputs(self, X: Any, change: Callable[[Any], Tensor] | None = None) -> Tensor:
        """The output of a fitted network for sets: change(z), or a row of outputs per stream, (B, S, outputs)."""
        check_is_fitted(self)
        sets, encode = read_sets(self, X, reset=False), Encode("none", self.chunk_size, 1)
        change = change or cast(StreamsHead, self.model_.head).streams
        with evaluating(self.model_), naming_the_set(sets, self.chunk_size):
            batched = batches(sets, self.chunk_size)
            return torch.cat([change(encode_sets(self.model_, encode, sets[batch])).cpu() for batch in batched])
