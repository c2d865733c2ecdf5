"""What a task provides: data, models by name, a loss and metrics.

    batch(step)  ->  {name: tensor}        drawn from a generator that depends on the seed and the step alone
    loss         ->  a number              of one batch, through `encode`, which knows the gradient mode
    evaluate     ->  {name: number}        on held-out data

Nothing else is needed to train, resume, sweep and report. `task_class` finds a task by name, `build_task` by a run's options,
`SavedRun` by its folder. Random numbers depend on seed, step and rank alone: no state of a generator has to be saved, and a run
that is resumed at step n, on any number of processes, draws the numbers that it would have drawn without stopping.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from copy import copy
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from setstream._utils.import_path import EXPERIMENTS, TASKS, find, named_by_file, place_of
from setstream.errors import ConfigurationError
from setstream.gradients.base import generators
from setstream.gradients.encode import encode
from setstream.models.encoder import SetEncoder
from setstream.models.model import SetModel
from setstream.models.pretrained import DEFAULTS_0_1
from setstream.models.weights import load_model
from setstream.sets.chunks import Chunks, scatter_sets
from setstream.sets.layout import Sets
from setstream.sets.source import SetSource
from setstream.training.checkpoint import weights_of
from setstream.training.config import TrainConfig, merge, read_options

Batch = dict[str, Any]


@dataclass(frozen=True)
class Encode:
    """`ss.encode` with the gradient mode and sizes of a run: encode(encoder, sets) gives z.

    >>> Encode(gradient="subset", chunk_size=5).sees(torch.randn(2, 100, 3)).shape
    torch.Size([2, 5, 3])
    """

    gradient: str = "full"
    chunk_size: int = 256
    grad_chunks: int = 1
    group: ProcessGroup | None = None
    features: str = "cache"
    chunks: str | None = None

    def __call__(self, encoder: SetEncoder, sets: Sets | Chunks | Sequence[SetSource], mask: Tensor | None = None) -> Any:
        """z of the sets, in memory, served in chunks or in sources; with `group`, each process encodes its share of them."""
        if self.group is not None:
            sets, mask = scatter_sets(sets, mask, self.group), None
        options = vars(self) if self.gradient == "importance" else vars(self) | {"features": None}
        return encode(encoder, sets, mask, **options)

    def sees(self, sets: Tensor) -> Tensor:
        """The elements of dense sets (B, N, ...) that training looks at: all, or in mode `subset` a random few of each."""
        size = self.chunk_size * self.grad_chunks
        if self.gradient != "subset" or size >= sets.shape[1]:
            return sets
        chosen = torch.rand(sets.shape[:2]).topk(size, dim=1).indices.to(sets.device)
        return sets.gather(1, chosen.view(*chosen.shape, *[1] * (sets.dim() - 2)).expand(-1, -1, *sets.shape[2:]))


class Task(ABC):
    """A learning problem over sets. Subclass it, give it a name and five methods, and pass it to a `Trainer`.

    Options of a task are the keyword arguments of its constructor.
    """

    name: ClassVar[str]  #: Its name on the command line.
    summary: ClassVar[str] = ""  #: A line for `setstream tasks`.
    #: The function that adds the task's tables and figures to a report, by its import path; None: a table of metrics.
    report: ClassVar[str | None] = None
    #: Options of the task in which repetitions of one experiment differ: folds.
    repeated: ClassVar[tuple[str, ...]] = ()
    #: Its models by name: each a function of keyword options that returns a SetModel.
    models: ClassVar[dict[str, Callable[..., SetModel]]] = {}
    #: The seed of the run that trains it (see `with_seed`): it determines the order of examples in epochs.
    seed: int = 0

    @property
    def size(self) -> int | None:
        """How many training sets there are, which makes an epoch; None: they are drawn without end."""
        return None

    @property
    def held_out(self) -> str:
        """The sets that a quick evaluation looks at: validation, or test."""
        return "test"

    @property
    def compares(self) -> bool:
        """Whether the loss compares the sets of a batch, so that it is not the mean of the losses of its shares."""
        return False

    @classmethod
    def defaults(cls, task_options: dict[str, Any]) -> dict[str, Any]:
        """Options of a run of this task, with these options of the task, where they differ from those of `TrainConfig`."""
        return {}

    @classmethod
    def config(cls, model: str, task_options: dict[str, Any] | None = None, **options: Any) -> TrainConfig:
        """The options of a run with a model: those given, then this task's defaults, then those of `TrainConfig`.

        >>> from setstream.tasks.mil import Mil
        >>> Mil.config("ab-mil", batch=8).gradient
        'exact'
        """
        defaults = cls.defaults(task_options or {})
        for name in ("epochs", "patience") if "steps" in options else ():
            defaults.pop(name, None)
        return TrainConfig.from_dict(
            merge(defaults, {"task": cls.name, "model": model, "task_options": task_options or {}} | options)
        )

    @classmethod
    def fold_count(cls, task_options: dict[str, Any]) -> int | None:
        """The number of folds that these options of the task prescribe, for cross-validation; None: any."""
        return None

    def with_seed(self, seed: int) -> Self:
        """This task for a run with a seed: itself if it has that seed already, otherwise a copy that shares its data."""
        if seed == self.seed:
            return self
        other = copy(self)
        other.seed = seed
        return other

    def build(self, model: str, **options: Any) -> SetModel:
        """One of the task's models."""
        if model not in self.models:
            raise ConfigurationError(f"{self.name} has no model {model!r}: choose one of {', '.join(self.models)}")
        builder = self.models[model]
        try:
            built = builder(**options)
        except TypeError as error:
            raise ConfigurationError(f"the model {model} does not take these options ({options}): {error}") from error
        with suppress(ConfigurationError):  # options that JSON cannot hold: save such a model with a builder
            if place := place_of(builder, model):
                built.remember(place, options)
        return built

    @abstractmethod
    def batch(self, step: int, size: int, generator: torch.Generator) -> Batch:
        """The training batch of a step: tensors or lists with `size` sets each.

        Every process makes the whole batch. Sets on disk come as a list of SetSources, or as chunks of such: each process then
        reads its own share only.
        """

    @abstractmethod
    def loss(self, model: SetModel, batch: Batch, encode: Encode) -> Tensor:
        """The loss of a batch: a mean over its sets."""

    @abstractmethod
    def evaluate(self, model: SetModel, *, quick: bool = False) -> dict[str, float]:
        """Metrics on held-out data; `quick` on a part of it, while training goes on."""

    def conclude(self, model: SetModel, folder: Path) -> dict[str, float]:
        """The metrics of a run that ends; a task may write files of its own to the run's folder."""
        return self.evaluate(model)


