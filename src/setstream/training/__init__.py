"""Training: one trainer for every task.

A `Task` brings data, models by name, a loss and metrics; a `TrainConfig` says how; a `Trainer` does it in a run folder, and
goes on where it was stopped.
"""

from setstream.training.allocator import keep_freed_memory
from setstream.training.config import TrainConfig
from setstream.training.task import Batch, Encode, Task
from setstream.training.trainer import Result, Trainer

__all__ = ["Batch", "Encode", "Result", "Task", "TrainConfig", "Trainer", "keep_freed_memory"]
