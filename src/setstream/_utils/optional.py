"""Libraries that an extra of setstream installs, imported when they are needed; the error names the extra."""

from importlib import import_module
from typing import Any

from setstream.errors import ConfigurationError


def need(module: str, extra: str = "data", what: str = "these files") -> Any:
    """Import a library that comes with an extra.

    Args:
        module: The module to import.
        extra: The extra of setstream that installs it.
        what: What it is needed for.

    Raises:
        ConfigurationError: If it is not installed; the error names the extra.
    """
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        package = module.split(".")[0]
        raise ConfigurationError(f"{package} is needed for {what}: pip install 'setstream[{extra}]'") from error
