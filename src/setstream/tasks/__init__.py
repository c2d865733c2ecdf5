"""Tasks: each its data, its models by name, its loss and metrics."""

from __future__ import annotations

from importlib import import_module

from setstream.errors import ConfigurationError
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
    module, _, attribute = place.partition(":")
    if not attribute:
        raise ConfigurationError(
            f"unknown task {name!r}: choose one of {', '.join(TASKS)}, or give your own as package.module:Class"
        )
    try:
        found = getattr(import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise ConfigurationError(f"the task {name!r} cannot be imported: {error}") from error
    if not (isinstance(found, type) and issubclass(found, Task)):
        raise ConfigurationError(f"{name!r} is not a subclass of setstream.training.Task")
    return found
