"""torch's .pt files that hold a bare tensor (N, ...), as CLAM writes them."""

import torch
from torch import Tensor

from setstream.data.formats.file import FileSource
from setstream.errors import DataError


class TorchSource(FileSource):
    """A .pt file that holds a bare tensor, memory-mapped."""

    suffixes = (".pt", ".pth")

    def open(self) -> Tensor:
        try:
            tensor = torch.load(self.path, map_location="cpu", weights_only=True, mmap=True)
        except RuntimeError:  # written in the old format, which cannot be mapped
            tensor = torch.load(self.path, map_location="cpu", weights_only=True)
        if not isinstance(tensor, Tensor):
            raise DataError(f"{self.path}: expected a bare tensor (N, ...); it holds {type(tensor).__name__}")
        if tensor.layout != torch.strided or tensor.is_quantized:
            raise DataError(f"{self.path}: expected a dense tensor of numbers; it holds a {tensor.layout} of {tensor.dtype}")
        return tensor
