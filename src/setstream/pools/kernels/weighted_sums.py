"""Weighted sums of a chunk's elements, in blocks that stay in the cache.

    LogSums(chunk) = Σ_blocks LogSums(block)      see `block_sums.py` for the sums of a block

A block of elements is a chunk like any other: blocks merge by the law of `LogSums`. Each costs two matrix products;
everything between them happens in cache.
"""

from collections.abc import Callable, Iterable
from itertools import repeat

import torch
from torch import Tensor

from setstream.errors import ShapeError
from setstream.pools.activations import Activation
from setstream.pools.kernels.block_sums import block_sums
from setstream.pools.kernels.shared_rows import SharedRows
from setstream.states.accumulators import LogSums, rounding_error

# Logits per block: 1 MiB of float32 on a CPU, where a core's cache is the limit (measured: 2^17 to 2^19 are within 5 %, 2^15
# and 2^22 are 20 to 40 % slower); on accelerators large enough to keep them busy.
CPU_BLOCK = 2**18
ACCELERATOR_BLOCK = 2**26
# Small sets are processed together, spread over the cores: this many blocks at a time.
SETS_A_BLOCK = 4
# Shorter blocks would be dominated by the cost of starting an operation.
SHORTEST_BLOCK = 256

# features (b, n, D) -> keys (b * G, E, n) and values (b * G, n, E): G = 1, or the number of heads
Project = Callable[[Tensor], tuple[Tensor, Tensor]]


def _split(tensor: Tensor | None, size: int, batch: int) -> Iterable[Tensor | None]:
    """A per-set tensor in groups of `size` sets; a tensor that all sets share is repeated."""
    return repeat(tensor) if tensor is None or len(tensor) < batch else tensor.split(size)


def _log_sums(numerator: Tensor, normaliser: Tensor, shift: Tensor, reach: Tensor) -> LogSums:
    error = rounding_error(numerator, normaliser, reach)
    return LogSums(numerator=numerator, normaliser=normaliser, shift=shift, error=error)


def weighted_sums(
    queries: Tensor,
    features: Tensor,
    project: Project | None,
    offset: Tensor | None,
    activation: Activation,
    slots: tuple[int, int],
    mask: Tensor | None,
) -> LogSums:
    """The LogSums of a chunk.

    queries (B or 1, G, R, E) with G·R = H·K, features (B, n, D), offset (B or 1, H, K), slots = (H, K), mask (B, n);
    project None: the features are both keys and values
    """
    batch, size = features.shape[:2]
    rows = slots[0] * slots[1]
    budget = CPU_BLOCK if features.device.type == "cpu" else ACCELERATOR_BLOCK
    compiled = torch.compiler.is_compiling()  # a compiler splits loops itself, and its graph must fit every size: one block
    together = batch if compiled else max(1, SETS_A_BLOCK * budget // (rows * size))
    if not compiled and together < batch:  # as many sets at a time as fit a block
        groups = [
            weighted_sums(some_queries, some, project, some_offset, activation, slots, some_mask)
            for some, some_queries, some_offset, some_mask in zip(
                features.split(together), *(_split(t, together, batch) for t in (queries, offset, mask)), strict=False
            )
        ]
        return groups[0].cat(groups[1:])

    queries = queries.expand(batch, *queries.shape[1:]).flatten(0, 1)  # (B * G, R, E)
    shape = (batch, *slots)
    if compiled:
        keys, values = (features.mT, features) if project is None else project(features)
        return _log_sums(*block_sums(queries, keys, values, offset, activation, shape, mask))
    step = size if batch > 1 else max(SHORTEST_BLOCK, budget // rows)
    masks = repeat(None) if mask is None else mask.split(step, dim=1)
    blocks: LogSums | None = None
    # split, not slices: its backward joins the blocks' gradients once, a slice's pads each of them to the whole.
    for block, block_mask in zip(features.split(step, dim=1), masks, strict=False):
        if project is None and torch.is_grad_enabled():
            sums = _log_sums(*SharedRows.apply(queries, block, offset, activation, shape, block_mask))
        else:
            keys, values = (block.mT, block) if project is None else project(block)
            sums = _log_sums(*block_sums(queries, keys, values, offset, activation, shape, block_mask))
        blocks = sums if blocks is None else blocks.merge(sums)
    if blocks is None:
        raise ShapeError("a chunk has at least one element")
    return blocks
