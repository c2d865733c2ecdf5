"""Files as TRIDENT lays them out, and CLAM's coordinates.

    <out>/20x_256px_0px_overlap/
        patches/<slide>_patches.h5             coords (N, 2), with attributes that say how the slide was cut
        visualization/<slide>.png              the slide with its tissue and its patches
        features_<backbone>/<slide>.h5         features (N, D), coords (N, 2)

A file is whole or not there: it is written under a hidden name and moved when it is complete.
"""

from pathlib import Path
from typing import Any

import numpy as np

from setstream._utils.atomic import whole_or_nothing
from setstream._utils.optional import need
from setstream.data.files import read_h5, reading
from setstream.data.slides.grid import Grid
from setstream.errors import DataError

#: Pixels along a side of a patch, at any level: a file that says more is damaged.
LARGEST_PATCH = 2**14


def write_coords(file: Any, grid: Grid, folder: Path) -> None:
    """The coordinates and their attributes, into an open HDF5 file."""
    found = file.create_dataset("coords", data=grid.coords.reshape(-1, 2).astype(np.int64))
    found.attrs.update(grid.attributes() | {"savetodir": str(folder)})


def write_grid(path: Path, grid: Grid) -> None:
    """The file of a slide's patches."""
    with whole_or_nothing(path) as hidden, need("h5py").File(hidden, "w") as file:
        write_coords(file, grid, path.parent.parent)


def read_grid(path: str | Path) -> Grid:
    """The patches of a slide from a file of coordinates or features, in TRIDENT's layout or CLAM's."""
    path = Path(path)
    if not path.is_file():
        raise DataError(f"{path}: there is no such file")
    coords, says = read_h5(path, "coords")
    with reading(path):
        return _grid(coords.reshape(-1, 2).astype(np.int64), says, path)


def _grid(coords: np.ndarray, says: dict[str, Any], path: Path) -> Grid:
    """The patches at these places, from what the file says about them."""
    size = says.get("patch_size")
    extent = says.get("patch_size_level0")
    if extent is None and size is not None and "downsample" in says:  # CLAM: pixels of a level, and that level's downsample
        extent = round(int(size) * float(np.ravel(says["downsample"])[0]))
    if size is None or extent is None:
        raise DataError(
            f"{path}: 'coords' must say patch_size and patch_size_level0 (or downsample, as CLAM); it says {sorted(says)}"
        )
    if not (0 < int(size) <= LARGEST_PATCH and 0 < int(extent) <= LARGEST_PATCH):
        raise DataError(f"{path}: patches of {size} pixels, {extent} at level 0; both are from 1 to {LARGEST_PATCH}")
    scanned = float(says.get("level0_magnification", np.nan))
    width, height = says.get("level0_width", 0), says.get("level0_height", 0)
    return Grid(
        coords,
        int(size),
        int(extent),
        scanned,
        float(says.get("target_magnification", scanned * int(size) / int(extent))),
        int(says.get("overlap", 0)),
        str(says.get("name", path.stem.removesuffix("_patches"))),
        int(width),
        int(height),
    )
