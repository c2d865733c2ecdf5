"""What a run reports: metrics as JSON lines (and for TensorBoard), the environment it ran in, and progress on the screen."""

import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch

from setstream import __version__
from setstream._utils.atomic import write_atomically
from setstream._utils.optional import need
from setstream.errors import ConfigurationError

#: The kinds of lines in metrics.jsonl with metrics of held-out sets: while the run went on, and at its end.
EVALUATIONS = ("validation", "test", "final")


Position = Callable[[int], str]  #: how far a run is at a step, as text


class Metrics(ExitStack):
    """Metrics by step in metrics.jsonl, of the first process (`active`); resuming drops the lines after the checkpoint."""

    def __init__(self, folder: Path, tensorboard: bool, from_step: int, active: bool) -> None:
        super().__init__()
        self.active = active
        self.board: Any = None
        if not active:
            return
        kept = [line for line in read_metrics(folder, "train", "validation", "test") if line["step"] <= from_step]
        write_atomically(folder / "metrics.jsonl", "".join(json.dumps(line) + "\n" for line in kept))
        self.file = self.enter_context((folder / "metrics.jsonl").open("a"))
        with suppress(ConfigurationError, ImportError):  # an extra: the JSON lines have everything
            if tensorboard:
                board = need("torch.utils.tensorboard", "cli", "TensorBoard")
                self.board = board.SummaryWriter(str(folder / "tensorboard"), purge_step=from_step + 1)
                self.callback(self.board.close)

    def write(self, step: int, kind: str, values: dict[str, float]) -> None:
        """One line: the step, the kind (train, validation, test or final), and the values."""
        if self.active:
            self.file.write(json.dumps({"step": step, "kind": kind, **values}) + "\n")
            self.file.flush()
        for name, value in values.items() if self.board is not None else ():
            self.board.add_scalar(f"{kind}/{name}", value, step)


class Progress(ExitStack):
    """Shows step, loss, rate and time left: a Rich bar on a terminal, a line now and then elsewhere."""

    def __init__(
        self, steps: int, title: str, start: int = 0, shown: bool = True, every: int = 1000, position: Position | None = None
    ) -> None:
        super().__init__()
        self.steps, self.title, self.start, self.shown, self.every = steps, title, start, shown, every
        self.position = position or f"step {{}}/{steps}".format
        self.began = time.monotonic()
        self.bar: Any = None
        if shown and sys.stderr.isatty():
            with suppress(ConfigurationError):  # without Rich, lines
                self.bar = self.enter_context(need("rich.progress", "cli", "a progress bar").Progress())
                self.row = self.bar.add_task(title, total=steps, completed=start)

    def update(self, step: int, loss: float) -> None:
        rate = (step - self.start) / max(time.monotonic() - self.began, 1e-9)
        text = f"{self.position(step)}  loss {loss:.4f}  {rate:.1f} steps/s"
        text += "".join(f"  {mib:.0f} MiB" for mib in resident().values())
        if self.bar is not None:
            self.bar.update(self.row, completed=step, description=f"{self.title}  {text}")
        elif step % self.every == 0 or step == self.steps:
            self.say(f"{text}  {(self.steps - step) / max(rate, 1e-9):.0f} s left")

    def say(self, text: str) -> None:
        """A line above the bar."""
        text = f"{self.title}  {text}"
        if self.bar is not None:
            self.bar.console.print(text)
        elif self.shown:
            print(text, flush=True)


def read_metrics(folder: Path, *kinds: str) -> list[dict[str, Any]]:
    """The lines of these kinds (train, validation, test, final), in order. The last may have been cut off by a kill."""
    path, lines = folder / "metrics.jsonl", []
    for text in path.read_text().splitlines() if path.exists() else []:
        with suppress(ValueError):
            line = json.loads(text)
            if isinstance(line, dict) and "step" in line and line.get("kind") in kinds:
                lines.append(line)
    return lines


def resident() -> dict[str, float]:
    """The memory of this process in MiB, `memory_mib`; empty where the system does not say."""
    with suppress(OSError, ValueError):
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return {"memory_mib": round(pages * os.sysconf("SC_PAGE_SIZE") / 2**20)}
    return {}


def environment(device: torch.device) -> dict[str, Any]:
    """Versions and hardware, for repeating the run; the commit if setstream runs from a checkout."""
    command, commit = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"], None
    with suppress(OSError, subprocess.TimeoutExpired):
        commit = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False).stdout.strip() or None
    name = f"{device} ({torch.cuda.get_device_name(device)})" if device.type == "cuda" else str(device)
    processor = platform.processor() or platform.machine()
    versions = {"setstream": __version__, "python": sys.version.split()[0], "torch": torch.__version__, "numpy": np.__version__}
    machine = {"platform": platform.platform(), "processor": processor, "cores": os.cpu_count()}
    return versions | machine | {"threads": torch.get_num_threads(), "device": name, "commit": commit}
