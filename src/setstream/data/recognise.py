"""ss.data.open: from a path to sets, by its format::

    file .npy .h5 .hdf5 .pt .pth, folder .zarr           one set
    file or folder of .parquet .pq .arrow .feather       many sets, by their id column, or by folders set_id=...
    folder of such files                                 many sets, one per file (CLAM)
    folder with features_<encoder>/, there or one below  many sets, TRIDENT's job folder: <magnification>/features_<encoder>/
    slide .svs .ndpi .mrxs .scn, or a folder of them     one set of patches per slide
    folder with features/ (and labels/)                  many sets, torchmil's layout: parallel folders, one file per bag
    folder of images                                     one set; folder of such folders: many

Anything else is an error that lists the known formats.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from setstream._utils.optional import need
from setstream.data.collection import SetCollection
from setstream.data.dataset import SetDataset
from setstream.data.formats import SOURCE_OF, TABLE_OF, H5Source, ImageFolderSource, NpySource
from setstream.data.formats.file import existing, reading
from setstream.data.formats.hdf5 import read_h5
from setstream.data.slides.source import SlideSource
from setstream.data.table_sets import ParquetSets, is_table
from setstream.errors import ConfigurationError, DataError
from setstream.sets.source import SetSource

#: The class that opens a file or folder with one set, by its ending.
OPENERS: dict[str, Callable[..., SetSource]] = {**dict.fromkeys(SlideSource.suffixes, SlideSource), **SOURCE_OF}
KNOWN = ", ".join([*OPENERS, *TABLE_OF])
PARALLEL = ("labels", "coords", "inst_labels")  #: torchmil's folders beside features/


def open_source(path: str | Path) -> SetSource:
    """One set from one file (or Zarr folder, or folder of images)."""
    path = existing(path)
    if path.suffix in OPENERS:
        return OPENERS[path.suffix](path)
    if ImageFolderSource.recognises(path):
        return ImageFolderSource(path)
    raise DataError(f"{path}: this kind of file is not known; known are {KNOWN} and folders of images")


def open_sets(path: str | Path, *, set_column: str | None = None, columns: Sequence[str] | None = None) -> SetDataset:
    """Everything at a path, a file or a folder, as a dataset of one or many sets.

    Args:
        set_column: The column of set ids in Parquet and Arrow tables; found by its usual names unless given.
        columns: The columns of features in such tables; found by their usual names unless given.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     np.save(f"{folder}/a.npy", np.zeros((5, 2)))
    ...     np.save(f"{folder}/b.npy", np.zeros((7, 2)))
    ...     [(source.id, len(source)) for source in open_sets(folder)]
    [('a', 5), ('b', 7)]
    """
    return SetDataset(list(open_collection(path, set_column=set_column, columns=columns)))


def open_collection(
    path: str | Path,
    *,
    set_column: str | None = None,
    columns: Sequence[str] | None = None,
    time_column: str | None = None,
) -> SetCollection:
    """Like `open`, to read everything once: a table's sets are not looked up one by one. `time_column`: of the elements."""
    path = existing(path)
    if is_table(path):
        return ParquetSets(path, set_column, columns, time_column)
    if (set_column, columns, time_column) != (None, None, None):
        raise ConfigurationError(f"columns and their names are options of Parquet and Arrow tables; {path} is not one")
    return SetDataset(_sources(path))


def _sources(path: Path) -> list[SetSource]:
    if path.suffix in OPENERS or path.is_file():
        return [open_source(path)]
    if (path / "features").is_dir():
        return _torchmil(path)
    if trident := _trident(path):
        return _sources(trident)
    inside = sorted(item for item in path.iterdir() if not item.name.startswith("."))
    if files := [item for item in inside if item.suffix in OPENERS]:
        return [open_source(item) for item in files]
    if folders := [path] if ImageFolderSource.recognises(path) else list(filter(ImageFolderSource.recognises, inside)):
        return [ImageFolderSource(item) for item in folders]
    nested = [item for item in inside if _has_sets(item)]
    if len(nested) > 1:
        raise DataError(f"{path}: has several folders of sets, {[item.name for item in nested]}: open one of them")
    if nested:
        return _sources(nested[0])
    raise DataError(f"{path}: no sets were found; expected {KNOWN} files or folders of images")


def _trident(path: Path) -> Path | None:
    """The folder of features in a job folder of TRIDENT, which also holds patches, pictures and more."""
    folders = sorted(item for pattern in ("features_*", "*/features_*") for item in path.glob(pattern) if _has_sets(item))
    if len(folders) > 1:
        choices = ", ".join(str(item.relative_to(path)) for item in folders)
        raise DataError(f"{path}: has features of several encoders or magnifications: open one of {choices}")
    return folders[0] if folders else None


def _torchmil(path: Path) -> list[SetSource]:
    """Parallel folders, each with one .npy or .h5 file per bag: features/x, labels/x, coords/x, inst_labels/x."""
    files = sorted(file for file in (path / "features").iterdir() if file.suffix in OPENERS)
    if not files:
        raise DataError(f"{path / 'features'}: holds no sets")
    suffixes = (*reversed(H5Source.suffixes), *NpySource.suffixes)  # of several files of a bag, the last kind counts
    sources = []
    for file in files:
        places = [path / kind / f"{file.stem}{suffix}" for kind in PARALLEL for suffix in suffixes]
        beside: dict[str, Any] = {place.parent.name: place for place in places if place.exists()}
        options: dict[str, Any] = {"key": _key(file, "features")} if file.suffix in H5Source.suffixes else {}
        if "labels" in beside:
            labels: Path = beside.pop("labels")
            in_h5 = labels.suffix in H5Source.suffixes
            with reading(labels):
                label = read_h5(labels, _key(labels, "labels"))[0] if in_h5 else np.load(labels, mmap_mode="r")
            options["label"] = label.item() if label.size == 1 else np.asarray(label)
        sources.append(OPENERS[file.suffix](file, metadata=beside, **options))
    return sources


def _key(file: Path, name: str) -> str:
    """The only array of an HDF5 file; this name where there are several, or where reading the file fails (again, later)."""
    try:
        with reading(file), need("h5py").File(file, "r") as opened:
            keys = sorted(opened)
    except DataError:
        return name
    return keys[0] if len(keys) == 1 else name


def _has_sets(folder: Path) -> bool:
    return folder.is_dir() and any(file.suffix in OPENERS for file in folder.iterdir())
