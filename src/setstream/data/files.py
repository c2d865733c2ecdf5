"""Sets in single files: numpy arrays, HDF5 as CLAM and TRIDENT write it, torch tensors, Zarr arrays.

    .npy            (N, ...), memory-mapped
    .h5 .hdf5       `features` (N, D) or (1, N, D), beside it `coords` (N, 2); another key by name
    .pt .pth        a bare tensor (N, ...), memory-mapped
    .zarr           an array (N, ...), or a group with an array `features`

Files are opened when they are first read, and again in each worker process. Whatever is wrong with one is said with its name,
the key and the shape. Nothing else is read because a file names it: HDF5 links and virtual data sets are errors, and so are
symbolic links in a Zarr folder that lead out of it.
"""

from __future__ import annotations

import errno
import os
import threading
import weakref
from abc import abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from setstream._utils.optional import need
from setstream.errors import DataError, SetstreamError
from setstream.sets.source import Metadata, SetSource

FEATURES = "features"
# An array may be this much larger than the bytes that it is stored in, which no numbers compress to; small ones may be any.
LARGEST_RATIO, SMALL_BYTES = 2000, 2**26


@contextmanager
def reading(place: object) -> Iterator[None]:
    """Whatever a library raises while it reads a file, as a DataError that names the file."""
    try:
        yield
    except SetstreamError:
        raise
    except Exception as error:
        if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
            raise
        what = str(error) or type(error).__name__
        raise DataError(f"{place}: cannot be read, it may be cut off or of another kind: {what}") from error


def check_stored(path: Path, declared: int, stored: int) -> None:
    """Raise DataError if an array of `declared` bytes can hardly be what the `stored` bytes hold."""
    if declared > max(SMALL_BYTES, LARGEST_RATIO * stored):
        raise DataError(f"{path}: declares {declared:,} bytes of elements and stores {stored:,}: it is unfinished or damaged")


# Files that are open: the ones used longest ago are closed, so that a data set of any size stays below the system's limit.
OPEN_FILES = 64
_open: OrderedDict[int, weakref.ref[FileSource]] = OrderedDict()
_open_lock = threading.Lock()


def _opened(source: FileSource) -> None:
    with _open_lock:
        _open.pop(id(source), None)
        _open[id(source)] = weakref.ref(source)
        while len(_open) > OPEN_FILES:
            oldest = _open.popitem(last=False)[1]()
            if oldest is not None:
                oldest.close()


class FileSource(SetSource):
    """A set in one file, opened lazily and once for each process."""

    def __init__(self, path: str | Path, id: str | None = None, label: Any = None, metadata: Metadata = None) -> None:
        self.path = Path(path)
        super().__init__(self.path.stem if id is None else id, label, metadata)
        self._array: Any = None
        self._process = 0

    @abstractmethod
    def open(self) -> Any:
        """The array behind the file, (N, ...) and indexable by slices."""

    @property
    def array(self) -> Any:
        """The opened array; opened anew after a fork."""
        if self._array is None or self._process != os.getpid():
            if not self.path.exists():
                raise DataError(f"{self.path}: there is no such file")
            with reading(self.path):
                self._array = self.open()
            self._process = os.getpid()
            _opened(self)
        return self._array

    def close(self) -> None:
        """Give back the file."""
        file = getattr(self._array, "file", None)  # HDF5
        if file is not None and self._process == os.getpid():
            file.close()
        self._array = None

    def __len__(self) -> int:
        return int(self.array.shape[0])

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of an element."""
        return tuple(int(size) for size in self.array.shape[1:])

    @property
    def dtype(self) -> torch.dtype:
        """The type of its numbers."""
        kind = self.array.dtype
        return kind if isinstance(kind, torch.dtype) else self._tensor(np.empty(0, kind)).dtype

    def read(self, start: int, stop: int) -> Tensor:
        """A range, read from the file."""
        array = self.array
        with reading(f"{self.path}: elements {start} .. {stop - 1}"):
            found = self.range(array, start, stop)
        return found if isinstance(found, Tensor) else self._tensor(found)

    def range(self, array: Any, start: int, stop: int) -> Any:
        """Elements of the opened array."""
        return array[start:stop]

    def _tensor(self, array: np.ndarray) -> Tensor:
        """As a tensor, in the machine's byte order; a copy where the array is not our own."""
        try:
            return torch.from_numpy(np.require(array, array.dtype.newbyteorder("="), ("C", "W", "O")))
        except TypeError as error:
            raise DataError(f"{self.path}: elements of type {array.dtype} are no numbers that a network can read") from error

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_array": None}


