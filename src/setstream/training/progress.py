"""Progress of a run: a Rich bar on a terminal, a line now and then elsewhere, nothing on other ranks."""

import sys
import time
from types import TracebackType
from typing import Any, Self


class Progress:
    """Shows step, loss, rate and time left.

    >>> with Progress(3, title="demo", shown=False) as progress:
    ...     progress.update(1, loss=0.5)
    """

    def __init__(self, steps: int, title: str, start: int = 0, shown: bool = True, every: int = 1000) -> None:
        self.steps, self.title, self.start, self.every = steps, title, start, every
        self.began = time.monotonic()
        self.bar: Any = None
        self.shown = shown
        if shown and sys.stderr.isatty():
            self.bar = _rich_bar()
            if self.bar is not None:
                self.row = self.bar.add_task(title, total=steps, completed=start, loss="", rate="")

    def __enter__(self) -> Self:
        if self.bar is not None:
            self.bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self.bar is not None:
            self.bar.stop()

    def update(self, step: int, loss: float) -> None:
        """Show where the run is."""
        rate = (step - self.start) / max(time.monotonic() - self.began, 1e-9)
        if self.bar is not None:
            self.bar.update(self.row, completed=step, loss=f"loss {loss:.4f}", rate=f"{rate:.1f} steps/s")
        elif self.shown and (step % self.every == 0 or step == self.steps):
            left = (self.steps - step) / max(rate, 1e-9)
            print(f"{self.title}  step {step}/{self.steps}  loss {loss:.4f}  {rate:.0f} steps/s  {left:.0f} s left", flush=True)

    def say(self, text: str) -> None:
        """A line above the bar."""
        if self.bar is not None:
            self.bar.console.print(text)
        elif self.shown:
            print(text, flush=True)


def _rich_bar() -> Any:
    try:
        from rich import progress
    except ModuleNotFoundError:
        return None
    return progress.Progress(
        progress.TextColumn("{task.description}"),
        progress.BarColumn(),
        progress.MofNCompleteColumn(),
        progress.TextColumn("{task.fields[loss]}"),
        progress.TextColumn("{task.fields[rate]}"),
        progress.TimeRemainingColumn(),
        progress.TimeElapsedColumn(),
    )
