"""A whole-slide image: its levels, its magnification, its pixels; and how to write one, for tests and other pictures.

    downsample d_l of level l:        pixels of level 0 in a pixel of level l
    magnification of level l:         m_l = m_0 / d_l          m_0: from the file, or 10 µm / mpp if it has none
    a patch of s pixels at m:         s m_0 / m pixels of level 0, read from the coarsest level that is at least as fine as m
    a smaller picture:                new_i = 1/(e_{i+1} - e_i) ∫_{e_i}^{e_{i+1}} old(t) dt     e: edges of new pixels, in old

Resizing takes the mean over the area of each pixel, as pyramids are made; one axis after the other, by differences of the
integral: exact for any ratio, where the box filters of imaging libraries are exact for whole ratios only.
"""

import math
from collections.abc import Mapping
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Any

import numpy as np

from setstream._utils.atomic import whole_or_nothing
from setstream._utils.optional import need
from setstream.data.formats.file import existing, reading
from setstream.errors import ConfigurationError, DataError, ShapeError

OBJECTIVES = (1.25, 2.5, 5.0, 10.0, 20.0, 40.0, 60.0, 80.0)  #: of scanners: 0.243 µm per pixel is 40x, not 41.15x
TOLERANCE = 0.01  #: downsamples of levels are ratios of rounded sizes (4.0003): up to this share they count as equal
MICROMETRES = 10.0  #: micrometres per pixel at 1x
BAND_PIXELS = 1_000_000  #: rows of the level that a thumbnail is made from are read in bands of about this many pixels
SUFFIXES = (".svs", ".tif", ".tiff", ".ndpi", ".mrxs", ".scn", ".svslide", ".bif", ".vms", ".vmu")  #: that OpenSlide opens


def magnification_of(properties: Mapping[str, str]) -> float | None:
    """The magnification of level 0: the objective's, or the one whose pixels have this size; None when neither is known.

    >>> magnification_of({"openslide.objective-power": "20"}), magnification_of({"openslide.mpp-x": "0.243"})
    (20.0, 40.0)
    """
    power, size = (_positive(properties.get(f"openslide.{name}", "")) for name in ("objective-power", "mpp-x"))
    if power is not None or size is None:
        return power
    return min(OBJECTIVES, key=lambda objective: abs(math.log(objective * size / MICROMETRES)))


def _positive(text: str) -> float | None:
    with suppress(ValueError):
        return float(text) if 0 < float(text) < math.inf else None
    return None


def area_mean(picture: np.ndarray, edges: np.ndarray, axis: int) -> np.ndarray:
    """The means of `picture` between the edges along one axis, in float64; the picture itself where nothing changes.

    >>> area_mean(np.array([3.0, 0.0, 6.0]), np.array([0.0, 1.5, 3.0]), axis=0)
    array([2., 4.])
    """
    if len(edges) == picture.shape[axis] + 1 and np.array_equal(edges, np.arange(len(edges))):
        return picture
    rows = np.moveaxis(picture, axis, 0)
    integral = np.concatenate([np.zeros((1, *rows.shape[1:])), rows.cumsum(0, dtype=np.float64)])
    edges = np.clip(edges, 0, len(rows))
    below = np.minimum(edges.astype(np.int64), len(rows) - 1)
    inside = (edges - below).reshape(-1, *[1] * (rows.ndim - 1))
    means = np.diff(integral[below] + inside * rows[below], axis=0) / np.diff(edges).reshape(inside[1:].shape)
    return np.moveaxis(means, 0, axis)


def shrink(picture: np.ndarray, vertical: np.ndarray, horizontal: np.ndarray) -> np.ndarray:
    """A picture (H, W, 3) of bytes with new rows and columns between these edges."""
    return np.rint(area_mean(area_mean(picture, vertical, 0), horizontal, 1)).astype(np.uint8)


