"""Ctrl-C that saves: a request to stop is noted, and met after the step."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def asked_to_stop(stop: threading.Event) -> Iterator[None]:
    """While it is open, Ctrl-C and SIGTERM set `stop`; a second Ctrl-C interrupts at once. Other threads get no signals."""

    def ask(number: int, frame: FrameType | None) -> None:
        if stop.is_set() and number == signal.SIGINT:
            raise KeyboardInterrupt
        stop.set()

    heard = (signal.SIGINT, signal.SIGTERM) if threading.current_thread() is threading.main_thread() else ()
    before = {number: signal.signal(number, ask) for number in heard}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
