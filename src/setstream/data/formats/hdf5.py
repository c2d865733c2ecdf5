"""HDF5 in the layout of CLAM and TRIDENT: `features` (N, D) or (1, N, D), beside it `coords` (N, 2); another key by name."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from setstream._utils.optional import need
from setstream.data.formats.file import KeyedSource, check_stored, reading
from setstream.errors import DataError


class H5Source(KeyedSource):
    """A data set of an HDF5 file: (N, ...), or TRIDENT's (1, N, D), or that of an empty slide, (0, D) or (0,)."""

    suffixes = (".h5", ".hdf5")

    def open(self) -> Any:
        array = h5_array(need("h5py").File(self.path, "r"), self.key, self.path)
        return _Squeezed(array) if array.ndim == 3 and array.shape[0] == 1 else array

    def coords(self) -> Tensor:
        """The place of each element, (N, 2), if the file has it."""
        return torch.from_numpy(read_h5(self.path, "coords", (-1, 2))[0])


class _Squeezed:
    """An array (1, N, ...) seen as (N, ...)."""

    def __init__(self, array: Any) -> None:
        self.array, self.shape, self.dtype, self.file = array, array.shape[1:], array.dtype, array.file

    def __getitem__(self, index: slice) -> Any:
        return self.array[0, index]


def h5_array(file: Any, key: str, path: Path) -> Any:
    """The array of this key in an open HDF5 file. An array in another file is an error."""
    h5py = need("h5py")
    node = file
    for name in key.split("/"):
        link = node.get(name, getlink=True)
        if link is None:
            raise DataError(f"{path}: has no {key!r}; its keys are {sorted(node)}")
        if not isinstance(link, h5py.HardLink):
            raise DataError(f"{path}: {key!r} is a link. Links in data files are not read: copy the array into the file")
        node = node[name]
    if not isinstance(node, h5py.Dataset):
        keys = f"; its keys are {sorted(node)}" if isinstance(node, h5py.Group) else ""
        raise DataError(f"{path}: {key!r} is a group, not an array{keys}")
    if node.external or node.is_virtual:
        raise DataError(f"{path}: {key!r} is in other files, which are not read: copy it into this one")
    check_stored(path, int(node.nbytes), node.id.get_storage_size())
    return node


def read_h5(path: Path, key: str, shape: tuple[int, ...] | None = None) -> tuple[np.ndarray, dict[str, Any]]:
    """All of a small array of an HDF5 file, in this shape, and its attributes."""
    with reading(path), need("h5py").File(path, "r") as file:
        array = h5_array(file, key, path)
        return np.asarray(array).reshape(array.shape if shape is None else shape), dict(array.attrs)
