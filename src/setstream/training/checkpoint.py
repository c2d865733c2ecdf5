"""Checkpoints, which are complete or not there; and training in stages.

    run/checkpoints/step-00001000/weights.safetensors      the model
                                  optimizer.pt             Adam's moments
                                  progress.json            the step; with the seed it is all that random numbers need
                                  checksums.json           BLAKE2b of the three

A checkpoint is written into a hidden folder, flushed to the disk, and renamed: it is complete, whenever the process was killed.
The previous one is kept, because disks and copies can damage files: a run is resumed from the newest intact one.
Checkpoints of 0.1 have no checksums; they are intact if they can be read.

Training in stages starts from the weights of an earlier run, and keeps a part of the model fixed:

    stage one   head and pool on stored features             setstream train mil umbc+set-transformer -o task.data=features/ ...
    stage two   the backbone, through whole bags of images   ... -o init_from=runs/one -o 'freeze=["head", "encoder.pool"]'

Frozen parts get no gradient and behave as at test time: no dropout, slots at their means. The optimizer gets the rest.
"""

import hashlib
import json
import pickle
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from setstream._utils.atomic import flush, whole_or_nothing
from setstream.errors import ConfigurationError
from setstream.models.weights import load_weights, save_weights
from setstream.training.config import TrainConfig

KEPT = 2
FILES = WEIGHTS, OPTIMIZER, PROGRESS = "weights.safetensors", "optimizer.pt", "progress.json"
CHECKSUMS = "checksums.json"
UNREADABLE = (OSError, EOFError, ValueError, LookupError, TypeError, RuntimeError, SafetensorError, pickle.UnpicklingError)


def weights_of(place: Path) -> Path:
    """The file of weights at a path: the file itself, a run's final weights, or those of its newest intact checkpoint."""
    for file in (place, place / "model.safetensors"):
        if file.is_file():
            return file
    checkpoints = Checkpoints(place / "checkpoints")
    damaged = checkpoints.damaged()
    if steps := [step for step in checkpoints.steps() if step not in damaged]:
        return checkpoints.place(steps[-1]) / WEIGHTS
    raise ConfigurationError(f"{place} has neither a finished model nor a checkpoint yet")


@dataclass(frozen=True)
class Checkpoints:
    """The checkpoints of one run."""

    folder: Path

    def steps(self) -> list[int]:
        names = (path.name.removeprefix("step-") for path in self.folder.glob("step-*") if path.is_dir())
        return sorted(int(name) for name in names if name.isdigit())

    def place(self, step: int) -> Path:
        return self.folder / f"step-{step:08d}"

    def damaged(self) -> dict[int, str]:
        """What is wrong with each checkpoint that is newer than the newest intact one; an error if there is none."""
        problems: dict[int, str] = {}
        for step in reversed(self.steps()):
            if (problem := _problem(self.place(step))) is None:
                return problems
            problems[step] = problem
        if problems:
            raise ConfigurationError(
                f"no checkpoint in {self.folder} is intact ({'; '.join(problems.values())}): restore a copy of it, or move it "
                "away to train from the beginning"
            )
        return problems

    def keep_damaged(self, step: int) -> Path:
        """Rename a damaged checkpoint, so that it can be examined but no run reads it."""
        target = self.folder / f"damaged-{step:08d}"
        shutil.rmtree(target, ignore_errors=True)
        return self.place(step).rename(target)

    def save(self, step: int, model: nn.Module, optimizer: torch.optim.Optimizer, progress: dict[str, Any]) -> None:
        """Write a checkpoint and remove the oldest. An existing one of this step is left: it is the same."""
        if self.place(step).is_dir():
            return
        with whole_or_nothing(self.place(step)) as hidden:
            hidden.mkdir()
            save_weights(model, hidden / WEIGHTS)
            torch.save(optimizer.state_dict(), hidden / OPTIMIZER)
            (hidden / PROGRESS).write_text(json.dumps(progress | {"step": step}))
            (hidden / CHECKSUMS).write_text(json.dumps({name: _checksum(hidden / name) for name in FILES}))
            for path in hidden.iterdir():
                flush(path)
        for old in self.steps()[:-KEPT]:
            shutil.rmtree(self.place(old), ignore_errors=True)

    def load(self, step: int, model: nn.Module, optimizer: torch.optim.Optimizer, device: torch.device) -> dict[str, Any]:
        """Load model and optimizer as they were at a step; returns its progress.json."""
        source = self.place(step)
        load_weights(model, source / WEIGHTS)
        optimizer.load_state_dict(torch.load(source / OPTIMIZER, map_location=device, weights_only=True))
        return dict(json.loads((source / PROGRESS).read_text()))


