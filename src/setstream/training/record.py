"""The records of a run: metrics as JSON lines (and for TensorBoard), and the environment it ran in."""

import json
import os
import platform
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy
import torch

from setstream import __version__
from setstream._utils.atomic import write_atomically
from setstream._utils.optional import need
from setstream.errors import ConfigurationError


class Metrics:
    """Metrics by step in metrics.jsonl, of the first process (`active`); resuming drops the lines after the checkpoint."""

    def __init__(self, folder: Path, tensorboard: bool, from_step: int, active: bool) -> None:
        self.active = active
        self.board: Any = None
        if not active:
            return
        kept = [line for line in _lines(folder) if line["step"] <= from_step and line["kind"] != "final"]
        write_atomically(folder / "metrics.jsonl", "".join(json.dumps(line) + "\n" for line in kept))
        self.file = (folder / "metrics.jsonl").open("a")
        if tensorboard:
            with suppress(ConfigurationError, ImportError):  # an extra: the JSON lines have everything
                board = need("torch.utils.tensorboard", "cli", "TensorBoard")
                self.board = board.SummaryWriter(str(folder / "tensorboard"), purge_step=from_step + 1)

    def write(self, step: int, kind: str, values: dict[str, float]) -> None:
        """One line: the step, the kind (train, test or final), and the values."""
        if not self.active:
            return
        self.file.write(json.dumps({"step": step, "kind": kind, **values}) + "\n")
        self.file.flush()
        if self.board is not None:
            for name, value in values.items():
                self.board.add_scalar(f"{kind}/{name}", value, step)

    def close(self) -> None:
        """Write out what is buffered."""
        if self.active:
            self.file.close()
        if self.board is not None:
            self.board.close()


def _lines(folder: Path) -> list[dict[str, Any]]:
    """All complete lines: the last may have been cut off when the process was killed."""
    path, lines = folder / "metrics.jsonl", []
    for text in path.read_text().splitlines() if path.exists() else []:
        with suppress(ValueError):
            line = json.loads(text)
            if isinstance(line, dict) and {"step", "kind"} <= line.keys():
                lines.append(line)
    return lines


def read_metrics(folder: Path, kind: str) -> list[dict[str, Any]]:
    """The lines of one kind (train, test or final), in order."""
    return [line for line in _lines(folder) if line["kind"] == kind]


def environment(device: torch.device) -> dict[str, Any]:
    """Versions and hardware, for repeating the run."""
    return {
        "setstream": __version__,
        "python": sys.version.split()[0],
        "torch": torch.__version__,
        "numpy": numpy.__version__,
        "platform": platform.platform(),
        "processor": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "device": f"{device} ({torch.cuda.get_device_name(device)})" if device.type == "cuda" else str(device),
        "commit": _commit(),
    }


def _commit() -> str | None:
    """The commit of the checkout that this package runs from, if it runs from one."""
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"]
    with suppress(OSError, subprocess.TimeoutExpired):
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=False).stdout.strip() or None
    return None
