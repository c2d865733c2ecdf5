"""Weighted sums of a chunk's elements, in blocks that stay in the cache.

    LogSums(chunk) = Σ_blocks LogSums(block)      see `block_sums.py` for the sums of a block

A block of elements is a chunk like any other: blocks merge by the law of `LogSums`. Each costs two matrix products;
everything between them happens in cache.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from setstream.errors import ShapeError
from setstream.pools.activations import Activation
from setstream.pools.kernels.block_sums import SUMS, block_sums
from setstream.states.accumulators import LogSums

# Numbers per block, the widest of an element's features and logits times the elements: 1 MiB of float32 on a CPU, where a
# core's cache is the limit; on accelerators large enough to keep them busy.
CPU_BLOCK = 2**18
ACCELERATOR_BLOCK = 2**26
# Shorter blocks would be dominated by the cost of starting an operation.
LEAST = 256


def block_size(device: torch.device, width: int) -> int:
    """How many elements fit a block, if `width` numbers are computed from each."""
    return max(LEAST, (CPU_BLOCK if device.type == "cpu" else ACCELERATOR_BLOCK) // width)


# features (b, n, D) -> keys (b * G, E, n) and values (b * G, n, E): G = 1, or the number of heads
Project = Callable[[Tensor], tuple[Tensor, Tensor]]


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
    if not size:
        raise ShapeError("a chunk has at least one element")
    width = max(slots[0] * slots[1], features.shape[2])
    # A compiler splits loops itself, and its graph must fit every size: one block.
    step = batch * size if torch.compiler.is_compiling() else block_size(features.device, width)
    blocks: list[LogSums] = []
    owner: list[int] = []
    together = max(1, step // size)  # as many sets at a time as fit a block, or a part of one
    # split, not slices: its backward joins the blocks' gradients once, a slice's pads each of them to the whole.
    for number, sets in enumerate([features] if together >= batch else features.split(together)):
        rows = slice(number * together, number * together + len(sets))
        some = queries if len(queries) in (1, len(sets)) else queries[rows]
        some = some.expand(len(sets), *some.shape[1:]).flatten(0, 1)  # (b G, R, E)
        some_offset = offset if offset is None or len(offset) in (1, len(sets)) else offset[rows]
        masks = [None] * -(-size // step) if mask is None else mask[rows].split(step, 1)
        for block, hidden in zip([sets] if size <= step else sets.split(step, 1), masks, strict=True):
            keys, values = (block.mT, block) if project is None else project(block)
            sums = block_sums(some, keys, values, some_offset, activation, (len(sets), *slots), hidden)
            blocks.append(LogSums(**dict(zip(SUMS, sums, strict=True))))
            owner += range(rows.start, rows.stop)
    if len(blocks) == 1:
        return blocks[0]
    joined = blocks[0].cat(blocks[1:])
    return joined if len(owner) == batch else joined.merge_rows(owner, batch)
