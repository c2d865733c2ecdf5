"""A matplotlib figure that changes, as an animated GIF."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import TYPE_CHECKING

from setstream._utils.optional import need

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FRAME, LAST = 160, 2500  # milliseconds


def animate(figure: Figure, draw: Callable[[int], None], frames: int, colors: int = 48) -> bytes:
    """The GIF of draw(0), draw(1), ..., each of which changes the figure; the last one stays longer."""
    image = need("PIL.Image", "report", "animations")
    pictures = []
    for frame in range(frames):
        draw(frame)
        buffer = io.BytesIO()
        figure.savefig(buffer, format="png", dpi=72)
        pictures.append(image.open(buffer).convert("P", palette=image.Palette.ADAPTIVE, colors=colors))
    out = io.BytesIO()
    durations = [FRAME] * (frames - 1) + [LAST]
    pictures[0].save(out, format="GIF", save_all=True, append_images=pictures[1:], duration=durations, loop=0)
    return out.getvalue()