class NpySource(FileSource):
    """An .npy file. Its shape comes from a memory map; ranges are read, so that pages of the map do not fill memory."""

    def open(self) -> Any:
        """Map the file."""
        array = np.load(self.path, mmap_mode="r", allow_pickle=False)
        if array.ndim < 1:
            raise DataError(f"{self.path}: holds a single number; a set is (N, ...)")
        return array

    def range(self, array: Any, start: int, stop: int) -> Any:
        """Elements of the file, not of the map."""
        start, stop, _ = slice(start, stop).indices(len(array))
        if not array.flags.c_contiguous or not array.size or stop <= start:
            return super().range(array, start, stop)
        each = int(np.prod(array.shape[1:], dtype=np.int64))
        offset = array.offset + start * each * array.itemsize
        flat = np.fromfile(self.path, array.dtype, (stop - start) * each, offset=offset)
        if len(flat) < (stop - start) * each:
            raise DataError(f"{self.path}: is cut off: elements {start} .. {stop - 1} are not all there")
        return flat.reshape(stop - start, *array.shape[1:])


class TorchSource(FileSource):
    """A .pt file that holds a bare tensor, memory-mapped."""

    def open(self) -> Tensor:
        """Map the file."""
        try:
            found = torch.load(self.path, map_location="cpu", weights_only=True, mmap=True)
        except RuntimeError:  # written in the old format, which cannot be mapped
            found = torch.load(self.path, map_location="cpu", weights_only=True)
        if not isinstance(found, Tensor) or found.dim() < 1:
            came = f"shape {tuple(found.shape)}" if isinstance(found, Tensor) else type(found).__name__
            raise DataError(f"{self.path}: expected a bare tensor (N, ...); it holds {came}")
        if found.layout != torch.strided or found.is_quantized:
            raise DataError(f"{self.path}: expected a dense tensor of numbers; it holds a {found.layout} of {found.dtype}")
        return found


class KeyedSource(FileSource):
    """An array in a file that may hold several, by its key."""

    def __init__(
        self,
        path: str | Path,
        key: str = FEATURES,
        id: str | None = None,
        label: Any = None,
        metadata: Metadata = None,
    ) -> None:
        super().__init__(path, id, label, metadata)
        self.key = key


class H5Source(KeyedSource):
    """A data set of an HDF5 file; CLAM's and TRIDENT's `features` unless another key is given.

    TRIDENT's (1, N, D) is read as (N, D); an empty slide, (0, D) or (0,), as a set without elements. Where each
    element lies is asked for with `coords()`.
    """

    def open(self) -> Any:
        """Open the file and find the key."""
        array = h5_array(need("h5py").File(self.path, "r"), self.key, self.path)
        if not array.shape:
            raise DataError(f"{self.path}: {self.key!r} is a single number; expected (N, D)")
        return _Squeezed(array) if array.ndim == 3 and array.shape[0] == 1 else array

    def coords(self) -> Tensor:
        """Where each element lies, (N, 2), if the file says it."""
        coords = read_h5(self.path, "coords")[0]
        with reading(self.path):
            return torch.from_numpy(coords.reshape(-1, 2))


def h5_array(file: Any, key: str, path: Path) -> Any:
    """The array of this key in an open HDF5 file; it lies in this file, or it is an error."""
    h5py = need("h5py")
    found = file
    for name in key.split("/"):
        link = found.get(name, getlink=True)
        if link is None:
            raise DataError(f"{path}: has no {key!r}; its keys are {sorted(found)}")
        if not isinstance(link, h5py.HardLink):
            raise DataError(
                f"{path}: {key!r} is a link; what a file of elements names elsewhere is not read: copy it into the file"
            )
        found = found[name]
    if not isinstance(found, h5py.Dataset):
        held = f"; its keys are {sorted(found)}" if isinstance(found, h5py.Group) else ""
        raise DataError(f"{path}: {key!r} is a group, not an array{held}")
    if found.external or found.is_virtual:
        raise DataError(f"{path}: {key!r} lies in other files, which are not read: copy it into this one")
    check_stored(path, int(found.nbytes), found.id.get_storage_size())
    return found


