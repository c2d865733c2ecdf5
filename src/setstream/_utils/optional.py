"""Libraries that come with an extra of setstream: imported when they are needed, and missed by name."""

from importlib import import_module
from typing import Any

from setstream.errors import ConfigurationError


def need(module: str, extra: str = "data", what: str = "these files") -> Any:
    """Import a library that an extra brings, or name the extra; the error says that it is needed for `what`."""
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        package = module.split(".")[0]
        raise ConfigurationError(f"{package} is needed for {what}: pip install 'setstream[{extra}]'") from error
