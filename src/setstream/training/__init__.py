"""Training: one trainer for every task.

A `Task` provides data, models by name, a loss and metrics; a `TrainConfig` holds the options; a `Trainer` trains in a run
folder, and resumes a stopped run.
"""

from setstream.training.config import TrainConfig
from setstream.training.processes import keep_freed_memory
from setstream.training.task import Batch, Encode, Task
from setstream.training.trainer import Result, Trainer

__all__ = ["Batch", "Encode", "Result", "Task", "TrainConfig", "Trainer", "keep_freed_memory"]