def _checksum(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()


def _problem(place: Path) -> str | None:
    """What is wrong with a checkpoint; None if it is intact."""
    try:
        if (place / CHECKSUMS).exists():
            wanted = json.loads((place / CHECKSUMS).read_text())
            wrong = [name for name in FILES if _checksum(place / name) != wanted[name]]
            return f"the checksum of {wrong[0]} does not match" if wrong else None
        load_file(place / WEIGHTS)
        torch.load(place / OPTIMIZER, map_location="cpu", weights_only=True)
        int(json.loads((place / PROGRESS).read_text())["step"])
    except FileNotFoundError as error:
        return f"{Path(error.filename or str(error)).name} is missing"
    except UNREADABLE as error:
        return f"{type(error).__name__}: {error}"
    return None


def _under(name: str, prefixes: list[str]) -> bool:
    return any(name == prefix or name.startswith(f"{prefix}.") for prefix in prefixes)


def freeze(model: nn.Module, prefixes: list[str]) -> None:
    """Switch off the gradient of parameters in these parts of the model."""
    parameters = dict(model.named_parameters())
    for prefix in prefixes:
        if not (frozen := [parameters[name] for name in parameters if _under(name, [prefix])]):
            parts = sorted({".".join(name.split(".")[:2]) for name in parameters})
            raise ConfigurationError(f"freeze: no parameter's name begins with {prefix!r}; there are {', '.join(parts)}")
        for parameter in frozen:
            parameter.requires_grad_(False)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ConfigurationError(f"freeze = {prefixes} leaves nothing to train")


def train_mode(model: nn.Module, prefixes: list[str]) -> None:
    """Training mode, except for frozen parts."""
    model.train()
    for name, module in model.named_modules():
        if _under(name, prefixes):
            module.eval()


def begin_with(model: nn.Module, place: str, frozen: list[str]) -> None:
    """Load the weights of an earlier stage. A model may have more than they hold (a backbone); frozen parts must be there."""
    path = weights_of(Path(place))
    weights: dict[str, Tensor] = load_file(path)
    shapes = {name: tensor.shape for name, tensor in model.state_dict().items()}
    if unknown := [name for name, tensor in weights.items() if shapes.get(name) != tensor.shape]:
        raise ConfigurationError(f"the weights in {path} are of another model: it has no {unknown[:5]} of these shapes")
    if missing := [name for name, _ in model.named_parameters() if _under(name, frozen) and name not in weights]:
        raise ConfigurationError(f"{missing[:5]} should be frozen, but {path} does not hold them: they would stay random")
    model.load_state_dict(weights, strict=False)


def make_optimizer(model: nn.Module, config: TrainConfig, device: torch.device) -> torch.optim.Optimizer:
    """adam, adamw or sgd; weight decay for matrices only, not for biases, norms and other vectors; fused where possible."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    kinds = (([p for p in trained if p.dim() > 1], config.weight_decay), ([p for p in trained if p.dim() <= 1], 0.0))
    groups = [{"params": parameters, "weight_decay": decay} for parameters, decay in kinds if parameters]
    fused = device.type in ("cpu", "cuda")
    if config.optimizer == "sgd":
        return torch.optim.SGD(groups, config.lr, momentum=config.beta1, fused=fused)
    kind = torch.optim.AdamW if config.optimizer == "adamw" else torch.optim.Adam
    return kind(groups, config.lr, (config.beta1, config.beta2), fused=fused)
