"""Features of the patches of slides, in TRIDENT's layout.

    features_j = backbone(patch_j)          patches (n, 3, S, S), floats in [0, 1], straight from the slide

Memory is that of a few chunks, whatever the slide. A slide is whole or not there; one that is there is not read again.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from pathlib import Path

import numpy as np
import torch
from torch import nn

from setstream.data.files import need
from setstream.data.slides.layout import read_grid, whole_or_nothing, write_coords
from setstream.data.slides.source import SlideSource, as_floats
from setstream.errors import ConfigurationError, DataError, NonFiniteError, ShapeError
from setstream.stream import evaluating


def user_object(place: str, what: str) -> object:
    """What `package.module:function` gives when it is called; anything else than a function is given as it is."""
    module, _, attribute = place.partition(":")
    try:
        found = getattr(import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise ConfigurationError(f"the {what} {place!r} cannot be imported: {error}") from error
    return found() if callable(found) and not isinstance(found, nn.Module) else found


def find_backbone(name: str, weights: str | Path | None = None) -> nn.Module:
    """A backbone by its name, or your own module from `package.module:function` (a function without arguments, or a class).

    weights: of a backbone by name: a file, or the name of weights that the backbone knows. Random ones make no features.
    """
    if ":" in name:
        if weights is not None:
            raise ConfigurationError(f"weights are for backbones by name; {name} loads its own")
        found = user_object(name, "backbone")
        if not isinstance(found, nn.Module):
            raise ConfigurationError(f"the backbone {name!r} must give a torch.nn.Module; it gave a {type(found).__name__}")
        return found
    try:
        registry = import_module("setstream.nn.backbones")
    except ModuleNotFoundError as error:
        raise ConfigurationError(f"unknown backbone {name!r}: give your own as package.module:function") from error
    if name not in registry.BACKBONES:
        known = ", ".join(registry.BACKBONES)
        raise ConfigurationError(
            f"unknown backbone {name!r}: choose one of {known}, or give your own as package.module:function"
        )
    if weights is None:
        raise ConfigurationError(
            f"{name} has random weights unless you give some: --weights FILE, or a name it knows (imagenet)"
        )
    found = registry.backbone(name, weights)
    assert isinstance(found, nn.Module)
    return found


def features_file(patches: Path, backbone: str, name: str) -> Path:
    """Where the features of a slide are written, beside the folder of its patches."""
    short = backbone.replace(":", "-").replace("/", "-")
    return patches.parent / f"features_{short}" / f"{name}.h5"


def is_done(path: Path, source: SlideSource) -> bool:
    """Whether features of these very patches are there."""
    return path.exists() and np.array_equal(read_grid(path).coords, source.grid.coords)


@torch.no_grad()
def write_features(
    backbone: nn.Module,
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
    backbone = backbone.to(device)
    done = 0
    with evaluating(backbone), whole_or_nothing(path) as hidden, need("h5py").File(hidden, "w") as file:
        width = _width(backbone, source.shape, device)
        features = file.create_dataset("features", (len(source), width), np.float32)
        features.attrs.update({"name": source.grid.name, "savetodir": str(path.parent), "encoder": encoder})
        for chunk in source.chunks(chunk_size):
            patches = chunk.to(device)
            found = backbone(patches if patches.is_floating_point() else as_floats(patches))
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
