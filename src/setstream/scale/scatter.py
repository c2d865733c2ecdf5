"""Set parallelism: one set over many ranks.

    rank r holds elements r·N/R .. (r+1)·N/R of every set
    encode(encoder, parts, group=group)          gives every rank the z and the gradients of the whole sets

The states are summed across ranks, shift-aware, so only states and gradients travel, whatever the number of elements. A rank
may hold nothing of a set. Launch with torchrun; gloo on CPU, nccl on GPU.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from setstream.layout import Sets, pack


def scatter_sets(sets: Sets, mask: Tensor | None = None, group: dist.ProcessGroup | None = None) -> list[Tensor]:
    """The part of every set that is this rank's, as a list for `encode`: contiguous shares of (nearly) equal size.

    Every rank passes the same sets. Without torch.distributed there is one rank, which holds everything.

    >>> import torch, setstream as ss
    >>> [len(x) for x in ss.scatter_sets(torch.randn(2, 5, 3))]
    [5, 5]
    """
    packed = pack(sets, mask)
    rank, ranks = 0, 1
    if dist.is_available() and dist.is_initialized():
        rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    return [torch.tensor_split(x, ranks)[rank] for x in packed.elements.split(packed.lengths)]
