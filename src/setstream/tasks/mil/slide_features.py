"""Features of the patches of slides, in TRIDENT's layout.

    features_j = backbone(patch_j)          patches (n, 3, S, S), floats in [0, 1], straight from the slide

Memory is that of a few chunks, whatever the slide. A slide is whole or not there; one that is there is not read again.
"""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import nn

from setstream._utils.atomic import whole_or_nothing
from setstream._utils.optional import need
from setstream.data.slides.layout import read_grid, write_coords
from setstream.data.slides.source import SlideSource, as_floats
from setstream.errors import ConfigurationError, DataError, NonFiniteError, ShapeError
from setstream.models.stream import evaluating
from setstream.nn.backbones import BACKBONES, backbone


def trained_backbone(name: str, weights: str | Path | None = None) -> nn.Module:
    """A backbone by name with weights, or your own; random weights make no features."""
    if name in BACKBONES and weights is None:
        raise ConfigurationError(
            f"{name} has random weights unless you give some: --weights FILE, or a name it knows (imagenet)"
        )
    return backbone(name, weights)


def features_file(patches: Path, backbone: str, name: str) -> Path:
    """Where the features of a slide are written, beside the folder of its patches."""
    short = backbone.replace(":", "-").replace("/", "-")
    return patches.parent / f"features_{short}" / f"{name}.h5"


def is_done(path: Path, source: SlideSource) -> bool:
    """Whether features of these very patches are there."""
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
    """Write `features` (N, D) float32 and `coords` (N, 2) of one slide; gives N.

    source:    with raw=True, bytes go to the device and become floats there.
    encoder:   the backbone's name, kept in the file.
    progress:  called with the number of patches that are done.
    """
    network = network.to(device)
    done = 0
    with evaluating(network), whole_or_nothing(path) as hidden, need("h5py").File(hidden, "w") as file:
        width = _width(network, source.shape, device)
        features = file.create_dataset("features", (len(source), width), np.float32)
        features.attrs.update({"name": source.grid.name, "savetodir": str(path.parent), "encoder": encoder})
        for chunk in source.chunks(chunk_size):
            patches = chunk.to(device)
            found = network(patches if patches.is_floating_point() else as_floats(patches))
            if tuple(found.shape) != (len(chunk), width):
                raise ShapeError(f"the backbone must give ({len(chunk)}, {width}) features; it gave {tuple(found.shape)}")
            if not bool(torch.isfinite(found).all()):
                raise NonFiniteError(
                    f"{source.path}: the backbone made NaN or infinity of patches {done} .. {done + len(chunk) - 1}"
                )
            features[done : done + len(chunk)] = found.float().cpu().numpy()
            done += len(chunk)
            if progress is not None:
                progress(done)
        write_coords(file, source.grid, path.parent.parent)
    return done


def _width(backbone: nn.Module, shape: tuple[int, ...], device: str | torch.device) -> int:
    """The number of features: what the backbone says, or gives for an empty patch."""
    says = getattr(backbone, "out_dim", None)
    if says is not None:
        return int(says)
    found = backbone(torch.zeros(1, *shape, device=device))
    if not isinstance(found, torch.Tensor) or found.dim() != 2:
        came = tuple(found.shape) if isinstance(found, torch.Tensor) else type(found).__name__
        raise ShapeError(f"a backbone turns patches (n, {', '.join(map(str, shape))}) into features (n, D); it gave {came}")
    return int(found.shape[1])


def slide_for(patches: Path, slides: dict[str, Path]) -> SlideSource:
    """The slide of a file of patches, as a source of bytes."""
    grid = read_grid(patches)
    name = patches.stem.removesuffix("_patches")
    if name not in slides:
        raise DataError(f"{patches}: there is no slide named {name} among the {len(slides)} that were given")
    return SlideSource(slides[name], grid, id=name, raw=True)
