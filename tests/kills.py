"""SIGKILL in the middle of work, at a moment that is counted in events of the work, not in seconds."""

import os
import signal
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any


def kill_after(work: Callable[[Callable[[], None]], None], ticks: int, lines: int) -> bool:
    """Fork a child that does `work(tick)`; kill it after so many ticks and then so many lines of Python.

    Returns whether it was killed at work. A busy machine does not move the moment. The child goes on until the signal arrives,
    so that it may die between two lines or within a system call.
    """
    listening, telling = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.close(listening)
            work(_Countdown(telling, ticks, lines).tick)
        finally:
            os._exit(0)
    os.close(telling)
    os.read(listening, 1)  # returns when the child has counted down, or has ended
    os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    os.close(listening)
    return os.WIFSIGNALED(status)


class _Countdown:
    """Counts ticks, then lines of all threads, then tells the parent."""

    def __init__(self, telling: int, ticks: int, lines: int) -> None:
        self.telling, self.ticks, self.lines = telling, ticks, lines

    def tick(self) -> None:
        if self.ticks == 0:
            threading.settrace(self.trace)
            sys.settrace(self.trace)
        self.ticks -= 1

    def trace(self, frame: FrameType, event: str, argument: Any) -> Any:
        if event == "line":
            self.lines -= 1
            if self.lines < 0:
                sys.settrace(None)
                os.write(self.telling, b".")
                return None
        return self.trace
