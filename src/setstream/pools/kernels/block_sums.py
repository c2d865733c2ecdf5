"""Weighted sums of one block of elements.

    l = q kᵀ + b                              (R, n)     logits of n elements for R queries
    m = max_j w(l)_j                          (R,)       shift; w: the activation's log-weights
    c = Σ_j e^(w_j - m)                       (R,)       normaliser
    v = Σ_j e^(w_j - m) x_j                   (R, E)     numerator

Scores are stored as (query, element), so that maximum and sum run along memory.

Torch's fused attention gives the sums of a softmax in one operation: m = log Σ_j e^l_j, c = 1, v = Σ_j softmax(l)_j x_j.
"""

import math

import torch
from torch import Tensor

from setstream.pools.activations import ACTIVATIONS, Activation
from setstream.states.accumulators import NOTHING, LogSums, accumulator_dtype

Slots = tuple[int, int, int]  # sets, heads, slots per head
FUSED_LEAST = 32  # elements of a set from which on fused attention is the faster
FUSED_QUERIES = 32  # queries that it gives to one thread


def log_weights(
    queries: Tensor, keys: Tensor, offset: Tensor | None, activation: Activation, slots: Slots, mask: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Weights e^(w - m), shift m and reach of one block: how large the logits are, if not like the shift.

    queries (b * G, R, E), keys (b * G, E, n), offset (b or 1, H, K), slots = (b, H, K), mask (b, n)
    -> weights (b, H, K, n), shift (b, H, K), reach (b, H, K)
    """
    if offset is None:
        logits = torch.bmm(queries, keys).view(*slots, -1)
    else:
        logits = torch.baddbmm(offset.expand(slots).reshape(queries.shape[0], -1, 1), queries, keys).view(*slots, -1)
    weights = activation.weigh(logits)
    # The weight of a softmax is that of its largest logits, whose size is the shift's. Others take differences of logits.
    reach = None
    if weights is not logits:
        reach = torch.linalg.vector_norm(logits.detach(), float("inf"), (1, 2, 3), keepdim=True).squeeze(-1).expand(slots)
    if not activation.log:
        weights = weights if mask is None else weights.masked_fill(~mask[:, None, None], 0.0)
        return weights, weights.new_zeros(slots), reach
    if _alone(weights, mask):
        shift = weights.clamp(min=NOTHING)
        return (weights - shift).exp_(), shift.squeeze(-1), reach  # one; NaN or zero where the logit is beyond all numbers
    # In place where the logits are not used elsewhere and autograd does not record.
    fresh = weights is logits and not logits.requires_grad
    if mask is not None:  # a sum takes an eighth of the time of masked_fill
        absent = torch.zeros(mask.shape, dtype=weights.dtype, device=mask.device).masked_fill_(~mask, float("-inf"))
        weights = torch.add(weights, absent[:, None, None], out=weights if fresh else None)
    shift = weights.detach().amax(-1).clamp_(min=NOTHING)
    centred = weights.sub_(shift.unsqueeze(-1)) if fresh else weights - shift.unsqueeze(-1)
    return centred.exp_(), shift, reach


def block_sums(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    offset: Tensor | None,
    activation: Activation,
    slots: Slots,
    mask: Tensor | None,
    kept: list[Tensor] | None = None,
) -> LogSums:
    """The sums of one block, differentiated by autograd; weights (b, H K, n) and shift are added to `kept`."""
    weights, shift, reach = log_weights(queries, keys, offset, activation, slots, mask)
    if kept is not None:
        kept += [weights.flatten(1, 2), shift]
    if activation.log and _alone(weights, mask):  # its weight is e^(w - w) = 1
        wide = values.to(accumulator_dtype(values.device), copy=True)  # before it is repeated: sums are added in this type
        numerator, normaliser = wide.expand(-1, weights.numel() // values.shape[0], -1), weights.squeeze(-1)
    else:
        numerator = torch.bmm(weights.view(queries.shape[0], -1, values.shape[1]), values)
        normaliser = weights.sum(-1)
    sums = {"numerator": numerator.view(*slots, -1), "normaliser": normaliser, "shift": shift}
    return LogSums(**sums if reach is None else sums | {"reach": reach})


def fuses(rows: Tensor, queries: int, offset: Tensor | None, activation: Activation, mask: Tensor | None) -> bool:
    """Whether fused attention computes the sums of so many queries, and in less time than `block_sums`."""
    return (
        rows.shape[1] >= FUSED_LEAST
        and offset is None
        and mask is None
        and activation == ACTIVATIONS["softmax"]
        and rows.device.type == "cpu"
        and rows.stride(2) == 1
        and not torch.is_grad_enabled()
        and not torch.compiler.is_compiling()
        # One thread each takes a share of the queries of a set, but none a share of its elements.
        and rows.shape[0] * math.ceil(queries / FUSED_QUERIES) >= torch.get_num_threads()
    )


def fused_means(queries: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Weighted means (b, 1, R, E) of rows (b, n, E), keys and values at once, and log Σ e^l; queries (b or 1, 1, R, E)."""
    keys = rows.unsqueeze(1)
    queries = queries.expand(keys.shape[0], -1, -1, -1)
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(queries, keys, keys, 0.0, False, scale=1.0)


def fused_sums(queries: Tensor, rows: Tensor, slots: Slots) -> LogSums:
    """The sums of rows that are keys and values at once, without a graph; see `fused_means`."""
    means, shift = fused_means(queries, rows)
    shift = shift.reshape(slots)
    # The largest logit is at most the shift, and at least log n below it.
    sums = {"numerator": means.reshape(*slots, -1), "normaliser": torch.ones_like(shift), "shift": shift}
    return LogSums(**sums, reach=shift.abs().add_(math.log(rows.shape[1])))


def _alone(weights: Tensor, mask: Tensor | None) -> bool:
    """Whether each set has one element, and no graph is needed through its weights."""
    return weights.shape[-1] == 1 and mask is None and not weights.requires_grad and not torch.compiler.is_compiling()
