"""Weighted sums of a chunk's elements, in blocks that stay in the cache.

    LogSums(chunk) = Σ_blocks LogSums(block)      see `block_sums.py` for the sums of a block

A block of elements is a chunk like any other: blocks merge by the law of `LogSums`. Each costs two matrix products;
everything between them happens in cache.
"""

from collections.abc import Callable
from itertools import repeat

import torch
from torch import Tensor

from setstream.errors import ShapeError
from setstream.pools.activations import Activation
from setstream.pools.kernels.block_sums import block_sums, fused_sums, fuses
from setstream.states.accumulators import LogSums

# Numbers per block, the widest of an element's features and logits times the elements: 2 MiB of float32 on a CPU, where a
# core's cache is the limit; on accelerators large enough to keep them busy.
CPU_BLOCK = 2**19
ACCELERATOR_BLOCK = 2**26
# Shorter blocks would be dominated by the cost of starting an operation.
LEAST = 1024


def block_size(device: torch.device, width: int) -> int:
    """How many elements fit a block, if `width` numbers are computed from each."""
    return max(LEAST, (CPU_BLOCK if device.type == "cpu" else ACCELERATOR_BLOCK) // width)


def block_shape(rows: Tensor, queries: int) -> tuple[int, int]:
    """How many sets of (B, n, E) rows, and how many elements of each, are in a block: whole sets, or a part of one."""
    batch, size, width = rows.shape
    step = block_size(rows.device, max(queries, width))
    return (batch, size) if batch * size <= 2 * step else (max(1, step // size), step)


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
    kept: list[Tensor] | None = None,
) -> LogSums:
    """The LogSums of a chunk. `kept`: see `block_sums`.

    queries (B or 1, G, R, E) with G·R = H·K, features (B, n, D), offset (B or 1, H, K), slots = (H, K), mask (B, n);
    project None: the features are both keys and values
    """
    batch, size = features.shape[:2]

    def block(sets: Tensor, queries: Tensor, offset: Tensor | None, mask: Tensor | None) -> LogSums:
        keys, values = (sets.mT, sets) if project is None else project(sets)
        some = sets.shape[0]  # not len(), which would make a compiled graph one for this number of sets
        queries = (queries if queries.shape[0] == some else queries.expand(some, -1, -1, -1)).flatten(0, 1)  # (b G, R, E)
        return block_sums(queries, keys, values, offset, activation, (some, *slots), mask, kept)

    if torch.compiler.is_compiling():  # a compiler splits loops itself, and its graph must fit every size: one block
        return block(features, queries, offset, mask)
    if not size:
        raise ShapeError("a chunk has at least one element")
    if project is None and kept is None and fuses(features, slots[0] * slots[1], offset, activation, mask):
        return fused_sums(queries, features, (batch, *slots))
    together, step = block_shape(features, slots[0] * slots[1])
    if together >= batch and step >= size:
        return block(features, queries, offset, mask)
    blocks: list[LogSums] = []
    owner: list[int] = []
    # split, not slices: its backward joins the blocks' gradients once, a slice's pads each of them to the whole.
    for number, sets in enumerate(features.split(together)):
        rows = slice(number * together, number * together + len(sets))
        some_queries = queries if len(queries) == 1 else queries[rows]
        some_offset = offset if offset is None or len(offset) == 1 else offset[rows]
        masks = repeat(None) if mask is None else mask[rows].split(step, 1)
        for part, hidden in zip(sets.split(step, 1), masks, strict=False):
            blocks.append(block(part, some_queries, some_offset, hidden))
            owner += range(rows.start, rows.stop)
    joined = blocks[0].cat(blocks[1:])
    return joined if len(owner) == batch else joined.merge_rows(owner, batch)
