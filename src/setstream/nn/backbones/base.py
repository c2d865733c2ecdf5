"""The base of all backbones: a network from images to vectors, each image on its own.

    x (n, 3, H, W), floats in [0, 1] or bytes  --(x - mean) / std-->  net  --(f - centre) / spread-->  (n, out_dim)

centre and spread are 0 and 1 unless `standardise` takes them from some features.

A backbone is the first part of phi, so it must look at one image at a time: no batch norm in training mode.
"""

from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from setstream.errors import DataError, ShapeError

#: The name of the backbone's network in models of `setstream.tasks.mil`.
OF_A_RUN = "encoder.phi.backbone.net."


class Backbone(nn.Module):
    """Images (n, 3, H, W), in [0, 1] or as bytes, to features (n, out_dim)."""

    mean: Tensor
    std: Tensor
    centre: Tensor
    spread: Tensor

    def __init__(
        self, net: nn.Module, out_dim: int, mean: tuple[float, ...] = (0.0, 0.0, 0.0), std: tuple[float, ...] = (1.0, 1.0, 1.0)
    ) -> None:
        super().__init__()
        self.net, self.out_dim = net, out_dim
        self.register_buffer("mean", torch.tensor(mean).view(3, 1, 1), persistent=False)
        self.register_buffer("std", torch.tensor(std).view(3, 1, 1), persistent=False)
        self.register_buffer("centre", torch.zeros(out_dim))
        self.register_buffer("spread", torch.ones(out_dim))

    def forward(self, x: Tensor) -> Tensor:
        if x.dim() != 4 or x.shape[1] != 3:
            raise ShapeError(f"a backbone takes images (n, 3, height, width); got {tuple(x.shape)}")
        if x.dtype == torch.uint8:
            x = x.to(self.mean.dtype) / 255
        features = self.net((x.to(self.mean.dtype) - self.mean) / self.std)
        return (features - self.centre) / self.spread

    @torch.no_grad()
    def standardise(self, images: Tensor, batch: int = 500) -> None:
        """Scale features to mean zero and deviation one over these images (n, 3, H, W).

        Features of a network that ends in a ReLU lie far from zero, so the means of all bags look alike.
        """
        self.centre.zero_()
        self.spread.fill_(1.0)
        features = torch.cat([self(part.to(self.mean.device)) for part in images.split(batch)])
        spread, centre = torch.std_mean(features, 0)
        self.centre.copy_(centre)
        self.spread.copy_(torch.where(spread > 0, spread, 1.0))


def read_checkpoint(path: Path) -> dict[str, Tensor]:
    """The tensors of a file by name, without wrappers (`state_dict`, `module.`); of a run's weights, its backbone's."""
    if not path.is_file():
        raise DataError(f"{path}: there is no such file of weights")
    try:
        tensors = load_file(path) if path.suffix == ".safetensors" else torch.load(path, map_location="cpu", weights_only=True)
    except (SafetensorError, RuntimeError, OSError, EOFError, ValueError) as error:
        raise DataError(f"{path}: is not a readable file of weights: {error}") from error
    except Exception as error:  # the unpickler raises various errors
        if type(error).__name__ != "UnpicklingError":
            raise
        raise DataError(f"{path}: holds more than tensors, which is not read: {error}") from error
    for wrapper in ("state_dict", "model"):
        if isinstance(tensors, dict) and isinstance(tensors.get(wrapper), dict):
            tensors = tensors[wrapper]
    if not isinstance(tensors, dict) or not all(isinstance(value, Tensor) for value in tensors.values()):
        raise DataError(f"{path}: expected tensors by name; it holds a {type(tensors).__name__}")
    if any(name.startswith(OF_A_RUN) for name in tensors):
        tensors = {name.removeprefix(OF_A_RUN): tensor for name, tensor in tensors.items() if name.startswith(OF_A_RUN)}
    return {name.removeprefix("module."): tensor for name, tensor in tensors.items()}
