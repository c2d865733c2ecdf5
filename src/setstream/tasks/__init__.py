"""Tasks: each its data, its models by name, its loss and metrics."""

from __future__ import annotations

from setstream.errors import ConfigurationError
from setstream.places import find
from setstream.training.task import Task

#: Where each task lives; a module is imported when its task is asked for.
TASKS = {
    "clustering": "setstream.tasks.clustering:Clustering",
    "completion": "setstream.tasks.completion:Completion",
    "documents": "setstream.tasks.documents:Documents",
    "mil": "setstream.tasks.mil:Mil",
    "needles": "setstream.tasks.mil.needles:Needles",
    "other-classes": "setstream.tasks.mil.needles:OtherClasses",
}


def task_class(name: str) -> type[Task]:
    """The task of a name: one of ours, or your own as `package.module:Class`.

    >>> task_class("clustering").name
    'clustering'
    """
    place = TASKS.get(name, name)
    if ":" not in place:
        raise ConfigurationError(
            f"unknown task {name!r}: choose one of {', '.join(TASKS)}, or give your own as package.module:Class"
        )
    found = find(place, "task")
    if not (isinstance(found, type) and issubclass(found, Task)):
        raise ConfigurationError(f"{name!r} is not a subclass of setstream.training.Task")
    return found
