"""matplotlib, if it is there, drawing into files and not on a screen."""

from typing import Any

from setstream._utils.optional import need

#: How each gradient is drawn.
LINES = {"full": "-", "exact": "-", "unbiased": "--", "importance": "-.", "subset": ":"}


def pyplot() -> Any:
    """The module matplotlib.pyplot."""
    need("matplotlib", "report", "figures").use("Agg")
    return need("matplotlib.pyplot", "report", "figures")


def log_scale(axis: Any) -> None:
    """Make the x or y axis (axes.xaxis, axes.yaxis) logarithmic, with plain numbers at 1, 2 and 5 times a power of ten."""
    from matplotlib.ticker import LogLocator, NullLocator

    getattr(axis.axes, f"set_{axis.axis_name}scale")("log")
    axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter("{x:,.10g}")