class Slide(AbstractContextManager["Slide"]):
    """An open slide, for all threads of a process. `magnification`: of level 0, if it is missing or wrong in the file."""

    def __init__(self, path: str | Path, magnification: float | None = None) -> None:
        self.path = existing(path)
        with reading(self.path):
            self._slide = need("openslide", "slides").OpenSlide(str(self.path))
        if magnification is not None and not 0 < magnification < math.inf:
            raise ConfigurationError(f"a magnification must be positive, like 20 or 40; got {magnification}")
        self._magnification = magnification or magnification_of(self._slide.properties)
        self.size: tuple[int, int] = self._slide.dimensions  #: width and height of level 0
        self.downsamples = tuple(float(factor) for factor in self._slide.level_downsamples)
        self._background = "#" + self._slide.properties.get("openslide.background-color", "ffffff")

    @property
    def magnification(self) -> float:
        """The magnification of level 0."""
        if self._magnification is None:
            options = "--level0-magnification 40, or level0_magnification=40"
            raise DataError(f"{self.path}: has neither an objective power nor a pixel size: give its magnification, {options}")
        return self._magnification

    def extent(self, patch_size: int, magnification: float) -> int:
        """The side of a patch of `patch_size` pixels at `magnification`, in pixels of level 0."""
        if not magnification > 0:
            raise ConfigurationError(f"a magnification must be positive, like 20 or 40; got {magnification}")
        if magnification > self.magnification * (1 + TOLERANCE):
            scan = f"{self.magnification:g}"
            raise DataError(f"{self.path}: was scanned at {scan}x; there is no {magnification:g}x in it. Choose {scan} or less")
        return round(patch_size * self.magnification / magnification)

    def level_for(self, downsample: float) -> int:
        """The coarsest level that is at least as fine as `downsample`."""
        fitting = [level for level, factor in enumerate(self.downsamples) if factor <= downsample * (1 + TOLERANCE)]
        return max(fitting, key=lambda level: self.downsamples[level], default=0)

    def patch(self, x: int, y: int, extent: int, patch_size: int) -> np.ndarray:
        """The square of `extent` pixels of level 0 at (x, y), as (patch_size, patch_size, 3) bytes."""
        level = self.level_for(extent / patch_size)
        side = extent / self.downsamples[level]
        if abs(side - patch_size) <= patch_size * TOLERANCE:
            return np.asarray(self._region(x, y, level, patch_size, patch_size))
        read = math.ceil(side - 1e-6)
        region = self._region(x, y, level, read, read)
        if read % patch_size == 0 and abs(side - read) < 1e-3 * read:
            return np.asarray(region.reduce(read // patch_size))
        edges = np.linspace(0.0, side, patch_size + 1)
        return shrink(np.asarray(region), edges, edges)

    def thumbnail(self, downsample: float) -> np.ndarray:
        """The whole slide, smaller by `downsample`: (h, w, 3) bytes. Needs the memory of a band of the level that is read."""
        level = self.level_for(downsample)
        wide, high = self._slide.level_dimensions[level]
        width, height = (max(1, round(length / downsample)) for length in self.size)
        rows = max(1, int(height * BAND_PIXELS / (wide * high)))
        across, down = np.linspace(0.0, wide, width + 1), np.linspace(0.0, high, height + 1)
        bands = []
        for top in range(0, height, rows):
            edges = down[top : top + rows + 1]
            start, stop = math.floor(edges[0]), min(math.ceil(edges[-1]), high)
            region = self._region(0, round(start * self.downsamples[level]), level, wide, stop - start)
            bands.append(shrink(np.asarray(region), edges - start, across))
        return np.concatenate(bands)

    def _region(self, x: int, y: int, level: int, width: int, height: int) -> Any:
        """An RGB image of a level; areas that were not scanned have the background's colour."""
        with reading(f"{self.path}: {width} x {height} pixels at ({x}, {y}) of level {level}"):
            region = self._slide.read_region((int(x), int(y)), level, (width, height))
        plain = need("PIL.Image", "slides").new("RGB", region.size, self._background)
        plain.paste(region, mask=region.getchannel("A"))
        return plain

    def close(self) -> None:
        self._slide.close()

    def __exit__(self, *_: object) -> None:
        self.close()


def write_slide(
    path: str | Path, picture: np.ndarray, magnification: float | None = 20.0, *, levels: int = 0, compression: str = "jpeg"
) -> Path:
    """Write a picture as a slide: a tiled pyramid that OpenSlide opens, each level half the one before.

    Args:
        magnification: Magnification of the first level; None leaves it out of the file.
        levels: How many; 0 stands for as many as it takes to get below 512 pixels.
        compression: "jpeg" (small) or "deflate" (exact).
    """
    if picture.ndim != 3 or picture.shape[-1] != 3 or picture.dtype != np.uint8:
        raise ShapeError(f"a picture is (H, W, 3) bytes; got {picture.shape}, {picture.dtype}")
    if compression not in ("jpeg", "deflate"):
        raise ConfigurationError(f"compression is jpeg or deflate; got {compression!r}")
    path, tifffile = Path(path), need("tifffile", "slides")
    scale = {} if magnification is None else {"resolution": (1e4 * magnification / MICROMETRES,) * 2, "resolutionunit": 3}  # cm
    wanted = levels or max(1, int(np.ceil(np.log2(max(picture.shape[:2]) / 512))) + 1)
    options: dict[str, Any] = {"tile": (256, 256), "photometric": "rgb", "compression": compression}
    options |= {"compressionargs": {"level": 90}} if compression == "jpeg" else {}
    with whole_or_nothing(path) as hidden, tifffile.TiffWriter(hidden, bigtiff=picture.nbytes > 2**31) as file:
        for level in range(wanted):
            file.write(picture, **options, **({"subfiletype": 1} if level else scale))
            height, width = (length // 2 * 2 for length in picture.shape[:2])  # an odd last row or column is dropped
            blocks = picture[:height, :width].reshape(height // 2, 2, width // 2, 2, -1)
            picture = (blocks.mean((1, 3)) + 0.5).astype(np.uint8)
    return path
