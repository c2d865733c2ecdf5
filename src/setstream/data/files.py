"""Sets in single files: numpy arrays, HDF5 as CLAM and TRIDENT write it, torch tensors, Zarr arrays.

    .npy            (N, ...), memory-mapped
    .h5 .hdf5       `features` (N, D) or (1, N, D), beside it `coords` (N, 2); another key by name
    .pt .pth        a bare tensor (N, ...), memory-mapped
    .zarr           an array (N, ...), or a group with an array `features`

Files are opened when they are first read, and again in each worker process. Whatever is wrong with one is said with its name,
the key and the shape.
"""

from __future__ import annotations

import errno
import os
import threading
import weakref
from abc import abstractmethod
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from setstream.errors import ConfigurationError, DataError
from setstream.sets.source import Metadata, SetSource

FEATURES = "features"


def need(module: str, extra: str = "data", what: str = "these files") -> Any:
    """Import a library that an extra brings, or name the extra; the error says that it is needed for `what`."""
    from importlib import import_module

    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        package = module.split(".")[0]
        raise ConfigurationError(f"{package} is needed for {what}: pip install 'setstream[{extra}]'") from error


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
            try:
                self._array = self.open()
            except (DataError, ConfigurationError):
                raise
            except Exception as error:
                if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
                    raise
                raise DataError(f"{self.path}: cannot be read, it may be cut off or of another kind: {error}") from error
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
        try:
            found = self.array[start:stop]
        except (OSError, ValueError, RuntimeError) as error:
            raise DataError(f"{self.path}: elements {start} .. {stop - 1} cannot be read: {error}") from error
        return found if isinstance(found, Tensor) else self._tensor(found)

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

    def read(self, start: int, stop: int) -> Tensor:
        """A range, read from the file."""
        array = self.array
        start, stop, _ = slice(start, stop).indices(len(array))
        if not array.flags.c_contiguous or not array.size or stop <= start:
            return super().read(start, stop)
        each = int(np.prod(array.shape[1:], dtype=np.int64))
        offset = array.offset + start * each * array.itemsize
        flat = np.fromfile(self.path, array.dtype, (stop - start) * each, offset=offset)
        if len(flat) < (stop - start) * each:
            raise DataError(f"{self.path}: is cut off: elements {start} .. {stop - 1} are not all there")
        return self._tensor(flat.reshape(stop - start, *array.shape[1:]))


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
        file = need("h5py").File(self.path, "r")
        if self.key not in file:
            raise DataError(f"{self.path}: has no {self.key!r}; its keys are {sorted(file)}")
        array = file[self.key]
        if getattr(array, "shape", None) is None:
            raise DataError(f"{self.path}: {self.key!r} is a group, not an array; its keys are {sorted(array)}")
        if not array.shape:
            raise DataError(f"{self.path}: {self.key!r} is a single number; expected (N, D)")
        return _Squeezed(array) if array.ndim == 3 and array.shape[0] == 1 else array

    def coords(self) -> Tensor:
        """Where each element lies, (N, 2), if the file says it."""
        with need("h5py").File(self.path, "r") as file:
            if "coords" not in file:
                raise DataError(f"{self.path}: has no 'coords'; its keys are {sorted(file)}")
            return torch.from_numpy(np.asarray(file["coords"]).reshape(-1, 2))


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
        found = need("zarr").open(str(self.path), mode="r")
        if hasattr(found, "shape"):
            return found
        keys = sorted(found.keys())
        if self.key not in keys:
            raise DataError(f"{self.path}: has no {self.key!r}; its keys are {keys}")
        return found[self.key]


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
        image = need("PIL.Image", "report")
        try:
            with image.open(file) as opened:
                return torch.from_numpy(np.array(opened.convert("RGB"))).permute(2, 0, 1).contiguous()
        except OSError as error:
            raise DataError(f"{file}: is no image that can be read: {error}") from error

    def read(self, start: int, stop: int) -> Tensor:
        """Decode the images of a range."""
        images = [self._image(file) for file in self.files[start:stop]]
        for file, image in zip(self.files[start:stop], images, strict=True):
            if tuple(image.shape) != self.shape:
                raise DataError(f"{file}: is {tuple(image.shape)}; the first image of the folder is {self.shape}")
        return torch.stack(images) if images else torch.empty(0, *self.shape, dtype=torch.uint8)
