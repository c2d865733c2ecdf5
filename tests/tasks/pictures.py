"""Small pictures that we draw."""

import numpy as np
from PIL import Image


def write_pictures(folder, count=20, side=8):
    """Random pictures in colour."""
    rng = np.random.default_rng(0)
    for number in range(count):
        Image.fromarray(rng.integers(0, 256, (side, side, 3), np.uint8)).save(folder / f"{number:02d}.png")
    return folder
