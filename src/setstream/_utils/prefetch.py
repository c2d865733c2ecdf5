"""Read ahead: the next pieces are fetched by a thread while the current one is worked on.

Reading waits for the disk, and copies without holding Python's lock, so one thread is enough to hide it. Decoding computes:
ahead of another computation it is worth it only where it does not take that one's core.
"""

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from itertools import repeat, takewhile
from typing import Any, TypeVar

import torch

T = TypeVar("T")


def decoded_ahead(device: torch.device) -> int:
    """How many pieces to decode ahead of a computation on this device: none where its threads take all cores.

    Measured on two cores (docs/results/io.md): one after the other is no slower than both at a time, and often faster.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return 2 if device.type != "cpu" or torch.get_num_threads() < cores else 0


def read_ahead(reads: Iterable[Callable[[], T]], ahead: int = 2) -> Iterator[T]:
    """The results of the calls, in order; up to `ahead` of them are started before they are needed."""
    if ahead < 1:
        yield from (call() for call in reads)
        return
    with ThreadPoolExecutor(1, thread_name_prefix="setstream-read") as pool:
        waiting: deque[Future[T]] = deque()
        try:
            for call in reads:
                waiting.append(pool.submit(call))
                if len(waiting) > ahead:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            for future in waiting:
                future.cancel()


def iterate_ahead(items: Iterator[T], ahead: int = 2) -> Iterator[T]:
    """The same items, in order; the thread reads up to `ahead` items before they are needed."""
    end = object()
    following: Callable[[], Any] = partial(next, items, end)
    yield from takewhile(lambda item: item is not end, read_ahead(repeat(following), ahead))
