"""Things of the user's that options name by their place: `package.module:name`, or `package.module:NAMES[key]` in a mapping."""

from __future__ import annotations

import re
from collections.abc import Callable
from importlib import import_module
from typing import Any

from setstream.errors import ConfigurationError

PLACE = re.compile(r"(?P<module>[\w.]+):(?P<name>\w+)(\[(?P<key>[^\]]+)\])?")


def find(place: str, what: str) -> Any:
    """What lies at `package.module:name`; `what` it is meant to be stands in the error.

    >>> find("math:pi", "number")
    3.141592653589793
    >>> find("setstream.tasks.clustering.models:MODELS[deepsets]", "model").__name__
    'deepsets'
    """
    parts = PLACE.fullmatch(place)
    try:
        if parts is None:
            raise ValueError("a place is package.module:name")
        found = getattr(import_module(parts["module"]), parts["name"])
        return found if parts["key"] is None else found[parts["key"]]
    except (ImportError, AttributeError, ValueError, LookupError, TypeError) as error:
        raise ConfigurationError(f"the {what} {place!r} cannot be imported: {error}") from error


def place_of(thing: Callable[..., Any], key: str | None = None) -> str | None:
    """Where a function or class can be found again: under its own name, or as `MODELS[key]` beside it; None if nowhere."""
    module = getattr(thing, "__module__", None) or ""
    if module == "__main__":  # another process has another one
        return None
    for place in (f"{module}:MODELS[{key}]", f"{module}:{getattr(thing, '__qualname__', '')}"):
        try:
            if find(place, "builder") is thing:
                return place
        except ConfigurationError:
            continue
    return None
