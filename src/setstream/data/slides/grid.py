"""The patches of a slide: squares on a grid that hold enough tissue.

side     e = s m_0 / m                      pixels of level 0, for s pixels at magnification m
step     e - o m_0 / m                      o: overlap, in pixels at m; zero by default
kept     share of tissue >= min_tissue      row by row, so that neighbours in the set are neighbours on the slide

Files are in TRIDENT's layout; CLAM's coordinates are read, too:

    <out>/20x_256px_0px_overlap/
        patches/<slide>_patches.h5             coords (N, 2), with attributes: how the slide was cut
        visualization/<slide>.png              the slide with its tissue and its patches
        features_<backbone>/<slide>.h5         features (N, D), coords (N, 2)
"""

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from setstream._utils.atomic import whole_or_nothing
from setstream._utils.optional import need
from setstream.data.formats.file import existing, reading
from setstream.data.formats.hdf5 import read_h5
from setstream.data.slides.pyramid import Slide
from setstream.data.slides.tissue import Tissue, find_tissue
from setstream.errors import ConfigurationError, DataError

#: Pixels along a side of a patch, at any level: a file with more is damaged.
LARGEST_PATCH = 2**14


@dataclass(frozen=True)
class GridOptions:
    """How a slide is cut.

    Args:
        magnification: Magnification of the patches.
        patch_size: Their side, in pixels at that magnification.
        overlap: Overlap of neighbours, in the same pixels.
        min_tissue: The share of tissue that a patch must have.
        threshold: Threshold of the saturation; Otsu's unless given.
        level0_magnification: Magnification of the scan, if the file does not give it.
    """

    magnification: float = 20.0
    patch_size: int = 256
    overlap: int = 0
    min_tissue: float = 0.25
    threshold: float | None = None
    level0_magnification: float | None = None

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

        Example:
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
        values = asdict(self)
        del values["coords"]
        return {key: int(value) if isinstance(value, float) and value.is_integer() else value for key, value in values.items()}


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
    magnifications = (slide.magnification, options.magnification)
    return Grid(kept, options.patch_size, extent, *magnifications, options.overlap, name, width, height), tissue


def pixels_of(grid: Grid, downsample: float, shape: tuple[int, int]) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """For each pixel of a patch at `downsample`: which patches have it inside a picture of this shape, and its places there.

    Places count in the flattened picture. Yields once per pixel of a patch, for any number of patches.
    """
    side = max(1, round(grid.patch_size_level0 / downsample))
    left, top = (np.rint(axis / downsample).astype(np.int64) for axis in grid.coords.T)
    height, width = shape
    for row, column in np.ndindex(side, side):
        inside = (left + column < width) & (top + row < height)
        yield inside.nonzero()[0], ((top + row) * width + left + column)[inside]


def write_coords(file: Any, grid: Grid, folder: Path) -> None:
    """Write the coordinates and their attributes into an open HDF5 file."""
    coords = file.create_dataset("coords", data=grid.coords.reshape(-1, 2).astype(np.int64))
    coords.attrs.update(grid.attributes() | {"savetodir": str(folder)})


def write_grid(path: Path, grid: Grid) -> None:
    """Write the file of a slide's patches."""
    with whole_or_nothing(path) as hidden, need("h5py").File(hidden, "w") as file:
        write_coords(file, grid, path.parent.parent)


def read_grid(path: str | Path) -> Grid:
    """The patches of a slide from a file of coordinates or features, in TRIDENT's layout or CLAM's."""
    path = existing(path)
    coords, attributes = read_h5(path, "coords")
    with reading(path):
        size, extent = attributes.get("patch_size"), attributes.get("patch_size_level0")
        if extent is None and size is not None and "downsample" in attributes:  # CLAM: pixels of a level, and its downsample
            extent = round(int(size) * float(np.ravel(attributes["downsample"])[0]))
        if size is None or extent is None:
            raise DataError(
                f"{path}: 'coords' must have the attributes patch_size and patch_size_level0 (or downsample, as CLAM); "
                f"it has {sorted(attributes)}"
            )
        size, extent = int(size), int(extent)
        if not (0 < size <= LARGEST_PATCH and 0 < extent <= LARGEST_PATCH):
            raise DataError(f"{path}: patches of {size} pixels, {extent} at level 0; both are from 1 to {LARGEST_PATCH}")
        scanned = float(attributes.get("level0_magnification", np.nan))
        target = float(attributes.get("target_magnification", scanned * size / extent))
        overlap, width, height = (int(attributes.get(key, 0)) for key in ("overlap", "level0_width", "level0_height"))
        name = str(attributes.get("name", path.stem.removesuffix("_patches")))
        return Grid(coords.reshape(-1, 2).astype(np.int64), size, extent, scanned, target, overlap, name, width, height)
