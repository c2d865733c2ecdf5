"""ss.data.open: from a path to sets, by what is there.

file .npy .h5 .hdf5 .pt .pth, folder .zarr           one set
file or folder of .parquet .pq .arrow .feather       many sets, by their id column
folder of such files                                 many sets, one a file (CLAM, TRIDENT)
folder with features/ (and labels/)                  many sets, torchmil's layout: parallel folders, one file a bag
folder of images                                     one set; folder of such folders: many
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np

from setstream.data.dataset import SetDataset
from setstream.data.files import H5Source, ImageFolderSource, NpySource, TorchSource, ZarrSource
from setstream.data.parquet import ParquetSets, is_table
from setstream.data.source import SetSource
from setstream.data.tables import SUFFIXES as PARQUET
from setstream.errors import DataError

FILES: dict[str, Callable[[Path], SetSource]] = {
    ".npy": NpySource,
    ".h5": H5Source,
    ".hdf5": H5Source,
    ".pt": TorchSource,
    ".pth": TorchSource,
    ".zarr": ZarrSource,
}


def open_source(path: str | Path) -> SetSource:
    """One set from one file (or Zarr folder, or folder of images)."""
    path = Path(path)
    if not path.exists():
        raise DataError(f"{path}: there is no such file or folder")
    if path.suffix in FILES:
        return FILES[path.suffix](path)
    if path.is_dir() and _has_images(path):
        return ImageFolderSource(path)
    known = ", ".join([*FILES, *PARQUET])
    raise DataError(f"{path}: this kind of file is not known; known are {known} and folders of images")


def open_sets(path: str | Path) -> SetDataset:
    """Everything at a path, as a dataset of one or many sets.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     np.save(f"{folder}/a.npy", np.zeros((5, 2)))
    ...     np.save(f"{folder}/b.npy", np.zeros((7, 2)))
    ...     data = open_sets(folder)
    ...     [(source.id, len(source)) for source in data]
    [('a', 5), ('b', 7)]
    """
    path = Path(path)
    if not path.exists():
        raise DataError(f"{path}: there is no such file or folder")
    if is_table(path):
        sets = ParquetSets(path)
        return SetDataset([sets.source(name) for name in sets.ids()])
    if path.suffix in FILES or path.is_file():
        return SetDataset([open_source(path)])
    if (path / "features").is_dir():
        return _torchmil(path)
    inside = sorted(item for item in path.iterdir() if not item.name.startswith("."))
    files = [item for item in inside if item.suffix in FILES]
    if files:
        return SetDataset([FILES[item.suffix](item) for item in files])
    if _has_images(path):
        return SetDataset([ImageFolderSource(path)])
    folders = [item for item in inside if item.is_dir() and _has_images(item)]
    if folders:
        return SetDataset([ImageFolderSource(item) for item in folders])
    nested = [item for item in inside if item.is_dir() and any(file.suffix in FILES for file in item.iterdir())]
    if len(nested) == 1:  # TRIDENT: features_<encoder>/ inside its folder
        return open_sets(nested[0])
    if nested:
        raise DataError(f"{path}: has several folders of sets, {[item.name for item in nested]}: open one of them")
    raise DataError(f"{path}: no sets were found; expected {', '.join([*FILES, *PARQUET])} files or folders of images")


def _torchmil(path: Path) -> SetDataset:
    """Parallel folders: features/x.npy, labels/x.npy, coords/x.npy, inst_labels/x.npy."""
    files = sorted(file for file in (path / "features").iterdir() if file.suffix in FILES)
    if not files:
        raise DataError(f"{path / 'features'}: holds no sets")
    sources = []
    for file in files:
        source = FILES[file.suffix](file)
        label = path / "labels" / f"{file.stem}.npy"
        if label.exists():
            value = np.load(label)
            source.label = value.item() if value.size == 1 else value
        for kind in ("coords", "inst_labels"):
            beside = path / kind / f"{file.stem}.npy"
            if beside.exists():
                source.metadata[kind] = beside
        sources.append(source)
    return SetDataset(sources)


def _has_images(folder: Path) -> bool:
    return any(file.suffix.lower() in ImageFolderSource.SUFFIXES for file in folder.iterdir())
