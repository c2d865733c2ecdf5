"""A folder of images of one size: elements (3, H, W), bytes."""

from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from setstream._utils.optional import need
from setstream.data.formats.file import check_stored, reading
from setstream.errors import DataError
from setstream.sets.source import Metadata, SetSource


def read_image(file: Path) -> Any:
    """A picture of Pillow in RGB; an error before anything is allocated if a (damaged) header declares too many pixels."""
    with reading(file), need("PIL.Image", "report").open(file) as picture:
        check_stored(file, 3 * picture.width * picture.height, file.stat().st_size)
        return picture.convert("RGB")


class ImageFolderSource(SetSource):
    """A folder of images of one size as a set: elements (3, H, W), uint8, in the order of their names."""

    SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".tif", ".tiff", ".webp")
    path: Path
    dtype = torch.uint8

    def __init__(self, path: str | Path, id: str | None = None, label: Any = None, metadata: Metadata = None) -> None:
        self.path = Path(path)
        super().__init__(self.path.name if id is None else id, label, metadata)
        self.files = sorted(file for file in self.path.iterdir() if file.suffix.lower() in self.SUFFIXES)

    @classmethod
    def recognises(cls, folder: Path) -> bool:
        """Whether a folder holds images."""
        return folder.is_dir() and any(file.suffix.lower() in cls.SUFFIXES for file in folder.iterdir())

    def __len__(self) -> int:
        return len(self.files)

    @cached_property
    def shape(self) -> tuple[int, ...]:
        return (3, *read_image(self.files[0]).size[::-1]) if self.files else (3, 0, 0)

    def read(self, start: int, stop: int) -> Tensor:
        files = self.files[start:stop]
        images = torch.empty(len(files), *self.shape, dtype=torch.uint8)
        for image, file in zip(images, files, strict=True):
            pixels = torch.from_numpy(np.array(read_image(file))).permute(2, 0, 1)
            if pixels.shape != image.shape:
                raise DataError(f"{file}: is {tuple(pixels.shape)}; the first image of the folder is {self.shape}")
            image.copy_(pixels)
        return images
