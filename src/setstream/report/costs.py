"""What a step costs: the bytes that autograd keeps for the backward pass."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor


def kept_bytes(run: Callable[[], Any], weights: Iterable[Tensor]) -> int:
    """Bytes of all tensors that `run` saves for its backward pass, each storage once; those of `weights` are not counted.

    >>> weight = torch.randn(8, 8, requires_grad=True)
    >>> kept_bytes(lambda: (torch.ones(5, 8) @ weight).relu(), [weight])          # the ones and the result, 5 x 8 floats each
    320
    """
    kept: dict[int, int] = {}
    alive: list[Tensor] = []  # otherwise a later tensor could reuse an earlier one's address
    known = {weight.untyped_storage().data_ptr() for weight in weights}  # a linear layer saves its weight's transpose

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            kept[storage.data_ptr()] = storage.nbytes()
            alive.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        alive.append(run())
    return sum(kept.values())
