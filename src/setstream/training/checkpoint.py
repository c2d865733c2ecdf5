"""Checkpoints that are whole or not there.

    run/checkpoints/step-00001000/weights.safetensors      the model
                                  optimizer.pt             Adam's moments
                                  progress.json            the step; with the seed it is all that random numbers need

A checkpoint is written into a hidden folder, flushed to the disk, and renamed: whoever looks finds it complete, whenever the
process was killed. The one before is kept until the new one is in place.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import torch
from torch import nn

from setstream.durable import flush
from setstream.errors import ConfigurationError
from setstream.weights import load_weights, save_weights

KEPT = 2


def weights_of(place: Path) -> Path:
    """The file of weights at a place: the file itself, or a run's weights as it ended, or as its last checkpoint has them."""
    if place.is_file():
        return place
    if (place / "model.safetensors").exists():
        return place / "model.safetensors"
    steps = Checkpoints(place / "checkpoints").steps()
    if not steps:
        raise ConfigurationError(f"{place} has neither a finished model nor a checkpoint yet")
    return place / "checkpoints" / f"step-{steps[-1]:08d}" / "weights.safetensors"


class Checkpoints:
    """The checkpoints of one run."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def steps(self) -> list[int]:
        """The steps at which there are complete checkpoints, in order."""
        return sorted(int(path.name.removeprefix("step-")) for path in self.folder.glob("step-*") if path.is_dir())

    def save(self, step: int, model: nn.Module, optimizer: torch.optim.Optimizer, progress: dict[str, Any]) -> Path:
        """Write a checkpoint and drop the oldest. One that is there already is what this one would be."""
        target = self.folder / f"step-{step:08d}"
        if target.is_dir():
            return target
        hidden = self.folder / f".step-{step:08d}.{os.getpid()}"
        shutil.rmtree(hidden, ignore_errors=True)
        hidden.mkdir(parents=True)
        save_weights(model, hidden / "weights.safetensors")
        torch.save(optimizer.state_dict(), hidden / "optimizer.pt")
        (hidden / "progress.json").write_text(json.dumps(progress | {"step": step}))
        for path in hidden.iterdir():
            flush(path)
        hidden.rename(target)
        flush(self.folder)
        for old in self.steps()[:-KEPT]:
            shutil.rmtree(self.folder / f"step-{old:08d}", ignore_errors=True)
        return target

    def load(self, step: int, model: nn.Module, optimizer: torch.optim.Optimizer, device: torch.device) -> dict[str, Any]:
        """Bring model and optimizer back to a step."""
        source = self.folder / f"step-{step:08d}"
        load_weights(model, source / "weights.safetensors")
        optimizer.load_state_dict(torch.load(source / "optimizer.pt", map_location=device, weights_only=True))
        progress: dict[str, Any] = json.loads((source / "progress.json").read_text())
        return progress

    def clean(self) -> None:
        """Remove what a killed process left half written."""
        for path in self.folder.glob(".step-*"):
            shutil.rmtree(path, ignore_errors=True)
