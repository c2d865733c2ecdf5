"""Tensors across the ranks of a torch.distributed group."""

import torch
import torch.distributed as dist
from torch import Tensor

Group = dist.ProcessGroup


def all_reduce(tensor: Tensor, operation: dist.ReduceOp.RedOpType, group: Group) -> Tensor:
    """The sum, maximum or minimum of all ranks' tensors, on every rank."""
    tensor = tensor.contiguous().clone()
    dist.all_reduce(tensor, operation, group=group)
    return tensor


def all_gather(tensor: Tensor, group: Group) -> list[Tensor]:
    """The tensors of all ranks in their order, on every rank; they have one shape."""
    gathered = [torch.empty_like(tensor, memory_format=torch.contiguous_format) for _ in range(dist.get_world_size(group))]
    dist.all_gather(gathered, tensor.contiguous(), group=group)
    return gathered
