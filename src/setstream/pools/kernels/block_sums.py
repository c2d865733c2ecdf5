"""Weighted sums of one block of elements.

    l = q kᵀ + b                              (R, n)     logits of n elements for R queries
    m = max_j w(l)_j                          (R,)       shift; w: the activation's log-weights
    c = Σ_j e^(w_j - m)                       (R,)       normaliser
    v = Σ_j e^(w_j - m) x_j                   (R, E)     numerator

Scores are stored as (query, element), so that maximum and sum run along memory.
"""

import torch
from torch import Tensor

from setstream.pools.activations import Activation
from setstream.states.accumulators import NOTHING

Slots = tuple[int, int, int]  # sets, heads, slots per head
SUMS = ("numerator", "normaliser", "shift", "reach")
Sums = tuple[Tensor, Tensor, Tensor, Tensor]  # numerator (b, H, K, E); normaliser, shift and reach (b, H, K)


def log_weights(
    queries: Tensor,
    keys: Tensor,
    offset: Tensor | None,
    activation: Activation,
    slots: Slots,
    mask: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Weights e^(w - m), shift m and reach of one block: how large the logits are, and with them their rounding errors.

    queries (b * G, R, E), keys (b * G, E, n), offset (b or 1, H, K), slots = (b, H, K), mask (b, n)
    -> weights (b, H, K, n), shift (b, H, K), reach (b, H, K)
    """
    logits = torch.bmm(queries, keys).view(*slots, -1)
    if offset is not None:
        logits = logits + offset.unsqueeze(-1)
    weights = activation.weigh(logits)
    # The weight of a softmax is that of its largest logits, whose size is the shift's. Others take differences of logits.
    reach = None if weights is logits else torch.linalg.vector_norm(logits.detach(), float("inf"), (1, 2, 3), keepdim=True)
    reach = None if reach is None else reach.squeeze(-1).expand(slots)
    if not activation.log:
        weights = weights if mask is None else weights.masked_fill(~mask[:, None, None], 0.0)
        return weights, weights.new_zeros(slots), weights.new_zeros(slots) if reach is None else reach
    # In place where the logits are not used elsewhere and autograd does not record.
    fresh = weights is logits and not logits.requires_grad
    if mask is not None:  # a sum takes an eighth of the time of masked_fill
        absent = torch.zeros(mask.shape, dtype=weights.dtype, device=mask.device).masked_fill_(~mask, float("-inf"))
        weights = torch.add(weights, absent[:, None, None], out=weights if fresh else None)
    shift = weights.detach().amax(-1).clamp_(min=NOTHING)
    centred = weights.sub_(shift.unsqueeze(-1)) if fresh else weights - shift.unsqueeze(-1)
    return centred.exp_(), shift, shift if reach is None else reach


def block_sums(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    offset: Tensor | None,
    activation: Activation,
    slots: Slots,
    mask: Tensor | None,
) -> Sums:
    """The sums of one block, differentiated by autograd."""
    weights, shift, reach = log_weights(queries, keys, offset, activation, slots, mask)
    numerator = torch.bmm(weights.view(queries.shape[0], -1, values.shape[1]), values)
    return numerator.view(*slots, -1), weights.sum(-1), shift, reach
