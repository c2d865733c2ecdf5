"""A set in one file: the base of all formats.

A file is opened when it is first read, and again in each worker process. Errors name the file, the key and the shape. Files
cannot refer to other files: HDF5 links, virtual data sets and symbolic links out of a Zarr folder are errors.
"""

import errno
import os
import threading
import weakref
from abc import abstractmethod
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from setstream.errors import DataError, SetstreamError
from setstream.sets.source import Metadata, SetSource

LARGEST_RATIO, SMALL_BYTES = 2000, 2**26  # an array is at most this many times larger than its stored bytes, or small
OPEN_FILES = 64  # of more, the least recently used are closed: systems limit how many a process may open
_open: OrderedDict[int, "weakref.ref[FileSource]"] = OrderedDict()
_open_lock = threading.Lock()


@contextmanager
def reading(place: object) -> Iterator[None]:
    """Turn a library's errors while it reads a file into a DataError that names the file."""
    try:
        yield
    except Exception as error:
        if isinstance(error, SetstreamError) or getattr(error, "errno", None) in (errno.EMFILE, errno.ENFILE):
            raise
        reason = str(error) or type(error).__name__
        raise DataError(f"{place}: cannot be read, it may be truncated or of another kind: {reason}") from error


def existing(path: str | Path) -> Path:
    """The path, if there is anything."""
    if not Path(path).exists():
        raise DataError(f"{path}: there is no such file or folder")
    return Path(path)


def check_stored(path: Path, declared: int, stored: int) -> None:
    """Raise DataError if an array of `declared` bytes is implausible for `stored` bytes."""
    if declared > max(SMALL_BYTES, LARGEST_RATIO * stored):
        raise DataError(f"{path}: declares {declared:,} bytes of elements and stores {stored:,}: it is unfinished or damaged")


class FileSource(SetSource):
    """A set in one file, opened lazily and once for each process."""

    suffixes: ClassVar[tuple[str, ...]] = ()  #: the endings of such files
    path: Path

    def __init__(self, path: str | Path, id: str | None = None, label: Any = None, metadata: Metadata = None) -> None:
        self.path = Path(path)
        super().__init__(self.path.stem if id is None else id, label, metadata)
        self._arrays: dict[int, Any] = {}  # by process

    @abstractmethod
    def open(self) -> Any:
        """Open the file as an array (N, ...) that can be indexed by slices."""

    @property
    def array(self) -> Any:
        """The opened array; opened anew after a fork."""
        array = self._arrays.get(os.getpid())
        if array is None:
            with reading(existing(self.path)):
                array = self.open()
            if not array.shape:
                raise DataError(f"{self.path}: holds a single number; a set is (N, ...)")
            self._arrays[os.getpid()] = array
            with _open_lock:
                _open.pop(id(self), None)
                _open[id(self)] = weakref.ref(self)
                while len(_open) > OPEN_FILES:
                    if (oldest := _open.popitem(last=False)[1]()) is not None:
                        oldest.close()
        return array

    def close(self) -> None:
        array = self._arrays.pop(os.getpid(), None)
        if hasattr(array, "file"):  # HDF5, slides
            array.file.close()

    def __len__(self) -> int:
        return int(self.array.shape[0])

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(int(size) for size in self.array.shape[1:])

    @property
    def dtype(self) -> torch.dtype:
        kind = self.array.dtype
        return kind if isinstance(kind, torch.dtype) else self._tensor(np.empty(0, kind)).dtype

    def read(self, start: int, stop: int) -> Tensor:
        array = self.array
        with reading(f"{self.path}: elements {start} .. {stop - 1}"):
            elements = self.range(array, start, stop)
        return elements if isinstance(elements, Tensor) else self._tensor(elements)

    def range(self, array: Any, start: int, stop: int) -> Any:
        """Elements of the opened array."""
        return array[start:stop]

    def _tensor(self, array: np.ndarray) -> Tensor:
        """As a tensor in the machine's byte order; a copy if the memory is read-only or foreign."""
        try:
            return torch.from_numpy(np.require(array, array.dtype.newbyteorder("="), ("C", "W", "O")))
        except TypeError as error:
            raise DataError(f"{self.path}: holds {array.dtype}, which torch cannot read as numbers") from error

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_arrays": {}}


class KeyedSource(FileSource):
    """An array in a file that may hold several, by its key."""

    def __init__(self, path: str | Path, key: str = "features", id: str | None = None, **about: Any) -> None:
        super().__init__(path, id, **about)
        self.key = key
