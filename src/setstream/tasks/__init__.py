"""Tasks: each its data, its models by name, its loss, metrics and report."""

from setstream._utils.import_path import TASKS
from setstream.training.task import task_class

__all__ = ["TASKS", "task_class"]
