"""Weighted sums of a chunk's elements, in blocks that stay in the cache.

    l = q kᵀ + b                              (R, n)     logits of n elements for R queries
    m = max_j w(l)_j                          (R,)       shift; w: the activation's log-weights
    c = Σ_j e^(w_j - m)                       (R,)       normaliser
    v = Σ_j e^(w_j - m) x_j                   (R, E)     numerator

A block of elements is a chunk like any other: blocks merge by the law of `LogSums`. Scores lie as (query, element), so
that maximum and sum run along memory. Each block costs two matrix products; everything between them happens in cache.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import repeat

import torch
from torch import Tensor

from setstream.parts import NOTHING, LogSums
from setstream.pools.activations import Activation

# Logits per block: 1 MiB of float32 on a CPU, where a core's cache is the limit (measured: 2^17 to 2^19 are within 5 %, 2^15
# and 2^22 are 20 to 40 % slower); on accelerators large enough to keep them busy.
CPU_BLOCK = 2**18
ACCELERATOR_BLOCK = 2**26
# Small sets go through together, spread over the cores: this many blocks' worth at a time.
SETS_A_BLOCK = 4
# Shorter blocks would be dominated by the cost of starting an operation.
SHORTEST_BLOCK = 256

# features (b, n, D) -> keys (b * G, E, n) and values (b * G, n, E): G = 1, or the number of heads
Project = Callable[[Tensor], tuple[Tensor, Tensor]]


def log_weights(
    queries: Tensor,
    keys: Tensor,
    offset: Tensor | None,
    activation: Activation,
    slots: tuple[int, int, int],
    mask: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Weights e^(w - m) and shift m of one block.

    queries (b * G, R, E), keys (b * G, E, n), offset (b or 1, H, K), slots = (b, H, K), mask (b, n)
    -> weights (b, H, K, n), shift (b, H, K)
    """
    logits = torch.bmm(queries, keys).view(*slots, -1)
    if offset is not None:
        logits = logits + offset.unsqueeze(-1)
    weights = activation.weigh(logits)
    if not activation.log:
        weights = weights if mask is None else weights.masked_fill(~mask[:, None, None], 0.0)
        return weights, weights.new_zeros(slots)
    if mask is not None:
        weights = weights.masked_fill(~mask[:, None, None], float("-inf"))
    shift = weights.detach().amax(-1).clamp_(min=NOTHING)
    # In place where nobody else sees the logits and autograd does not watch.
    fresh = weights is logits and not logits.requires_grad
    centred = weights.sub_(shift.unsqueeze(-1)) if fresh else weights - shift.unsqueeze(-1)
    return centred.exp_(), shift


def _split(tensor: Tensor | None, size: int, batch: int) -> Iterable[Tensor | None]:
    """A per-set tensor in groups of `size` sets; what is shared by all sets, again and again."""
    return repeat(tensor) if tensor is None or len(tensor) < batch else tensor.split(size)


def weighted_sums(
    queries: Tensor,
    features: Tensor,
    project: Project,
    offset: Tensor | None,
    activation: Activation,
    slots: tuple[int, int],
    mask: Tensor | None,
) -> LogSums:
    """The LogSums of a chunk.

    queries (B or 1, G, R, E) with G·R = H·K, features (B, n, D), offset (B or 1, H, K), slots = (H, K), mask (B, n)
    """
    batch, size = features.shape[:2]
    rows = slots[0] * slots[1]
    budget = CPU_BLOCK if features.device.type == "cpu" else ACCELERATOR_BLOCK
    together = max(1, SETS_A_BLOCK * budget // (rows * size))
    if together < batch:  # as many sets at a time as fit a block
        groups = [
            weighted_sums(own_queries, own, project, own_offset, activation, slots, own_mask)
            for own, own_queries, own_offset, own_mask in zip(
                features.split(together), *(_split(t, together, batch) for t in (queries, offset, mask)), strict=False
            )
        ]
        return groups[0].cat(groups[1:])

    queries = queries.expand(batch, *queries.shape[1:]).flatten(0, 1)  # (B * G, R, E)
    shape = (batch, *slots)
    step = size if batch > 1 else max(SHORTEST_BLOCK, budget // rows)
    masks = repeat(None) if mask is None else mask.split(step, dim=1)
    total: LogSums | None = None
    # split, not slices: its backward joins the blocks' gradients once, a slice's pads each of them to the whole.
    for block, block_mask in zip(features.split(step, dim=1), masks, strict=False):
        keys, values = project(block)
        weights, shift = log_weights(queries, keys, offset, activation, shape, block_mask)
        numerator = torch.bmm(weights.view(len(queries), -1, values.shape[1]), values)
        sums = LogSums(
            numerator=numerator.view(*shape, -1),
            normaliser=weights.sum(-1),
            shift=shift,
            spent=torch.zeros_like(shift),
        )
        total = sums if total is None else total.merge(sums)
    assert total is not None, "a chunk has at least one element"
    return total
