"""Zarr: an array (N, ...), or a group with an array `features`."""

from typing import Any

from setstream._utils.optional import need
from setstream.data.formats.file import KeyedSource, check_stored
from setstream.errors import DataError


class ZarrSource(KeyedSource):
    """A Zarr array, or the array `features` of a Zarr group."""

    suffixes = (".zarr",)

    def open(self) -> Any:
        inside = self.path.resolve()
        for item in self.path.rglob("*"):
            if item.is_symlink() and not item.resolve().is_relative_to(inside):
                raise DataError(f"{self.path}: {item.relative_to(self.path)} is a link out of the folder, which is not read")
        node = need("zarr").open(str(self.path), mode="r")
        if not hasattr(node, "shape"):
            keys = sorted(node.keys())
            if self.key not in keys:
                raise DataError(f"{self.path}: has no {self.key!r}; its keys are {keys}")
            node = node[self.key]
        if any(getattr(codec, "codec_id", None) == "pickle" for codec in (*node.filters, *node.compressors)):
            raise DataError(f"{self.path}: is pickled, and reading it could run code: write it with another codec")
        check_stored(self.path, int(node.nbytes), node.nbytes_stored())
        return node
