"""The weights of a module as safetensors: written at once, read with an error that says what does not fit."""

from contextlib import suppress
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from setstream._utils.atomic import whole_or_nothing
from setstream.errors import ConfigurationError


def save_weights(model: nn.Module, path: Path, dtype: torch.dtype | None = None) -> None:
    """The weights as safetensors, at once; tensors that share memory are stored once for each name.

    dtype: of floating-point weights in the file; None: as they are.
    """
    found = {name: tensor.detach().cpu().clone().contiguous() for name, tensor in model.state_dict().items()}
    if dtype is not None:
        found = {name: tensor.to(dtype) if tensor.is_floating_point() else tensor for name, tensor in found.items()}
    with whole_or_nothing(path) as hidden:
        hidden.touch()
        mode = hidden.stat().st_mode  # as any new file here: safetensors makes one that only its owner can read
        save_file(found, hidden)
        with suppress(OSError):
            hidden.chmod(mode)


def load_weights(model: nn.Module, path: Path) -> None:
    """Load weights, or say which do not fit. They take the types that the model has."""
    try:
        found: dict[str, Tensor] = load_file(path)
        model.load_state_dict(found)
    except (RuntimeError, SafetensorError, OSError) as error:
        raise ConfigurationError(f"the weights in {path} are not those of this model: {error}") from error
