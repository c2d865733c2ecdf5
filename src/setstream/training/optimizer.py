"""The optimizer of a run."""

from typing import Any

import torch
from torch import nn

from setstream.training.config import TrainConfig


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Parameters with weight decay (matrices) and without (biases, norms and other vectors); frozen ones are left out."""
    decayed = [p for p in model.parameters() if p.requires_grad and p.dim() > 1]
    others = [p for p in model.parameters() if p.requires_grad and p.dim() <= 1]
    groups = ((decayed, weight_decay), (others, 0.0))
    return [{"params": parameters, "weight_decay": decay} for parameters, decay in groups if parameters]


def make_optimizer(model: nn.Module, config: TrainConfig, device: torch.device) -> torch.optim.Optimizer:
    """adam, adamw or sgd with the run's options; fused where the device has it."""
    groups, fused = parameter_groups(model, config.weight_decay), device.type in ("cpu", "cuda")
    if config.optimizer == "sgd":
        return torch.optim.SGD(groups, config.lr, momentum=config.beta1, fused=fused)
    kind = torch.optim.AdamW if config.optimizer == "adamw" else torch.optim.Adam
    return kind(groups, config.lr, (config.beta1, config.beta2), fused=fused)
