"""matplotlib, if it is there, drawing into files and not on a screen."""

from __future__ import annotations

from typing import Any

from setstream.errors import ConfigurationError

#: How each gradient is drawn.
LINES = {"full": "-", "exact": "-", "unbiased": "--", "importance": "-.", "subset": ":"}


def pyplot() -> Any:
    """The module matplotlib.pyplot."""
    try:
        import matplotlib
    except ModuleNotFoundError as error:
        raise ConfigurationError("figures need matplotlib: pip install 'setstream[report]'") from error
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    return plt
