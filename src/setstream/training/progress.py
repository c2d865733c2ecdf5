"""Progress of a run: a Rich bar on a terminal, a line now and then elsewhere, nothing on other ranks."""

import sys
import time
from contextlib import suppress
from types import TracebackType
from typing import Any, Self

from setstream._utils.optional import need
from setstream.errors import ConfigurationError


class Progress:
    """Shows step, loss, rate and time left.

    >>> with Progress(3, title="demo", shown=False) as progress:
    ...     progress.update(1, loss=0.5)
    """

    def __init__(self, steps: int, title: str, start: int = 0, shown: bool = True, every: int = 1000) -> None:
        self.steps, self.title, self.start, self.shown, self.every = steps, title, start, shown, every
        self.began = time.monotonic()
        self.bar: Any = None
        if shown and sys.stderr.isatty():
            with suppress(ConfigurationError):  # without Rich, lines
                self.bar = _rich_bar()
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
        elif step % self.every == 0 or step == self.steps:
            left = (self.steps - step) / max(rate, 1e-9)
            self.say(f"{self.title}  step {step}/{self.steps}  loss {loss:.4f}  {rate:.0f} steps/s  {left:.0f} s left")

    def say(self, text: str) -> None:
        """A line above the bar."""
        if self.bar is not None:
            self.bar.console.print(text)
        elif self.shown:
            print(text, flush=True)


def _rich_bar() -> Any:
    rich = need("rich.progress", "cli", "a progress bar")
    texts = (rich.TextColumn(f"{{task.fields[{name}]}}") for name in ("loss", "rate"))
    columns = (rich.TextColumn("{task.description}"), rich.BarColumn(), rich.MofNCompleteColumn(), *texts)
    return rich.Progress(*columns, rich.TimeRemainingColumn(), rich.TimeElapsedColumn())
