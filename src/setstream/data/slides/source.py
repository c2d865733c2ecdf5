"""Patches as a set, read directly from the slide; and in pictures of the slide.

source = SlideSource("a.svs")                           cut on first use: tissue, grid, 20x, 256 pixels
source = SlideSource("a.svs", "job/20x_256px_0px_overlap/patches/a_patches.h5")
z = ss.encode(encoder, source, chunk_size=256)          elements (3, 256, 256), floats in [0, 1]
picture = heat_map(slide, grid, values)                 a value for each patch; a patch is a whole number of pixels: no seams
picture = heat_map(None, grid, values)                  the same without the slide, on white
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from setstream._utils.atomic import whole_or_nothing
from setstream._utils.optional import need
from setstream.data.formats.file import FileSource
from setstream.data.slides.grid import Grid, GridOptions, Tissue, cut, read_grid
from setstream.data.slides.pyramid import Slide
from setstream.errors import ConfigurationError, ShapeError
from setstream.sets.source import Metadata

LONGEST = 1600
TISSUE, PATCHES = (0, 140, 60), (30, 70, 220)
COLOURS = np.array([(48, 18, 130), (40, 120, 240), (60, 210, 130), (245, 215, 50), (200, 20, 10)], float)  #: blue to red
OPACITY = 0.6  #: how much of a heat map's colour covers the slide
LARGEST = 4 * LONGEST  #: the longest side of a picture, however small the patches are
BLOCK = 2**18  #: pixels that are coloured at a time, and patches


def as_floats(patches: Tensor) -> Tensor:
    """Bytes as floats in [0, 1]."""
    return patches.float().div_(255.0)


class _Patches:
    """The patches of an open slide, which can be indexed: (n, 3, S, S) bytes."""

    def __init__(self, slide: Slide, grid: Grid) -> None:
        self.file, self.grid, self.shape = slide, grid, (len(grid), 3, grid.patch_size, grid.patch_size)

    def __getitem__(self, index: slice | np.ndarray) -> np.ndarray:
        size, coords = self.grid.patch_size, self.grid.coords[index]
        patches = np.empty((len(coords), 3, size, size), np.uint8)
        for patch, (x, y) in zip(patches, coords.tolist(), strict=True):
            patch[:] = self.file.patch(x, y, self.grid.patch_size_level0, size).transpose(2, 0, 1)
        return patches


class SlideSource(FileSource):
    """The patches of a slide as a set of (3, S, S) elements, floats in [0, 1] or, with raw=True, bytes.

    Args:
        grid: A `Grid`, or the file of one; the slide is cut with `options` on first use unless given.
        options: How to cut, as in `GridOptions`: magnification, patch_size, min_tissue, ...
    """

    suffixes = (".svs", ".ndpi", ".mrxs", ".scn")  #: for `ss.data.open`; .tif may be any image: use `open_slides`
    small_gap = 1  # decoding takes longer than skipping

    def __init__(
        self,
        path: str | Path,
        grid: Grid | str | Path | None = None,
        id: str | None = None,
        label: Any = None,
        metadata: Metadata = None,
        *,
        raw: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(path, id, label, metadata)
        if grid is not None and options:
            raise ConfigurationError(f"a slide is cut by its grid or by options, not both; got a grid and {sorted(options)}")
        try:
            self.options = GridOptions(**options)
        except TypeError as error:
            raise ConfigurationError(f"a slide does not take these options: {error}") from error
        self.raw, self._grid = raw, grid

    @property
    def grid(self) -> Grid:
        """The positions of the patches; from their file, or cut now."""
        if self._grid is None:
            with Slide(self.path, self.options.level0_magnification) as slide:
                self._grid = cut(slide, self.options, self.id)[0]
        elif not isinstance(self._grid, Grid):
            self._grid = read_grid(self._grid)
        return self._grid

    def coords(self) -> Tensor:
        """The position of each element, (N, 2): x and y of its upper left corner at level 0."""
        return torch.from_numpy(self.grid.coords)

    def open(self) -> _Patches:
        return _Patches(Slide(self.path), self.grid)

    def __len__(self) -> int:
        return len(self.grid)

    @property
    def shape(self) -> tuple[int, ...]:
        return (3, self.grid.patch_size, self.grid.patch_size)

    @property
    def dtype(self) -> torch.dtype:
        return torch.uint8 if self.raw else torch.float32

    def _tensor(self, array: np.ndarray) -> Tensor:
        patches = super()._tensor(array)
        return patches if self.raw else as_floats(patches)


def thumbnail_for(slide: Slide | None, grid: Grid) -> tuple[np.ndarray, float]:
    """A picture of about LONGEST pixels in which a patch has a whole number of pixels, and its downsample.

    Without a slide it is white, and as large as the slide, if the grid has its size, or as the patches reach.
    """
    size = slide.size if slide is not None else (grid.level0_width, grid.level0_height)
    if slide is None:
        reach = (grid.coords.max(0, initial=0) + grid.patch_size_level0).tolist()
        size = (max(size[0], reach[0]), max(size[1], reach[1]))
    side = max(1, round(grid.patch_size_level0 * LONGEST / max(size)))
    downsample = max(1.0, grid.patch_size_level0 / side, max(size) / LARGEST)
    if slide is not None:
        return slide.thumbnail(downsample), downsample
    width, height = (max(1, round(length / downsample)) for length in size)
    return np.full((height, width, 3), 255, np.uint8), downsample


def pixels_of(grid: Grid, downsample: float, shape: tuple[int, int]) -> Iterator[tuple[bool, np.ndarray, np.ndarray]]:
    """For each pixel of a patch: is it at the edge, the patches with it inside a picture, its places in the flat picture.

    The patches come in blocks.
    """
    side = max(1, round(grid.patch_size_level0 / downsample))
    height, width = shape
    for start in range(0, len(grid), BLOCK):
        left, top = (np.rint(axis / downsample).astype(np.int64) for axis in grid.coords[start : start + BLOCK].T)
        for row, column in np.ndindex(side, side):
            inside = (left + column >= 0) & (left + column < width) & (top + row >= 0) & (top + row < height)
            edge = row in (0, side - 1) or column in (0, side - 1)
            yield edge, start + inside.nonzero()[0], ((top + row) * width + left + column)[inside]


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


def heat_map(slide: Slide | None, grid: Grid, values: np.ndarray) -> np.ndarray:
    """The slide under the values (N,) of its patches: (h, w, 3) bytes, from blue (their 1% quantile) to red (their 99%).

    slide: None draws the values alone, on white.
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
        np.add.at(total, pixels, scaled[patches])  # a bincount would be as long as the picture, for every block
        np.add.at(count, pixels, 1.0)
    flat, steps = picture.reshape(-1, 3).copy(), np.linspace(0.0, 1.0, len(COLOURS))
    opacity = 1.0 if slide is None else OPACITY
    for start in range(0, size, BLOCK):
        seen = start + np.flatnonzero(count[start : start + BLOCK])
        below, values = flat[seen].astype(np.float64), total[seen] / count[seen]
        colours = np.stack([np.interp(values, steps, channel) for channel in COLOURS.T], axis=-1)
        flat[seen] = (below + opacity * (colours - below)).round().astype(np.uint8)
    return flat.reshape(picture.shape)


def save_png(path: Path, picture: np.ndarray) -> None:
    """Write a picture atomically."""
    with whole_or_nothing(path) as hidden:
        need("PIL.Image", "slides").fromarray(picture).save(hidden, compress_level=3)
