"""The base of all backbones: a network from images to vectors, each image on its own.

    x (n, 3, H, W), floats in [0, 1] or bytes  --(x - mean) / std-->  net  --(f - centre) / spread-->  (n, out_dim)

centre and spread are 0 and 1, or as the weights say.
A backbone is the first part of phi, so it must look at one image at a time: no batch norm in training mode.
"""

import pickle
from itertools import pairwise
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from setstream.errors import DataError, ShapeError
from setstream.models.weights import load_tensors

Colour = tuple[float, float, float]
OF_A_RUN = "encoder.phi.backbone.net."  # the backbone's network in models of `setstream.tasks.mil`


class Backbone(nn.Module):
    """Images (n, 3, H, W), in [0, 1] or as bytes, to features (n, out_dim)."""

    def __init__(self, net: nn.Module, out_dim: int, mean: Colour = (0.0, 0.0, 0.0), std: Colour = (1.0, 1.0, 1.0)) -> None:
        super().__init__()
        self.net, self.out_dim = net, out_dim
        self.mean, self.std = (nn.Buffer(torch.tensor(colour).view(3, 1, 1), persistent=False) for colour in (mean, std))
        self.centre, self.spread = nn.Buffer(torch.zeros(out_dim)), nn.Buffer(torch.ones(out_dim))

    def forward(self, x: Tensor) -> Tensor:
        if x.dim() != 4 or x.shape[1] != 3:
            raise ShapeError(f"a backbone takes images (n, 3, height, width); got {tuple(x.shape)}")
        images = x.to(self.mean.dtype) / 255 if x.dtype == torch.uint8 else x.to(self.mean.dtype)
        features = self.net((images - self.mean) / self.std)
        return (features - self.centre) / self.spread


def read_checkpoint(path: Path) -> dict[str, Tensor]:
    """The tensors of a file by name, without wrappers (`state_dict`, `module.`); of a run's weights, its backbone's."""
    if not path.is_file():
        raise DataError(f"{path}: there is no such file of weights")
    try:
        tensors = load_file(path) if path.suffix == ".safetensors" else torch.load(path, map_location="cpu", weights_only=True)
    except (SafetensorError, RuntimeError, OSError, EOFError, ValueError, pickle.UnpicklingError) as error:
        raise DataError(f"{path}: is not a readable file of weights, with tensors and nothing else: {error}") from error
    for wrapper in ("state_dict", "model"):
        if isinstance(tensors, dict) and isinstance(tensors.get(wrapper), dict):
            tensors = tensors[wrapper]
    if not isinstance(tensors, dict) or not all(isinstance(value, Tensor) for value in tensors.values()):
        raise DataError(f"{path}: expected tensors by name; it holds a {type(tensors).__name__}")
    if any(name.startswith(OF_A_RUN) for name in tensors):
        tensors = {name.removeprefix(OF_A_RUN): tensor for name, tensor in tensors.items() if name.startswith(OF_A_RUN)}
    return {name.removeprefix("module."): tensor for name, tensor in tensors.items()}


def small(weights: str | Path | None = None, width: int = 32) -> Backbone:
    """Three convolutions with group norm for small images: 128 features; weights: a file, or that of a run.

    x --conv 5x5 /2, norm, ReLU--> width --[conv 3x3 /2, norm, ReLU] x 2, each twice as wide--> mean over the plane --> 4·width
    """
    widths = [3, width, 2 * width, 4 * width]
    layers: list[nn.Module] = []
    for before, after in pairwise(widths):
        size = 5 if before == 3 else 3
        layers += [nn.Conv2d(before, after, size, 2, padding=size // 2, bias=False), nn.GroupNorm(8, after), nn.ReLU()]
    net = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten())
    if weights is not None:
        load_tensors(net, read_checkpoint(Path(weights)), Path(weights))
    return Backbone(net, widths[-1], mean=(0.5, 0.5, 0.5), std=(0.25, 0.25, 0.25))
