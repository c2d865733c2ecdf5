"""A matplotlib figure that changes, as an animated GIF."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import TYPE_CHECKING

from setstream.errors import ConfigurationError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FRAME, LAST = 160, 2500  # milliseconds


def animate(figure: Figure, draw: Callable[[int], None], frames: int, colors: int = 48) -> bytes:
    """The GIF of draw(0), draw(1), ..., each of which changes the figure; the last one stays longer."""
    try:
        from PIL import Image
    except ModuleNotFoundError as error:
        raise ConfigurationError("the animation needs Pillow: pip install 'setstream[report]'") from error
    pictures = []
    for frame in range(frames):
        draw(frame)
        buffer = io.BytesIO()
        figure.savefig(buffer, format="png", dpi=72)
        pictures.append(Image.open(buffer).convert("P", palette=Image.Palette.ADAPTIVE, colors=colors))
    out = io.BytesIO()
    durations = [FRAME] * (frames - 1) + [LAST]
    pictures[0].save(out, format="GIF", save_all=True, append_images=pictures[1:], duration=durations, loop=0)
    return out.getvalue()
