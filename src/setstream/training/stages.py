"""Training in stages: start from the weights of an earlier run, and keep a part of the model fixed.

    stage one   head and pool on stored features             setstream train mil umbc+set-transformer -o task.data=features/ ...
    stage two   the backbone, through whole bags of images   ... -o init_from=runs/one -o 'freeze=["head", "encoder.pool"]'

Frozen parts get no gradient and behave as at test time: no dropout, slots at their means. The optimizer gets the rest.
"""

from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from setstream.errors import ConfigurationError
from setstream.training.checkpoint import weights_of
from setstream.training.config import TrainConfig


def _under(name: str, prefixes: list[str]) -> bool:
    return any(name == prefix or name.startswith(f"{prefix}.") for prefix in prefixes)


def freeze(model: nn.Module, prefixes: list[str]) -> None:
    """Switch off the gradient of parameters in these parts of the model."""
    parameters = dict(model.named_parameters())
    for prefix in prefixes:
        if not (frozen := [parameters[name] for name in parameters if _under(name, [prefix])]):
            parts = sorted({".".join(name.split(".")[:2]) for name in parameters})
            raise ConfigurationError(f"freeze: no parameter's name begins with {prefix!r}; there are {', '.join(parts)}")
        for parameter in frozen:
            parameter.requires_grad_(False)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ConfigurationError(f"freeze = {prefixes} leaves nothing to train")


def train_mode(model: nn.Module, prefixes: list[str]) -> None:
    """Training mode, except for frozen parts."""
    model.train()
    for name, module in model.named_modules():
        if _under(name, prefixes):
            module.eval()


def begin_with(model: nn.Module, place: str, frozen: list[str]) -> None:
    """Load the weights of an earlier stage. A model may have more than they hold (a backbone); frozen parts must be there."""
    path = weights_of(Path(place))
    weights: dict[str, Tensor] = load_file(path)
    shapes = {name: tensor.shape for name, tensor in model.state_dict().items()}
    if unknown := [name for name, tensor in weights.items() if shapes.get(name) != tensor.shape]:
        raise ConfigurationError(f"the weights in {path} are of another model: it has no {unknown[:5]} of these shapes")
    if missing := [name for name, _ in model.named_parameters() if _under(name, frozen) and name not in weights]:
        raise ConfigurationError(f"{missing[:5]} should be frozen, but {path} does not hold them: they would stay random")
    model.load_state_dict(weights, strict=False)


def make_optimizer(model: nn.Module, config: TrainConfig, device: torch.device) -> torch.optim.Optimizer:
    """adam, adamw or sgd; weight decay for matrices only, not for biases, norms and other vectors; fused where possible."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    kinds = (([p for p in trained if p.dim() > 1], config.weight_decay), ([p for p in trained if p.dim() <= 1], 0.0))
    groups = [{"params": parameters, "weight_decay": decay} for parameters, decay in kinds if parameters]
    fused = device.type in ("cpu", "cuda")
    if config.optimizer == "sgd":
        return torch.optim.SGD(groups, config.lr, momentum=config.beta1, fused=fused)
    kind = torch.optim.AdamW if config.optimizer == "adamw" else torch.optim.Adam
    return kind(groups, config.lr, (config.beta1, config.beta2), fused=fused)
