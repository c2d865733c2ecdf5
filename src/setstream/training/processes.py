"""The processes of a run, one, or those that torchrun started: their devices, memory and signals.

data   each process takes its share of a batch's sets; DistributedDataParallel averages the gradients
set    each process takes its share of every set; `encode` sums states and gradients (group)
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType

import torch
import torch.distributed as dist

from setstream.errors import ConfigurationError, DeviceError
from setstream.training.task import Batch


def choose_device(name: str) -> torch.device:
    """The device with this name; "auto" takes CUDA, then MPS, then the CPU. torchrun's local rank chooses among several."""
    available = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    if name == "auto":
        name = next((kind for kind in available if available[kind]), "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigurationError(f"there is no kind of device {name!r}: use auto, cpu, cuda, cuda:1 or mps") from error
    if not available.get(device.type, True):
        raise DeviceError(f"device {name!r} was requested, but there is no {device.type.upper()} device here: use auto or cpu")
    if name != "cuda":
        return device
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())


def keep_freed_memory() -> bool:
    """Tell the C library to keep up to 512 MiB of freed memory for the next step; returns whether it will (glibc only).

    Every step makes and frees tensors of some megabytes. The default returns such memory to the system, so that each step has
    it mapped and zeroed again, page by page: measured on the clustering step, a fifth of its time.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform.startswith("linux") else None
    if mallopt is None:
        return False
    # mallopt(3): M_MMAP_THRESHOLD, at most 32 MiB; M_TRIM_THRESHOLD; M_TOP_PAD.
    return all(mallopt(option, size * 2**20) == 1 for option, size in ((-3, 32), (-1, 512), (-2, 64)))


@contextmanager
def asked_to_stop(stop: threading.Event) -> Iterator[None]:
    """Within this context, Ctrl-C and SIGTERM set `stop`; a second Ctrl-C interrupts at once. Threads get no signals."""

    def ask(number: int, frame: FrameType | None) -> None:
        if stop.is_set() and number == signal.SIGINT:
            raise KeyboardInterrupt
        stop.set()

    numbers = (signal.SIGINT, signal.SIGTERM) if threading.current_thread() is threading.main_thread() else ()
    before = {number: signal.signal(number, ask) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@dataclass(frozen=True)
class Processes:
    """Rank and number of processes, and the group they form."""

    rank: int = 0
    world: int = 1
    group: dist.ProcessGroup | None = None

    @staticmethod
    def join(device: torch.device) -> Processes:
        """Join the others, if torchrun started more than this process."""
        world = int(os.environ.get("WORLD_SIZE", "1"))
        if world == 1:
            return Processes()
        if device.type == "cuda":
            torch.cuda.set_device(device)
        if not dist.is_initialized():
            dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
        return Processes(dist.get_rank(), world, dist.group.WORLD)

    @property
    def first(self) -> bool:
        """Whether this is the process that writes files."""
        return self.rank == 0

    def share(self, batch: Batch, size: int) -> Batch:
        """The sets of a batch that this process trains on."""
        if self.world == 1:
            return batch
        if size % self.world:
            raise ConfigurationError(f"{self.world} processes cannot share a batch of {size} sets: choose a multiple of them")
        part = slice(self.rank * size // self.world, (self.rank + 1) * size // self.world)
        return {name: value[part] for name, value in batch.items()}

    def wait(self) -> None:
        if self.group is not None:
            dist.barrier()

    def leave(self) -> None:
        """Leave the group together: the first process holds the store that the others need until then."""
        if self.group is not None and dist.is_initialized():
            dist.barrier()
            dist.destroy_process_group()

    def any(self, flag: bool) -> bool:
        """Whether any process raised its flag."""
        if self.group is None:
            return flag
        seen = torch.tensor([float(flag)], device="cuda" if dist.get_backend() == "nccl" else "cpu")
        dist.all_reduce(seen, dist.ReduceOp.MAX)
        return bool(seen.item())
