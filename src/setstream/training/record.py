"""What a run leaves behind: metrics as JSON lines (and for TensorBoard), and the environment it ran in."""

import json
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from setstream._utils.atomic import write_atomically


class Metrics:
    """Metrics by step, appended to a file; on resuming, what lies after the checkpoint is dropped, since it comes again."""

    def __init__(self, folder: Path, tensorboard: bool, from_step: int = 0) -> None:
        self.path = folder / "metrics.jsonl"
        if self.path.exists():
            lines = [line for line in self.path.read_text().splitlines() if _step(line) <= from_step]
            kept = [line for line in lines if json.loads(line)["kind"] != "final"]  # it has not ended, or we were not here
            write_atomically(self.path, "".join(line + "\n" for line in kept))
        self.file = self.path.open("a")
        self.board: Any = None
        if tensorboard:
            try:
                from torch.utils.tensorboard import SummaryWriter
            except ImportError:
                pass  # an extra: the JSON lines have everything
            else:
                self.board = SummaryWriter(str(folder / "tensorboard"), purge_step=from_step + 1)

    def write(self, step: int, kind: str, values: dict[str, float]) -> None:
        """One line: the step, train or test, and the values."""
        self.file.write(json.dumps({"step": step, "kind": kind, **values}) + "\n")
        self.file.flush()
        if self.board is not None:
            for name, value in values.items():
                self.board.add_scalar(f"{kind}/{name}", value, step)

    def close(self) -> None:
        """Write out what is buffered."""
        self.file.close()
        if self.board is not None:
            self.board.close()


def _step(line: str) -> float:
    try:
        return float(json.loads(line)["step"])
    except (ValueError, KeyError):
        return float("inf")  # cut off when the process was killed


def read_metrics(folder: Path, kind: str) -> list[dict[str, Any]]:
    """The lines of one kind (train or test), in order."""
    path = folder / "metrics.jsonl"
    if not path.exists():
        return []
    lines = [json.loads(line) for line in path.read_text().splitlines() if _step(line) < float("inf")]
    return [line for line in lines if line["kind"] == kind]


def environment(device: torch.device) -> dict[str, Any]:
    """Versions and hardware, for whoever wants to repeat the run."""
    import numpy

    from setstream import __version__

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
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None
