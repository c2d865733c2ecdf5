"""ss.data.open: from a path to sets, by what is there.

file .npy .h5 .hdf5 .pt .pth, folder .zarr           one set
file or folder of .parquet .pq .arrow .feather       many sets, by their id column, or by folders set_id=...
folder of such files                                 many sets, one a file (CLAM)
folder with features_<encoder>/, there or one below  many sets, TRIDENT's job folder: <magnification>/features_<encoder>/
slide .svs .ndpi .mrxs .scn, or a folder of them     one set of patches a slide
folder with features/ (and labels/)                  many sets, torchmil's layout: parallel folders, one file a bag
folder of images                                     one set; folder of such folders: many
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from setstream._utils.optional import need
from setstream.data.dataset import SetDataset
from setstream.data.files import (
    H5Source,
    ImageFolderSource,
    NpySource,
    TorchSource,
    ZarrSource,
    read_h5,
    reading,
)
from setstream.data.parquet import ParquetSets, is_table
from setstream.data.tables import SUFFIXES as PARQUET
from setstream.errors import ConfigurationError, DataError
from setstream.sets.source import SetSource


def _slide(path: Path) -> SetSource:
    from setstream.data.slides.source import SlideSource

    return SlideSource(path)


FILES: dict[str, Callable[[Path], SetSource]] = {
    **dict.fromkeys((".svs", ".ndpi", ".mrxs", ".scn"), _slide),
    ".npy": NpySource,
    ".h5": H5Source,
    ".hdf5": H5Source,
    ".pt": TorchSource,
    ".pth": TorchSource,
    ".zarr": ZarrSource,
}

HDF5 = (".h5", ".hdf5")


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


def open_sets(path: str | Path, *, set_column: str | None = None, columns: Sequence[str] | None = None) -> SetDataset:
    """Everything at a path, as a dataset of one or many sets.

    set_column, columns: of Parquet and Arrow tables, the column of set ids and those of features; found by their usual names
    unless given.

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
        sets = ParquetSets(path, set_column, columns)
        return SetDataset([sets.source(name) for name in sets.ids()])
    if set_column is not None or columns is not None:
        raise ConfigurationError(f"set_column and columns are of Parquet and Arrow tables; {path} is none")
    if path.suffix in FILES or path.is_file():
        return SetDataset([open_source(path)])
    if (path / "features").is_dir():
        return _torchmil(path)
    trident = _trident(path)
    if trident is not None:
        return open_sets(trident)
    inside = sorted(item for item in path.iterdir() if not item.name.startswith("."))
    files = [item for item in inside if item.suffix in FILES]
    if files:
        return SetDataset([FILES[item.suffix](item) for item in files])
    if _has_images(path):
        return SetDataset([ImageFolderSource(path)])
    folders = [item for item in inside if item.is_dir() and _has_images(item)]
    if folders:
        return SetDataset([ImageFolderSource(item) for item in folders])
    nested = [item for item in inside if _has_sets(item)]
    if len(nested) == 1:
        return open_sets(nested[0])
    if nested:
        raise DataError(f"{path}: has several folders of sets, {[item.name for item in nested]}: open one of them")
    raise DataError(f"{path}: no sets were found; expected {', '.join([*FILES, *PARQUET])} files or folders of images")


def _trident(path: Path) -> Path | None:
    """The folder of features in a job folder of TRIDENT, which also holds patches, pictures and more."""
    found = sorted(item for pattern in ("features_*", "*/features_*") for item in path.glob(pattern) if _has_sets(item))
    if len(found) > 1:
        choices = ", ".join(str(item.relative_to(path)) for item in found)
        raise DataError(f"{path}: has features of several encoders or magnifications: open one of {choices}")
    return found[0] if found else None


def _torchmil(path: Path) -> SetDataset:
    """Parallel folders, each with one .npy or .h5 file a bag: features/x, labels/x, coords/x, inst_labels/x."""
    files = sorted(file for file in (path / "features").iterdir() if file.suffix in FILES)
    if not files:
        raise DataError(f"{path / 'features'}: holds no sets")
    sources = []
    for file in files:
        source = H5Source(file, key=_key(file, "features")) if file.suffix in HDF5 else FILES[file.suffix](file)
        label = _beside(path, "labels", file.stem)
        if label is not None:
            value = np.asarray(_array(label, "labels"))
            source.label = value.item() if value.size == 1 else value
        for kind in ("coords", "inst_labels"):
            beside = _beside(path, kind, file.stem)
            if beside is not None:
                source.metadata[kind] = beside
        sources.append(source)
    return SetDataset(sources)


def _beside(path: Path, kind: str, name: str) -> Path | None:
    """The file of a bag in a parallel folder."""
    files = (path / kind / f"{name}{suffix}" for suffix in (".npy", *HDF5))
    return next((file for file in files if file.exists()), None)


def _array(file: Path, name: str) -> Any:
    """A small array, whole."""
    if file.suffix in HDF5:
        return read_h5(file, _key(file, name))[0]
    with reading(file):
        return np.load(file, mmap_mode="r", allow_pickle=False)


def _key(file: Path, name: str) -> str:
    """The array of this name in an HDF5 file, or the only one that is there."""
    try:
        with reading(file), need("h5py").File(file, "r") as opened:
            keys = sorted(opened)
    except DataError:
        return name  # whoever reads it says what is wrong
    return keys[0] if len(keys) == 1 else name


def _has_sets(folder: Path) -> bool:
    return folder.is_dir() and any(file.suffix in FILES for file in folder.iterdir())


def _has_images(folder: Path) -> bool:
    return any(file.suffix.lower() in ImageFolderSource.SUFFIXES for file in folder.iterdir())
