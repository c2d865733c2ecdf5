"""numpy's .npy files: an array (N, ...)."""

from typing import Any

import numpy as np

from setstream.data.formats.file import FileSource
from setstream.errors import DataError


class NpySource(FileSource):
    """An .npy file. Its shape comes from a memory map; ranges are read, so that pages of the map do not fill memory."""

    suffixes = (".npy",)

    def open(self) -> Any:
        return np.load(self.path, mmap_mode="r", allow_pickle=False)

    def range(self, array: Any, start: int, stop: int) -> Any:
        start, stop, _ = slice(start, stop).indices(len(array))
        if not array.flags.c_contiguous or not array.size or stop <= start:
            return super().range(array, start, stop)
        width = int(np.prod(array.shape[1:], dtype=np.int64))
        offset = array.offset + start * width * array.itemsize
        elements = np.empty((stop - start, *array.shape[1:]), array.dtype)
        with self.path.open("rb") as file:
            file.seek(offset)
            if file.readinto(elements.reshape(-1).view(np.uint8).data) < elements.nbytes:
                raise DataError(f"{self.path}: is truncated: some of the elements {start} .. {stop - 1} are missing")
        return elements
