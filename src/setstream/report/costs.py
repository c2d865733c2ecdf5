"""What a step costs: bytes that autograd keeps for the way back, and milliseconds."""

import time
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor


def kept_bytes(run: Callable[[], Any], weights: Iterable[Tensor]) -> int:
    """Bytes of all tensors that `run` keeps for its backward, each piece of memory once; weights are there anyway.

    >>> weight = torch.randn(8, 8, requires_grad=True)
    >>> kept_bytes(lambda: (torch.ones(5, 8) @ weight).relu(), [weight])          # the ones and the result, 5 x 8 floats each
    320
    >>> kept_bytes(lambda: torch.nn.functional.linear(torch.ones(5, 8), weight).relu(), [weight])
    320
    """
    kept: dict[int, int] = {}
    alive: list[Tensor] = []  # or a later tensor may lie where an earlier one was
    there = {weight.untyped_storage().data_ptr() for weight in weights}  # a linear layer keeps its weight's transpose

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in there:
            kept[storage.data_ptr()] = storage.nbytes()
            alive.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        alive.append(run())
    return sum(kept.values())


def milliseconds(run: Callable[[], Any], rounds: int = 200) -> float:
    """The median time of `run`."""
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return 1000 * sorted(times)[rounds // 2]
