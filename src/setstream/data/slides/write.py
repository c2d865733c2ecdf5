"""Write a picture as a slide: a tiled pyramid that OpenSlide opens, each level half the one before.

For tests, tutorials, and pictures from elsewhere. The levels are top-level pages of the file, as in a generic tiled TIFF.
"""

from pathlib import Path

import numpy as np

from setstream._utils.atomic import whole_or_nothing
from setstream._utils.optional import need
from setstream.errors import ConfigurationError, ShapeError

#: Micrometres per pixel at 1x.
MICROMETRES = 10.0


def halved(picture: np.ndarray) -> np.ndarray:
    """Means of 2 x 2 pixels; an odd last row or column is dropped."""
    height, width = (length // 2 * 2 for length in picture.shape[:2])
    blocks = picture[:height, :width].reshape(height // 2, 2, width // 2, 2, -1)
    return (blocks.mean((1, 3)) + 0.5).astype(np.uint8)


def write_slide(
    path: str | Path, picture: np.ndarray, magnification: float | None = 20.0, *, levels: int | None = None, tile: int = 256,
    compression: str = "jpeg",
) -> Path:  # fmt: skip
    """Write a picture as a slide: a tiled pyramid.

    Args:
        picture: (H, W, 3) bytes.
        magnification: Magnification of the first level; None leaves it out of the file.
        levels: How many; as many as it takes to get below 512 pixels unless given.
        compression: "jpeg" (small) or "deflate" (exact).
    """
    if picture.ndim != 3 or picture.shape[-1] != 3 or picture.dtype != np.uint8:
        raise ShapeError(f"a picture is (H, W, 3) bytes; got {picture.shape}, {picture.dtype}")
    if compression not in ("jpeg", "deflate"):
        raise ConfigurationError(f"compression is jpeg or deflate; got {compression!r}")
    path = Path(path)
    tifffile = need("tifffile", "slides")
    # The resolution tags count pixels in a centimetre.
    scale = {} if magnification is None else {"resolution": (1e4 * magnification / MICROMETRES,) * 2, "resolutionunit": 3}
    wanted = levels or max(1, int(np.ceil(np.log2(max(picture.shape[:2]) / 512))) + 1)
    quality = {"compressionargs": {"level": 90}} if compression == "jpeg" else {}
    with whole_or_nothing(path) as hidden, tifffile.TiffWriter(hidden, bigtiff=picture.nbytes > 2**31) as file:
        for level in range(wanted):
            kind = scale if level == 0 else {"subfiletype": 1}
            file.write(picture, tile=(tile, tile), photometric="rgb", compression=compression, **quality, **kind)
            picture = halved(picture)
    return path
