"""The patches of a slide: squares on a grid that hold enough tissue.

saturation   S = (max(r, g, b) - min(r, g, b)) / max(r, g, b)        glass is grey or white, stain has colour
threshold    t* = argmax_t  w0(t) w1(t) (μ0(t) - μ1(t))²             Otsu, 1979: the two sides as far apart as possible
tissue       median(S) > t*, closed; specks and holes that are too small are dropped and filled

side     e = s m_0 / m                      pixels of level 0, for s pixels at magnification m
step     e - o m_0 / m                      o: overlap, in pixels at m; zero by default
kept     share of tissue >= min_tissue      row by row, so that neighbours in the set are neighbours on the slide

Files are in TRIDENT's layout; CLAM's coordinates are read, too:

    <out>/20x_256px_0px_overlap/
        patches/<slide>_patches.h5             coords (N, 2), with attributes: how the slide was cut
        visualization/<slide>.png              the slide with its tissue and its patches
        features_<backbone>/<slide>.h5         features (N, D), coords (N, 2)
"""

import math
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from setstream._utils.atomic import whole_or_nothing
from setstream._utils.optional import need
from setstream.data.formats.file import existing, reading
from setstream.data.formats.hdf5 import read_h5
from setstream.data.slides.pyramid import Slide
from setstream.errors import ConfigurationError, DataError

LARGEST_PATCH = 2**14  #: pixels along a side of a patch, at any level: a file with more is damaged
LONGEST, ENOUGH = 4096, 16  #: the longest side of the picture that is analysed, and the side of a patch in it that is enough
GLASS = 0.03  #: saturations below this are glass, for any Otsu threshold: an empty slide has no two classes
SPECK, HOLE = 0.25, 1.0  #: specks smaller than this share of a patch are dropped, holes smaller than that are filled


@dataclass(frozen=True)
class GridOptions:
    """How a slide is cut."""

    magnification: float = 20.0  #: of the patches
    patch_size: int = 256  #: their side, in pixels at that magnification
    overlap: int = 0  #: of neighbours, in the same pixels
    min_tissue: float = 0.25  #: the share of tissue that a patch must have
    threshold: float | None = None  #: of the saturation; Otsu's unless given
    level0_magnification: float | None = None  #: of the scan, if the file does not give it

    def __post_init__(self) -> None:
        if self.patch_size < 1:
            raise ConfigurationError(f"patch_size must be at least 1; got {self.patch_size}")
        if not 0 <= self.overlap < self.patch_size:
            raise ConfigurationError(f"overlap must be less than patch_size, {self.patch_size}; got {self.overlap}")
        if not 0.0 <= self.min_tissue <= 1.0:
            raise ConfigurationError(f"min_tissue must be a share from 0 to 1; got {self.min_tissue}")

    @property
    def folder(self) -> str:
        """The name of the folder of such patches.

        >>> GridOptions().folder
        '20x_256px_0px_overlap'
        """
        return f"{self.magnification:g}x_{self.patch_size}px_{self.overlap}px_overlap"


@dataclass(frozen=True)
class Grid:
    """Patches of one slide: coords (N, 2), x and y of their upper left corners at level 0, and how they were cut."""

    coords: np.ndarray = field(repr=False)
    patch_size: int
    patch_size_level0: int
    level0_magnification: float
    target_magnification: float
    overlap: int
    name: str
    level0_width: int
    level0_height: int

    def __len__(self) -> int:
        return len(self.coords)

    def attributes(self) -> dict[str, Any]:
        """Everything but the coordinates, whole numbers as such."""
        values = {key: value for key, value in vars(self).items() if key != "coords"}
        return {key: int(value) if isinstance(value, float) and value.is_integer() else value for key, value in values.items()}


@dataclass(frozen=True)
class Tissue:
    """A mask (h, w) over the slide, each of its pixels `downsample` pixels of level 0 wide; the threshold that made it."""

    mask: np.ndarray
    downsample: float
    threshold: float

    def share(self, coords: np.ndarray, extent: int) -> np.ndarray:
        """The share of tissue in each square of `extent` at coords (N, 2), exact for the mask: its integral image is bilinear.

        >>> tissue = Tissue(np.array([[True, False], [True, True]]), 10.0, 0.1)
        >>> tissue.share(np.array([[0, 0], [5, 0], [0, 10]]), 10)
        array([1. , 0.5, 1. ])
        """
        integral = np.pad(self.mask.astype(np.float64).cumsum(0).cumsum(1), ((1, 0), (1, 0)))
        (x0, y0), (x1, y1) = coords.T / self.downsample, (coords.T + extent) / self.downsample
        at = partial(need("scipy.ndimage", "slides").map_coordinates, integral, order=1, mode="nearest")  # bilinear
        return (at([y1, x1]) - at([y1, x0]) - at([y0, x1]) + at([y0, x0])) / (extent / self.downsample) ** 2


