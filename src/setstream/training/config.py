"""How a run is done: every option with its default, from flags, TOML, YAML or JSON."""

import dataclasses
import json
import tomllib
import types
import typing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from setstream._utils.optional import need
from setstream.errors import ConfigurationError
from setstream.gradients.encode import GRADIENTS
from setstream.pools.base import AVERAGE

OPTIMIZERS = ("adam", "adamw", "sgd")
SCHEDULES = ("constant", "step", "cosine")
PARALLEL = ("data", "set")
AMP = ("none", "bf16")
#: Options that may change when a run goes on: they do not change what it computes.
FREE = {"device", "threads", "log_every", "evaluate_every", "checkpoint_every", "tensorboard", "parallel"}


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
    batch: int = 10  # sets in a step, over all processes
    optimizer: str = "adam"
    lr: float = 1e-3
    weight_decay: float = 0.0
    beta1: float = 0.9  # of sgd, the momentum
    beta2: float = 0.999
    schedule: str = "step"  # constant; step: times drop_factor at drop_at; cosine: down to lr · final_factor
    drop_at: float = 0.7
    drop_factor: float = 0.1
    final_factor: float = 0.0
    warmup: int = 0  # steps of linear rise
    clip: float | None = None  # largest norm of the gradient

    gradient: str = "unbiased"
    chunk_size: int = 8
    grad_chunks: int = 1
    features: str = "cache"  # of importance: in memory, in files under a folder (its path), or "recompute": constant memory

    chunks: str | None = None  # "average": train a model that is not consistent on the mean over chunks, not on whole sets

    init_from: str | None = None  # a run folder or a file of weights to begin with
    freeze: list[str] = field(default_factory=list)  # beginnings of names of parameters that stay as they are
    select: str | None = None  # end with the weights whose evaluation on the way had the largest value of this metric

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
        hints = typing.get_type_hints(type(self))
        for own in dataclasses.fields(self):
            value = getattr(self, own.name)
            if hints[own.name] in (float, float | None) and isinstance(value, int) and not isinstance(value, bool):
                object.__setattr__(self, own.name, float(value))
            elif not _fits(value, hints[own.name]):
                wanted = getattr(hints[own.name], "__name__", str(hints[own.name]))
                raise ConfigurationError(f"{own.name} must be of type {wanted}; got {value!r}")
        choices = {
            "optimizer": OPTIMIZERS,
            "schedule": SCHEDULES,
            "gradient": GRADIENTS,
            "parallel": PARALLEL,
            "amp": AMP,
        }
        for name, allowed in choices.items():
            if getattr(self, name) not in allowed:
                raise ConfigurationError(f"{name} must be one of {', '.join(allowed)}; got {getattr(self, name)!r}")
        for name in ("steps", "batch", "chunk_size", "grad_chunks", "log_every", "evaluate_every", "checkpoint_every"):
            if getattr(self, name) < 1:
                raise ConfigurationError(f"{name} must be at least 1; got {getattr(self, name)}")
        bounds = {
            "lr must be positive": self.lr > 0,
            "clip must be positive, or left out": self.clip is None or self.clip > 0,
            "threads must be at least 1": self.threads is None or self.threads >= 1,
            "warmup must not be negative": self.warmup >= 0,
            "weight_decay must not be negative": self.weight_decay >= 0,
            "beta1 and beta2 lie between 0 and 1": 0 <= self.beta1 < 1 and 0 <= self.beta2 < 1,
            "gradient 'none' trains nothing": self.gradient != "none",
            "chunks is 'average', or left out": self.chunks in (None, AVERAGE),
        }
        for rule, holds in bounds.items():
            if not holds:
                raise ConfigurationError(f"{rule}; got {', '.join(f'{n} = {getattr(self, n)!r}' for n in _names(rule))}")

    @classmethod
    def from_dict(cls, options: dict[str, Any]) -> Self:
        """From a mapping, as a file holds it; unknown names are an error."""
        known = {own.name for own in dataclasses.fields(cls)}
        unknown = set(options) - known
        if unknown:
            raise ConfigurationError(f"unknown options {sorted(unknown)}: known are {', '.join(sorted(known))}")
        missing = {"task", "model"} - set(options)
        if missing:
            raise ConfigurationError(f"a run needs {' and '.join(sorted(missing))}")
        return cls(**options)

    def to_dict(self) -> dict[str, Any]:
        """As a mapping."""
        return dataclasses.asdict(self)

    def rate(self, step: int) -> float:
        """The learning rate of a step (counted from 0): a function of the step alone."""
        from math import cos, pi

        rise = min(1.0, (step + 1) / self.warmup) if self.warmup else 1.0
        if self.schedule == "step":
            return self.lr * rise * (self.drop_factor if step >= self.drop_at * self.steps else 1.0)
        if self.schedule == "cosine":
            done = min(1.0, max(0, step - self.warmup) / max(1, self.steps - self.warmup))
            return self.lr * rise * (self.final_factor + (1 - self.final_factor) * 0.5 * (1 + cos(pi * done)))
        return self.lr * rise


def _names(rule: str) -> list[str]:
    """The options that a rule speaks of."""
    return [own.name for own in dataclasses.fields(TrainConfig) if own.name in rule.split()]


def _fits(value: Any, hint: Any) -> bool:
    if isinstance(hint, types.UnionType):
        return any(_fits(value, option) for option in typing.get_args(hint))
    kind = typing.get_origin(hint) or hint
    if kind in (int, float) and isinstance(value, bool):
        return False
    return isinstance(value, kind)


def read_options(path: Path) -> dict[str, Any]:
    """The options in a TOML, YAML or JSON file."""
    if not path.is_file():
        raise ConfigurationError(f"there is no configuration file {path}")
    try:
        text = path.read_text()
        if path.suffix == ".toml":
            found: Any = tomllib.loads(text)
        elif path.suffix in (".yaml", ".yml"):
            found = _yaml(text)
        elif path.suffix == ".json":
            found = json.loads(text)
        else:
            raise ConfigurationError(f"{path} is no configuration: its name must end in .toml, .yaml, .yml or .json")
    except (ValueError, RecursionError) as error:  # TOML's, JSON's and UTF-8's errors are ValueErrors
        raise ConfigurationError(f"{path} cannot be read: {error}") from error
    if not isinstance(found, dict):
        raise ConfigurationError(f"{path} must hold a mapping of options; it holds a {type(found).__name__}")
    return found


def _yaml(text: str) -> Any:
    yaml = need("yaml", "cli", "YAML files")
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigurationError(f"this YAML cannot be read: {error}") from error
