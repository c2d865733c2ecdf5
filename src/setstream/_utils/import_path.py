"""Objects that options name by import path: `package.module:name`, or `package.module:NAMES[key]` in a mapping.

Importing a module runs its code. A caller, in Python or on the command line, may name any importable object. A file that
describes a model (the config.json of a saved model, or of a run) may not: while such a file is followed (`named_by_file`),
`find` returns what is listed under OURS and what the caller has named again (`trust`), and nothing else. Every import path that
options contain is resolved here, however deep in a builder, so a new builder needs no check of its own.
"""

import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from importlib import import_module
from pathlib import Path
from typing import Any

from setstream.errors import ConfigurationError

PLACE = re.compile(r"(?P<module>[\w.]+):(?P<name>\w+)(\[(?P<key>[^\]]+)\])?")
MISSING = (ImportError, AttributeError, ValueError, LookupError, TypeError)  # if there is no such object
#: Import paths of the tasks.
TASKS = {
    "clustering": "setstream.tasks.clustering:Clustering",
    "completion": "setstream.tasks.completion:Completion",
    "documents": "setstream.tasks.documents:Documents",
    "mil": "setstream.tasks.mil:Mil",
}
#: Tasks of docs/results, which are in a checkout only. A file that names one needs `trust`, as for a user's own.
EXPERIMENTS = {"needles": "benchmarks.needles:Needles", "other-classes": "benchmarks.needles:OtherClasses"}
TASK_MODELS = [f"{task}.{recipe}" for task in TASKS for recipe in ("models", "released")]
#: What a file may name: our tasks, and the entries of our mappings of models. (Backbones are named by their keys alone.)
OURS = (*TASKS.values(), "setstream.integrations.sklearn.network:MODELS[]")
OURS += tuple(f"setstream.tasks.{module}:MODELS[]" for module in TASK_MODELS)
# The file that is being followed, and the import paths that the caller lets it name; None: the caller names things.
_followed: ContextVar[tuple[Path, frozenset[str]] | None] = ContextVar("followed", default=None)


@contextmanager
def named_by_file(file: Path, trust: Iterable[str] = ()) -> Iterator[None]:
    """Within this context, a file chooses what is built: parts of setstream, and the import paths in `trust`."""
    named = frozenset([trust] if isinstance(trust, str) else trust)
    if invalid := [place for place in named if PLACE.fullmatch(place) is None]:
        raise ConfigurationError(f"trust takes import paths, package.module:name; got {invalid[0]!r}")
    before = _followed.set((file, named))
    try:
        yield
    finally:
        _followed.reset(before)


def follows_file() -> bool:
    """Whether a file chooses what is built now."""
    return _followed.get() is not None


def find(place: str, what: str) -> Any:
    """The object at `package.module:name`; `what` says in the error what it should be."""
    if (followed := _followed.get()) and place not in followed[1] and re.sub(r"\[.*", "[]", place) not in OURS:
        raise ConfigurationError(
            f"{followed[0]} names the {what} {place!r}, which is not part of setstream: if you trust it, name it yourself, "
            f"trust=[{place!r}], or --trust {place} on the command line. Files must not choose what code is run"
        )
    try:
        return _imported(place)
    except MISSING as error:
        where = " (it is in a checkout of setstream: work in that folder)" * place.startswith("benchmarks.")
        raise ConfigurationError(f"the {what} {place!r} cannot be imported: {error}{where}") from error


def _imported(place: str) -> Any:
    if (parts := PLACE.fullmatch(place)) is None:
        raise ValueError("an import path is package.module:name")
    thing = getattr(import_module(parts["module"]), parts["name"])
    return thing if parts["key"] is None else thing[parts["key"]]


def place_of(thing: Callable[..., Any], key: str | None = None) -> str | None:
    """Where a function or class can be found again: under its own name, or as `MODELS[key]` beside it; None if nowhere."""
    module = getattr(thing, "__module__", None) or ""
    if module == "__main__":  # another process has another one
        return None
    for place in (f"{module}:MODELS[{key}]", f"{module}:{getattr(thing, '__qualname__', '')}"):
        with suppress(*MISSING):
            if _imported(place) is thing:
                return place
    return None
