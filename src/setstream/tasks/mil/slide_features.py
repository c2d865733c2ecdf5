"""Features of the patches of slides, in TRIDENT's layout.

    features_j = backbone(patch_j)          patches (n, 3, S, S), floats in [0, 1], directly from the slide

Memory is that of a few chunks, for slides of any size. A file is written completely or not at all.
"""

from collections.abc import Callable
from pathlib import Path
from typing import cast

import numpy as np
import torch
from torch import nn

from setstream._utils.atomic import whole_or_nothing
from setstream._utils.optional import need
from setstream.data.slides.grid import read_grid, write_coords
from setstream.data.slides.source import SlideSource, as_floats
from setstream.errors import ConfigurationError, DataError, NonFiniteError, ShapeError
from setstream.models.stream import evaluating
from setstream.nn.backbones import BACKBONES, backbone


def trained_backbone(name: str, weights: str | Path | None = None) -> nn.Module:
    """A backbone by name, which must come with weights, or your own."""
    if name in BACKBONES and weights is None:
        raise ConfigurationError(f"{name} has random weights: give --weights FILE, or a name that it knows (imagenet)")
    return backbone(name, weights)


def features_file(patches: Path, backbone: str, name: str) -> Path:
    """The file for the features of a slide, beside the folder of its patches."""
    return patches.parent / f"features_{backbone.replace(':', '-').replace('/', '-')}" / f"{name}.h5"


def is_done(path: Path, source: SlideSource) -> bool:
    """Whether the file has features of exactly these patches."""
    return path.exists() and np.array_equal(read_grid(path).coords, source.grid.coords)


@torch.no_grad()
def write_features(
    network: nn.Module,
    source: SlideSource,
    path: Path,
    *,
    encoder: str,
    chunk_size: int = 64,
    device: str | torch.device = "cpu",
    progress: Callable[[int], None] | None = None,
) -> int:
    """Write `features` (N, out_dim) float32 and `coords` (N, 2) of one slide; `encoder` is the backbone's name in the file."""
    network, width, done = network.to(device), cast(int, network.out_dim), 0
    with evaluating(network), whole_or_nothing(path) as hidden, need("h5py").File(hidden, "w") as file:
        features = file.create_dataset("features", (len(source), width), np.float32)
        features.attrs.update({"name": source.grid.name, "savetodir": str(path.parent), "encoder": encoder})
        for chunk in source.chunks(chunk_size):
            patches = chunk.to(device)
            rows = network(patches if patches.is_floating_point() else as_floats(patches))
            if tuple(rows.shape) != (len(chunk), width):
                raise ShapeError(f"the backbone must return ({len(chunk)}, {width}) features; got {tuple(rows.shape)}")
            if not bool(torch.isfinite(rows).all()):
                last = done + len(chunk) - 1
                raise NonFiniteError(f"{source.path}: NaN or infinity in the features of patches {done} .. {last}")
            features[done : done + len(chunk)] = rows.float().cpu().numpy()
            done += len(chunk)
            if progress is not None:
                progress(done)
        write_coords(file, source.grid, path.parent.parent)
    return done


def slide_for(patches: Path, slides: dict[str, Path]) -> SlideSource:
    """The slide that a file of patches belongs to, as a source of bytes."""
    grid, name = read_grid(patches), patches.stem.removesuffix("_patches")
    if name not in slides:
        raise DataError(f"{patches}: there is no slide named {name} among the {len(slides)} given")
    return SlideSource(slides[name], grid, id=name, raw=True)
