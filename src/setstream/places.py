"""Things of the user's that options name by their place: `package.module:name`."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from setstream.errors import ConfigurationError


def find(place: str, what: str) -> Any:
    """What lies at `package.module:name`; `what` it is meant to be stands in the error.

    >>> find("math:pi", "number")
    3.141592653589793
    """
    module, _, name = place.partition(":")
    try:
        return getattr(import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigurationError(f"the {what} {place!r} cannot be imported: {error}") from error