def read_h5(path: Path, key: str) -> tuple[np.ndarray, dict[str, Any]]:
    """A small array of an HDF5 file, whole, and its attributes."""
    with reading(path), need("h5py").File(path, "r") as file:
        array = h5_array(file, key, path)
        return np.asarray(array), dict(array.attrs)


class _Squeezed:
    """An array (1, N, ...) seen as (N, ...)."""

    def __init__(self, array: Any) -> None:
        self.array, self.shape, self.dtype, self.file = array, array.shape[1:], array.dtype, array.file

    def __getitem__(self, index: slice) -> Any:
        return self.array[0, index]


class ZarrSource(KeyedSource):
    """A Zarr array, or the array `features` of a Zarr group."""

    def open(self) -> Any:
        """Open the array."""
        inside = self.path.resolve()
        for folder, folders, files in os.walk(self.path):
            for name in (*folders, *files):
                place = Path(folder, name)
                if place.is_symlink() and not place.resolve().is_relative_to(inside):
                    raise DataError(
                        f"{self.path}: {place.relative_to(self.path)} is a link to what lies elsewhere, which is not read"
                    )
        found = need("zarr").open(str(self.path), mode="r")
        if not hasattr(found, "shape"):
            keys = sorted(found.keys())
            if self.key not in keys:
                raise DataError(f"{self.path}: has no {self.key!r}; its keys are {keys}")
            found = found[self.key]
        if any(getattr(codec, "codec_id", None) == "pickle" for codec in (*found.filters, *found.compressors)):
            raise DataError(f"{self.path}: is pickled, and reading it could run any code: write it with another codec")
        check_stored(self.path, int(found.nbytes), found.nbytes_stored())
        return found


def read_image(file: Path, change: Callable[[Any], Any] = lambda picture: picture) -> np.ndarray:
    """A picture as (H, W, 3) bytes. One beyond PIL's limit on pixels is an error, and so is one that claims too much.

    A damaged header may claim a thousand times the pixels that the file holds; they would be made before that is noticed.
    """
    with reading(file), need("PIL.Image", "report").open(file) as opened:
        check_stored(file, 3 * opened.width * opened.height, file.stat().st_size)
        return np.array(change(opened.convert("RGB")))


class ImageFolderSource(SetSource):
    """A folder of images of one size as a set: elements (3, H, W), uint8, in the order of their names."""

    SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".tif", ".tiff", ".webp")

    def __init__(self, path: str | Path, id: str | None = None, label: Any = None, metadata: Metadata = None) -> None:
        self.path = Path(path)
        super().__init__(self.path.name if id is None else id, label, metadata)
        self.files = sorted(file for file in self.path.iterdir() if file.suffix.lower() in self.SUFFIXES)
        self._shape: tuple[int, ...] | None = None

    def __len__(self) -> int:
        return len(self.files)

    @property
    def shape(self) -> tuple[int, ...]:
        """(3, H, W), as the first image has it."""
        if self._shape is None:
            self._shape = tuple(self._image(self.files[0]).shape) if self.files else (3, 0, 0)
        return self._shape

    @property
    def dtype(self) -> torch.dtype:
        """Bytes."""
        return torch.uint8

    def _image(self, file: Path) -> Tensor:
        return torch.from_numpy(read_image(file)).permute(2, 0, 1).contiguous()

    def read(self, start: int, stop: int) -> Tensor:
        """Decode the images of a range."""
        images = [self._image(file) for file in self.files[start:stop]]
        for file, image in zip(self.files[start:stop], images, strict=True):
            if tuple(image.shape) != self.shape:
                raise DataError(f"{file}: is {tuple(image.shape)}; the first image of the folder is {self.shape}")
        return torch.stack(images) if images else torch.empty(0, *self.shape, dtype=torch.uint8)
