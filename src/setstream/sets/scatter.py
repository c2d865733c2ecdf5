"""Set parallelism: one set over many ranks.

    rank r holds elements r·N/R .. (r+1)·N/R of every set
    encode(encoder, parts, group=group)          gives every rank the z and the gradients of the whole sets

The states are summed across ranks, so only states and gradients are sent, for any number of elements. A rank
may hold no element of a set. Launch with torchrun; gloo on CPU, nccl on GPU.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from setstream.sets.chunks import Chunks
from setstream.sets.layout import pack
from setstream.sets.part import PartSource
from setstream.sets.source import are_sources


def scatter_sets(sets: Any, mask: Tensor | None = None, group: dist.ProcessGroup | None = None) -> Any:
    """The part of every set that this rank holds, for `encode`: contiguous shares of nearly equal size.

    Every rank passes the same sets, in any layout. Sources on disk, and chunks of them, become views: a rank reads only its
    part. Other chunks are read by all ranks, each of which keeps its part. Without torch.distributed one rank holds everything.

    Example:
        >>> import torch, setstream as ss
        >>> [len(x) for x in ss.scatter_sets(torch.randn(2, 5, 3))]
        [5, 5]
    """
    rank, ranks = 0, 1
    if dist.is_available() and dist.is_initialized():
        rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    if are_sources(sets):
        return [PartSource(source, rank, ranks) for source in sets]
    if isinstance(sets, Chunks):
        return sets.part(rank, ranks)
    packed = pack(sets, mask)
    return [torch.tensor_split(x, ranks)[rank] for x in packed.elements.split(packed.lengths)]
