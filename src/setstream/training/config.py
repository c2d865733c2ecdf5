"""The options of a run with their defaults, from flags, TOML or JSON."""

import dataclasses
import json
import tomllib
import types
import typing
from dataclasses import dataclass, field, replace
from math import cos, pi
from pathlib import Path
from typing import Any, Self

from setstream.errors import ConfigurationError
from setstream.gradients.encode import GRADIENTS
from setstream.pools.base import AVERAGE

#: The allowed values of options that have few of them.
CHOICES = {"optimizer": ("adam", "adamw", "sgd"), "schedule": ("constant", "step", "cosine"), "gradient": GRADIENTS}
CHOICES |= {"parallel": ("data", "set"), "amp": ("none", "bf16")}
EVERY = ("log_every", "evaluate_every", "checkpoint_every")
POSITIVE = ("steps", "epochs", "patience", "batch", "chunk_size", "grad_chunks", "threads", *EVERY)
#: Options that may change when a run is resumed: they do not change what it computes.
FREE = {"device", "threads", *EVERY, "tensorboard", "parallel"}


@dataclass(frozen=True)
class TrainConfig:
    """All options of a training run.

    >>> TrainConfig(task="clustering", model="deepsets", steps=100).lr
    0.001
    """

    task: str
    model: str
    #: Keyword arguments of the task and of the model.
    task_options: dict[str, Any] = field(default_factory=dict)
    model_options: dict[str, Any] = field(default_factory=dict)

    steps: int = 50_000
    epochs: int | None = None  # instead of steps: passes over the training sets; evaluations, logs and checkpoints follow them
    batch: int = 10  # sets per step, over all processes
    optimizer: str = "adam"
    lr: float = 1e-3
    weight_decay: float = 0.0
    beta1: float = 0.9  # for sgd, the momentum
    beta2: float = 0.999
    schedule: str = "step"  # constant; step: times drop_factor at drop_at; cosine: down to lr · final_factor
    drop_at: float = 0.7
    drop_factor: float = 0.1
    final_factor: float = 0.0
    warmup: int = 0  # steps of linear increase
    clip: float | None = None  # largest norm of the gradient

    gradient: str = "unbiased"
    chunk_size: int = 8
    grad_chunks: int = 1
    features: str = "cache"  # for importance: in memory, in files under a folder (its path), or "recompute": constant memory
    chunks: str | None = None  # "average": train a model that is not consistent on the mean over chunks, not on whole sets

    init_from: str | None = None  # a run folder or a file of weights to begin with
    freeze: list[str] = field(default_factory=list)  # prefixes of the names of parameters that are not trained
    select: str | None = None  # end with the weights of the largest value of this metric in training; -loss: the smallest
    patience: int | None = None  # stop after so many evaluations without a better value of `select`

    seed: int = 0
    device: str = "auto"
    threads: int | None = None
    amp: str = "none"
    parallel: str = "data"  # data: sets over processes; set: every set over all processes

    log_every: int = 100
    evaluate_every: int = 5_000
    checkpoint_every: int = 1_000
    tensorboard: bool = True

    def __post_init__(self) -> None:
        for name, hint in typing.get_type_hints(type(self)).items():
            value = getattr(self, name)
            if hint in (float, float | None) and isinstance(value, int) and not isinstance(value, bool):
                object.__setattr__(self, name, float(value))
                continue
            kind = hint if isinstance(hint, types.UnionType) else typing.get_origin(hint) or hint
            if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
                raise ConfigurationError(f"{name} must be of type {getattr(hint, '__name__', hint)}; got {value!r}")
        rules = {
            **{f"{name} must be one of {', '.join(values)}": getattr(self, name) in values for name, values in CHOICES.items()},
            **{f"{name} must be at least 1": getattr(self, name) is None or getattr(self, name) >= 1 for name in POSITIVE},
            "lr must be positive": self.lr > 0,
            "clip must be positive, or left out": self.clip is None or self.clip > 0,
            "patience needs select": self.patience is None or self.select is not None,
            **{f"{name} must not be negative": getattr(self, name) >= 0 for name in ("warmup", "weight_decay")},
            "beta1 and beta2 lie between 0 and 1": 0 <= self.beta1 < 1 and 0 <= self.beta2 < 1,
            "gradient 'none' trains nothing": self.gradient != "none",
            "chunks is 'average', or left out": self.chunks in (None, AVERAGE),
        }
        for rule, holds in rules.items():
            if not holds:
                values = (f"{name} = {getattr(self, name)!r}" for name in rule.split() if hasattr(self, name))
                raise ConfigurationError(f"{rule}; got {', '.join(values)}")

    @classmethod
    def from_dict(cls, options: dict[str, Any]) -> Self:
        """Options from a mapping, as a file holds it; unknown names are an error."""
        known = [option.name for option in dataclasses.fields(cls)]
        if unknown := set(options).difference(known):
            raise ConfigurationError(f"unknown options {sorted(unknown)}: known are {', '.join(sorted(known))}")
        if missing := {"task", "model"} - set(options):
            raise ConfigurationError(f"a run needs {' and '.join(sorted(missing))}")
        return cls(**options)

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    def changed_since(self, earlier: dict[str, Any]) -> list[str]:
        """The options that differ from those of an earlier run, as in its config.json, and change what is computed."""
        now = json.loads(json.dumps(self.to_dict()))
        ignored = FREE | ({"steps"} if self.epochs is not None else set())  # which follow from the epochs
        return [name for name in now if name not in ignored and now[name] != earlier.get(name, now[name])]

    def in_steps(self, size: int | None) -> Self:
        """These options with their epochs as steps, for a task that has `size` training sets."""
        if self.epochs is None:
            return self
        if size is None:
            raise ConfigurationError(f"the task {self.task} draws its training sets without end: give steps instead of epochs")
        epoch = max(1, round(size / self.batch))
        return replace(self, steps=self.epochs * epoch, log_every=epoch, evaluate_every=epoch, checkpoint_every=epoch)

    def epoch(self, step: int) -> dict[str, float]:
        """The epoch that a step has reached, if the run counts in epochs."""
        return {} if self.epochs is None else {"epoch": round(step * self.epochs / self.steps, 2)}

    def position(self, step: int) -> str:
        """How far a run is, as text."""
        epochs = (f"epoch {epoch:g}/{self.epochs}" for epoch in self.epoch(step).values())
        return next(epochs, f"step {step}/{self.steps}")

    def rate(self, step: int) -> float:
        """The learning rate of a step (counted from 0): a function of the step alone."""
        rise = min(1.0, (step + 1) / self.warmup) if self.warmup else 1.0
        if self.schedule == "step":
            return self.lr * rise * (self.drop_factor if step >= self.drop_at * self.steps else 1.0)
        if self.schedule == "cosine":
            done = min(1.0, max(0, step - self.warmup) / max(1, self.steps - self.warmup))
            return self.lr * rise * (self.final_factor + (1 - self.final_factor) * 0.5 * (1 + cos(pi * done)))
        return self.lr * rise


def merge(base: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """`base` with `changes` on top; mappings are merged, not replaced."""
    both = {name for name in changes if isinstance(base.get(name), dict) and isinstance(changes[name], dict)}
    return base | changes | {name: merge(base[name], changes[name]) for name in both}


READERS: dict[str, Any] = {".toml": tomllib.loads, ".json": json.loads}


def read_options(path: Path) -> dict[str, Any]:
    """The options in a TOML or JSON file."""
    if not path.is_file():
        raise ConfigurationError(f"there is no configuration file {path}")
    if path.suffix not in READERS:
        raise ConfigurationError(f"{path} is not a configuration: its name must end in {', '.join(READERS)}")
    try:
        options = READERS[path.suffix](path.read_text())
    except Exception as error:  # each format has errors of its own
        raise ConfigurationError(f"{path} cannot be read: {error}") from error
    if not isinstance(options, dict):
        raise ConfigurationError(f"{path} must hold a mapping of options; it holds a {type(options).__name__}")
    return options
