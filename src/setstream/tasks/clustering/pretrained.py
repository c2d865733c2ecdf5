"""Trained models that come with the package.

Each is a safetensors file beside this module, in half precision to be small, with the options that built the model and what it
scored in its header.
"""

from __future__ import annotations

import json
from pathlib import Path

from safetensors import safe_open
from safetensors.torch import save_file

from setstream.errors import ConfigurationError
from setstream.model import SetModel
from setstream.tasks.clustering.models import MODELS

FOLDER = Path(__file__).parent / "weights"


def file_of(name: str) -> Path:
    """Where the weights of a model lie."""
    return FOLDER / f"{name.replace('+', '-')}.safetensors"


def available() -> list[str]:
    """The models that are shipped."""
    return [name for name in MODELS if file_of(name).is_file()]


def pretrained(name: str) -> SetModel:
    """A trained clustering model, in eval mode.

    >>> import torch
    >>> model = pretrained("umbc+set-transformer")
    >>> points = torch.randn(1, 1000, 2)
    >>> nll = -model(points).log_prob(points)          # of every point
    >>> nll.shape
    torch.Size([1, 1000])
    """
    if name not in available():
        raise ConfigurationError(f"no weights of {name!r} are shipped: choose one of {', '.join(available())}")
    with safe_open(file_of(name), "pt") as file:
        options = json.loads(file.metadata()["options"])
        weights = {key: file.get_tensor(key).float() for key in file.keys()}  # noqa: SIM118
    model = MODELS[name](**options)
    model.load_state_dict(weights)
    return model.eval()


def ship(name: str, model: SetModel, options: dict[str, object], about: dict[str, object]) -> Path:
    """Write the weights of a trained model into the package."""
    FOLDER.mkdir(exist_ok=True)
    metadata = {"options": json.dumps(options), "about": json.dumps(about)}
    save_file({key: tensor.half().contiguous() for key, tensor in model.state_dict().items()}, file_of(name), metadata)
    return file_of(name)
