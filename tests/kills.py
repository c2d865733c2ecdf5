"""SIGKILL in the middle of work: a child works and ticks, the parent kills it after some ticks, at a random moment."""

import os
import signal
import time
from collections.abc import Callable


def kill_after(work: Callable[[Callable[[], None]], None], ticks: int, pause: float) -> bool:
    """Fork a child that does `work(tick)`; kill it `pause` seconds after so many ticks. Whether it was killed at work.

    Moments are counted in the child's own ticks, so that a busy machine does not move them all before its first step.
    """
    ear, mouth = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.close(ear)
            work(lambda: os.write(mouth, b".") and None)
        finally:
            os._exit(0)
    os.close(mouth)
    heard = 0
    while heard < ticks and os.read(ear, 1):
        heard += 1
    time.sleep(pause)
    os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    os.close(ear)
    return os.WIFSIGNALED(status)
