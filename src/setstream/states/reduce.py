"""States and gradients across the ranks of a torch.distributed group that each hold a part of every set.

    state = Σ_ranks state_r                           each accumulator by its own law
    ∂L/∂θ = Σ_ranks ∂L/∂state · ∂state_r/∂θ

Every rank ends with the same state, so finalize, head and loss are the same everywhere and need no exchange.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from setstream.states.accumulators.base import Group, accumulator_dtype, all_reduce
from setstream.states.state import State

__all__ = ["Group", "reduce_state", "share_draw", "sum_gradients"]


def reduce_state(state: State, group: Group) -> State:
    """The sum of all ranks' states, on every rank."""
    accumulators = {name: accumulator.reduce(group) for name, accumulator in state.accumulators.items()}
    return State(accumulators, all_reduce(state.count, dist.ReduceOp.SUM, group), state.origin)


def share_draw(state: State, group: Group) -> State:
    """The state with the random draw of the group's first rank, so that all parts of a set use the same slots."""
    accumulators = {name: accumulator.from_first_rank(group) for name, accumulator in state.accumulators.items()}
    return State(accumulators, state.count, state.origin)


def sum_gradients(gradients: Sequence[Tensor | None], like: Sequence[Tensor], group: Group) -> list[Tensor | None]:
    """Each gradient summed over the ranks, in the accumulators' type. A rank without elements has none and adds zeros."""
    local = [torch.zeros_like(t) if gradient is None else gradient for gradient, t in zip(gradients, like, strict=True)]
    return [all_reduce(tensor.to(accumulator_dtype(tensor.device)), dist.ReduceOp.SUM, group) for tensor in local]