def mix(*numbers: int) -> int:
    """One well-mixed 63-bit seed of several numbers (the finaliser of SplitMix64, applied to each in turn)."""
    state = 0
    for number in numbers:
        state = (state + number + 0x9E3779B97F4A7C15) % 2**64
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) % 2**64
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) % 2**64
        state ^= state >> 31
    return state >> 1


def in_epochs(step: int, size: int, total: int, *seed: int) -> list[int]:
    """The indices of a step's batch among `total` items; each item comes once per epoch, in a new order each time."""
    numbers = range(step * size, (step + 1) * size)
    epochs = {number // total for number in numbers}
    orders = {epoch: torch.randperm(total, generator=torch.Generator().manual_seed(mix(*seed, epoch, 5))) for epoch in epochs}
    return [int(orders[number // total][number % total]) for number in numbers]


def seed_step(seed: int, step: int, rank: int, device: torch.device) -> None:
    """Set the generators that modules draw from (dropout, slots, partitions) for one step of one rank."""
    for generator in generators(device):
        generator.manual_seed(mix(seed, step, rank, 1))


def task_class(name: str) -> type[Task]:
    """The task with this name: a built-in one, or your own as `package.module:Class`."""
    place = (TASKS | EXPERIMENTS).get(name, name)
    if ":" not in place:
        names = ", ".join(TASKS)
        raise ConfigurationError(f"unknown task {name!r}: choose one of {names}, or give your own as package.module:Class")
    kind = find(place, "task")
    if not (isinstance(kind, type) and issubclass(kind, Task)):
        raise ConfigurationError(f"{name!r} is not a subclass of setstream.training.Task")
    return kind


def describe_task(name: str) -> dict[str, Any]:
    """The summary of a task, and its models with the first lines of their docstrings."""
    kind = task_class(name)
    models = {model: (build.__doc__ or "").strip().partition("\n")[0] for model, build in kind.models.items()}
    return {"summary": kind.summary, "models": models}


def new_config(given: dict[str, Any]) -> TrainConfig:
    """The options of a new run: those given, then the defaults of its task. A text or a file may name any task."""
    if set(given) >= {"task", "model"} and isinstance(given["task"], str):
        options = {name: value for name, value in given.items() if name != "task"}
        return replace(task_class(given["task"]).config(**options), task=given["task"])
    return TrainConfig.from_dict(given)


def build_task(config: TrainConfig) -> Task:
    """The task of a run whose options the caller chose."""
    try:
        return task_class(config.task)(**config.task_options)
    except TypeError as error:
        raise ConfigurationError(f"the task {config.task} does not take these options: {error}") from error


def read_run(folder: Path) -> TrainConfig:
    """The options of an earlier run."""
    if not (folder / "config.json").is_file():
        raise ConfigurationError(f"{folder} is not a run folder: it has no config.json")
    config = TrainConfig.from_dict(read_options(folder / "config.json"))
    known, place = folder / "environment.json", f"setstream.tasks.{config.task}.models:MODELS[{config.model}]"
    if place in DEFAULTS_0_1 and known.is_file() and str(read_options(known).get("setstream")).startswith("0.1"):
        return replace(config, model_options=DEFAULTS_0_1[place] | config.model_options)
    return config


@dataclass(frozen=True)
class SavedRun:
    """A run in a folder, with the options in its config.json; `trust`: import paths outside setstream that they may name."""

    folder: Path
    config: TrainConfig
    trust: Iterable[str] = ()

    def task(self) -> Task:
        with named_by_file(self.folder / "config.json", self.trust):
            return build_task(self.config)

    def model(self, task: Task | None = None) -> SetModel:
        """The model of the run, in eval mode: the final one, or that of its last checkpoint. `task`: the run's, if known."""
        options = self.config.model_options
        build = partial((task or self.task()).build, self.config.model, **options)
        with named_by_file(self.folder / "config.json", self.trust):
            return load_model(build, options, weights_of(self.folder), trusted=bool(self.trust))
