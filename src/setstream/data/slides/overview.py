"""Pictures of a slide: its tissue and its patches, or a value for each patch as a heat map.

The thumbnail is made so that a patch is a whole number of its pixels wide: grids have no seams.
"""

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from setstream._utils.atomic import whole_or_nothing
from setstream._utils.optional import need
from setstream.data.slides.grid import Grid, Tissue
from setstream.data.slides.pyramid import Slide
from setstream.errors import ShapeError

LONGEST = 1600
TISSUE, PATCHES = (0, 140, 60), (30, 70, 220)
#: From low to high: dark blue, blue, green, yellow, red.
COLOURS = np.array([(48, 18, 130), (40, 120, 240), (60, 210, 130), (245, 215, 50), (200, 20, 10)], np.float64)
OPACITY = 0.6  #: how much of a heat map's colour covers the slide
BLOCK = 2**18  #: pixels that are coloured at a time


def thumbnail_for(slide: Slide, grid: Grid) -> tuple[np.ndarray, float]:
    """A picture of about LONGEST pixels in which a patch has a whole number of pixels, and its downsample."""
    side = max(1, round(grid.patch_size_level0 * LONGEST / max(slide.size)))
    downsample = max(1.0, grid.patch_size_level0 / side)
    return slide.thumbnail(downsample), downsample


def pixels_of(grid: Grid, downsample: float, shape: tuple[int, int]) -> Iterator[tuple[bool, np.ndarray, np.ndarray]]:
    """For each pixel of a patch: is it at the edge, the patches with it inside a picture, its places in the flat picture."""
    side = max(1, round(grid.patch_size_level0 / downsample))
    left, top = (np.rint(axis / downsample).astype(np.int64) for axis in grid.coords.T)
    height, width = shape
    for row, column in np.ndindex(side, side):
        inside = (left + column < width) & (top + row < height)
        edge = row in (0, side - 1) or column in (0, side - 1)
        yield edge, inside.nonzero()[0], ((top + row) * width + left + column)[inside]


def overview(slide: Slide, grid: Grid, tissue: Tissue) -> np.ndarray:
    """The slide with the edge of its tissue and the edges of its patches: (h, w, 3) bytes."""
    picture, downsample = thumbnail_for(slide, grid)
    height, width = picture.shape[:2]
    places = ((np.arange(length) + 0.5) * downsample / tissue.downsample for length in (height, width))
    nearest = (np.minimum(place.astype(np.int64), size - 1) for place, size in zip(places, tissue.mask.shape, strict=True))
    flat = picture.reshape(-1, 3)
    for edge, _, pixels in pixels_of(grid, downsample, (height, width)):
        if edge:
            flat[pixels] = PATCHES
    picture[need("skimage.segmentation", "slides").find_boundaries(tissue.mask[np.ix_(*nearest)], mode="inner")] = TISSUE
    return picture


def heat_map(slide: Slide, grid: Grid, values: np.ndarray) -> np.ndarray:
    """The slide under the values (N,) of its patches, the lowest blue and the highest red: (h, w, 3) bytes.

    Where patches overlap, their mean is shown. The scale goes from the first to the 99th hundredth of the values.
    """
    if np.shape(values) != (len(grid),):
        raise ShapeError(f"{grid.name} has {len(grid)} patches and needs a value for each; got {np.shape(values)} values")
    picture, downsample = thumbnail_for(slide, grid)
    if not len(grid):
        return picture
    low, high = np.quantile(values, [0.01, 0.99])
    if high <= low:
        low, high = float(np.min(values)), float(np.max(values))
    scaled = (np.asarray(values, np.float64) - low) / (high - low if high > low else 1.0)
    size = picture.shape[0] * picture.shape[1]
    total, count = np.zeros(size), np.zeros(size)
    for _, patches, pixels in pixels_of(grid, downsample, (picture.shape[0], picture.shape[1])):
        total += np.bincount(pixels, scaled[patches], size)
        count += np.bincount(pixels, minlength=size)
    flat, steps = picture.reshape(-1, 3).copy(), np.linspace(0.0, 1.0, len(COLOURS))
    for start in range(0, size, BLOCK):
        seen = start + np.flatnonzero(count[start : start + BLOCK])
        below, values = flat[seen].astype(np.float64), total[seen] / count[seen]
        colours = np.stack([np.interp(values, steps, channel) for channel in COLOURS.T], axis=-1)
        flat[seen] = (below + OPACITY * (colours - below)).round().astype(np.uint8)
    return flat.reshape(picture.shape)


def save_png(path: Path, picture: np.ndarray) -> None:
    """Write a picture atomically."""
    with whole_or_nothing(path) as hidden:
        need("PIL.Image", "slides").fromarray(picture).save(hidden, compress_level=3)
