"""Tasks: each its data, its models by name, its loss, metrics and report."""

from setstream.training.registry import TASKS, task_class

__all__ = ["TASKS", "task_class"]
