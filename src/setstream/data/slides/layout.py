"""Files in TRIDENT's layout, and CLAM's coordinates.

    <out>/20x_256px_0px_overlap/
        patches/<slide>_patches.h5             coords (N, 2), with attributes: how the slide was cut
        visualization/<slide>.png              the slide with its tissue and its patches
        features_<backbone>/<slide>.h5         features (N, D), coords (N, 2)

A file is written under a hidden name and renamed when it is complete.
"""

from pathlib import Path
from typing import Any

import numpy as np

from setstream._utils.atomic import whole_or_nothing
from setstream._utils.optional import need
from setstream.data.formats.file import reading
from setstream.data.formats.hdf5 import read_h5
from setstream.data.slides.grid import Grid
from setstream.errors import DataError

#: Pixels along a side of a patch, at any level: a file with more is damaged.
LARGEST_PATCH = 2**14


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
    path = Path(path)
    if not path.is_file():
        raise DataError(f"{path}: there is no such file")
    coords, attributes = read_h5(path, "coords")
    with reading(path):
        return _grid(coords.reshape(-1, 2).astype(np.int64), attributes, path)


def _grid(coords: np.ndarray, attributes: dict[str, Any], path: Path) -> Grid:
    """The patches at these coordinates, with the attributes that the file has."""
    size = attributes.get("patch_size")
    extent = attributes.get("patch_size_level0")
    if extent is None and size is not None and "downsample" in attributes:  # CLAM: pixels of a level, and its downsample
        extent = round(int(size) * float(np.ravel(attributes["downsample"])[0]))
    if size is None or extent is None:
        raise DataError(
            f"{path}: 'coords' must have the attributes patch_size and patch_size_level0 (or downsample, as CLAM); "
            f"it has {sorted(attributes)}"
        )
    if not (0 < int(size) <= LARGEST_PATCH and 0 < int(extent) <= LARGEST_PATCH):
        raise DataError(f"{path}: patches of {size} pixels, {extent} at level 0; both are from 1 to {LARGEST_PATCH}")
    scanned = float(attributes.get("level0_magnification", np.nan))
    return Grid(
        coords,
        int(size),
        int(extent),
        scanned,
        float(attributes.get("target_magnification", scanned * int(size) / int(extent))),
        int(attributes.get("overlap", 0)),
        str(attributes.get("name", path.stem.removesuffix("_patches"))),
        int(attributes.get("level0_width", 0)),
        int(attributes.get("level0_height", 0)),
    )
