"""Figures and animations by matplotlib, drawn into files and not on a screen."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from setstream._utils.optional import need

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FRAME_MS, LAST_FRAME_MS = 160, 2500


def pyplot() -> Any:
    """The module matplotlib.pyplot."""
    need("matplotlib", "report", "figures").use("Agg")
    return need("matplotlib.pyplot", "report", "figures")


def plot_ranges(axes: Any, values: Mapping[Any, Sequence[float]], label: str) -> None:
    """A line through the mean of the values at each x, with bars from the smallest to the largest value."""
    places = sorted(values)
    means = [sum(values[x]) / len(values[x]) for x in places]
    below = [mean - min(values[x]) for x, mean in zip(places, means, strict=True)]
    above = [max(values[x]) - mean for x, mean in zip(places, means, strict=True)]
    axes.errorbar(places, means, [below, above], marker="o", capsize=3, label=label)


def animate(figure: Figure, draw: Callable[[int], None], frames: int, colors: int = 48) -> bytes:
    """The GIF of draw(0), draw(1), ..., each of which changes the figure; the last frame stays longer."""
    image = need("PIL.Image", "report", "animations")
    pictures = []
    for frame in range(frames):
        draw(frame)
        buffer = io.BytesIO()
        figure.savefig(buffer, format="png", dpi=72)
        pictures.append(image.open(buffer).convert("P", palette=image.Palette.ADAPTIVE, colors=colors))
    pyplot().close(figure)
    out = io.BytesIO()
    durations = [FRAME_MS] * (frames - 1) + [LAST_FRAME_MS]
    pictures[0].save(out, format="GIF", save_all=True, append_images=pictures[1:], duration=durations, loop=0)
    return out.getvalue()
