"""Backbones by name: from images (n, 3, H, W) to features (n, out_dim), each image on its own.

>>> net = backbone("resnet18", width=8)
>>> net(torch.rand(2, 3, 64, 64)).shape, net.out_dim
(torch.Size([2, 256]), 256)
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import nn

from setstream._utils.import_path import find, follows_file
from setstream.errors import ConfigurationError
from setstream.nn.backbones.base import Backbone, small
from setstream.nn.backbones.efficientnet_lite import efficientnet_lite0
from setstream.nn.backbones.resnet import resnet18

Builder = Callable[..., nn.Module]
BACKBONES: dict[str, Builder] = {"resnet18": resnet18, "efficientnet-lite0": efficientnet_lite0, "small": small}


def backbone(name: str, weights: str | Path | None = None, **options: Any) -> nn.Module:
    """A built-in backbone, or your own as `package.module:function`.

    Your function takes `weights` (if you give any) and the options, and returns a module with an attribute `out_dim`. It gets
    images (n, 3, H, W) as they come: bytes, or floats in [0, 1].

    Args:
        weights: A file, or the weights of a run whose model starts with this backbone (its model.safetensors), or a name that
            the backbone knows (efficientnet-lite0: "imagenet"); None: random. Not read again when a saved model is opened.
    """
    if follows_file() and name in BACKBONES:
        weights = None
    given = options if weights is None else {"weights": weights, **options}
    if name not in BACKBONES and ":" not in name:
        known = ", ".join(BACKBONES)
        raise ConfigurationError(f"unknown backbone {name!r}: choose one of {known}, or name your own, package.module:function")
    build: Builder = BACKBONES.get(name) or find(name, "backbone")
    try:
        made = build(**given)
    except TypeError as error:
        raise ConfigurationError(f"the backbone {name} does not take these options ({given}): {error}") from error
    if not isinstance(made, nn.Module) or not isinstance(getattr(made, "out_dim", None), int):
        raise ConfigurationError(f"{name} must give a torch.nn.Module with an integer out_dim; it gave a {type(made).__name__}")
    return made


__all__ = ["BACKBONES", "Backbone", "backbone", "small"]