def find_tissue(slide: Slide, extent: int, threshold: float | None = None) -> Tissue:
    """The tissue of a slide, for patches of `extent` pixels of level 0; threshold: of the saturation, Otsu's unless given."""
    filters, morphology = need("skimage.filters", "slides"), need("skimage.morphology", "slides")
    downsample = max(extent / ENOUGH, max(slide.size) / LONGEST, 1.0)
    picture = slide.thumbnail(downsample)
    high = picture.max(-1).astype(np.float32)
    values = filters.median((high - picture.min(-1)) / np.maximum(high, 1.0), morphology.disk(2))  # zero for black
    if threshold is None:
        threshold = max(float(filters.threshold_otsu(values)) if np.ptp(values) > 0 else 0.0, GLASS)
    mask = morphology.closing(values > threshold, morphology.disk(2))
    patch = (extent / downsample) ** 2
    mask = morphology.remove_small_objects(mask, max_size=max(math.ceil(SPECK * patch) - 1, 0))
    mask = morphology.remove_small_holes(mask, max_size=max(math.ceil(HOLE * patch) - 1, 0))
    return Tissue(mask, downsample, threshold)


def cut(slide: Slide, options: GridOptions, name: str) -> tuple[Grid, Tissue]:
    """The patches of a slide, and the tissue that they were chosen by."""
    extent = slide.extent(options.patch_size, options.magnification)
    step = extent - round(options.overlap * extent / options.patch_size)
    width, height = slide.size
    tissue = find_tissue(slide, extent, options.threshold)
    left, top = (np.arange(0, length - extent + 1, step) for length in (width, height))
    coords = np.stack([axis.ravel() for axis in np.meshgrid(left, top)], axis=1)
    share = tissue.share(coords, extent)
    kept = coords[(share >= options.min_tissue) & (share > 0)].astype(np.int64)
    scanned, target = slide.magnification, options.magnification
    return Grid(kept, options.patch_size, extent, scanned, target, options.overlap, name, width, height), tissue


def write_coords(file: Any, grid: Grid, folder: Path) -> None:
    """Write the coordinates and their attributes into an open HDF5 file."""
    coords = file.create_dataset("coords", data=grid.coords.reshape(-1, 2).astype(np.int64))
    coords.attrs.update(grid.attributes() | {"savetodir": str(folder)})


def write_grid(path: Path, grid: Grid) -> None:
    """Write the file of a slide's patches."""
    with whole_or_nothing(path) as hidden, need("h5py").File(hidden, "w") as file:
        write_coords(file, grid, path.parent.parent)


def read_grid(path: str | Path, patch_size: int | None = None) -> Grid:
    """The patches of a slide from a file of coordinates or features, in TRIDENT's layout or CLAM's.

    patch_size: the side of a patch in pixels of level 0, for files that do not say it.
    """
    path = existing(path)
    coords, attributes = read_h5(path, "coords", (-1, 2))
    with reading(path):
        if patch_size is not None:
            attributes |= {"patch_size": patch_size, "patch_size_level0": patch_size}
        size, extent = attributes.get("patch_size"), attributes.get("patch_size_level0")
        if extent is None and size is not None and "downsample" in attributes:  # CLAM: pixels of a level, and its downsample
            extent = round(int(size) * float(np.ravel(attributes["downsample"])[0]))
        if size is None or extent is None:
            expected = "patch_size and patch_size_level0 (or downsample, as CLAM)"
            advice = "give a file that has them (--patches), or the side of a patch at level 0 (--patch-size, patch_size=)"
            raise DataError(f"{path}: 'coords' must have the attributes {expected}; it has {sorted(attributes)}: {advice}")
        size, extent = int(size), int(extent)
        if not (0 < size <= LARGEST_PATCH and 0 < extent <= LARGEST_PATCH):
            raise DataError(f"{path}: patches of {size} pixels, {extent} at level 0; both are from 1 to {LARGEST_PATCH}")
        scanned = float(attributes.get("level0_magnification", np.nan))
        target = float(attributes.get("target_magnification", scanned * size / extent))
        overlap, width, height = (int(attributes.get(key, 0)) for key in ("overlap", "level0_width", "level0_height"))
        name = str(attributes.get("name", path.stem.removesuffix("_patches")))
        return Grid(coords.astype(np.int64), size, extent, scanned, target, overlap, name, width, height)
