"""Libraries that an extra of setstream installs, imported when they are needed; the error names the extra."""

from importlib import import_module
from typing import Any

from setstream.errors import ConfigurationError


def need(module: str, extra: str = "data", what: str = "these files") -> Any:
    """Import a library that comes with an extra of setstream; ConfigurationError says how to get it, and `what` needs it."""
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        raise ConfigurationError(f"{module.split('.')[0]} is needed for {what}: pip install 'setstream[{extra}]'") from error
