"""States and gradients across the ranks of a torch.distributed group that each hold a part of every set.

    state = Σ_ranks state_r          at the largest shift of all ranks; extremes by maximum and minimum
    ∂L/∂θ = Σ_ranks ∂L/∂state · ∂state_r/∂θ

Every rank ends with the same state, so finalize, head and loss are the same everywhere and need no exchange.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from setstream.states.accumulators import Accumulator, LogSums, Maximum, Minimum, Shared, accumulator_dtype
from setstream.states.state import State

Group = dist.ProcessGroup


def _all_reduce(tensor: Tensor, operation: dist.ReduceOp.RedOpType, group: Group) -> Tensor:
    tensor = tensor.contiguous().clone()
    dist.all_reduce(tensor, operation, group=group)
    return tensor


def _reduce_part(part: Accumulator, group: Group) -> Accumulator:
    if isinstance(part, Shared):
        return part
    if isinstance(part, Maximum | Minimum):
        operation = dist.ReduceOp.MAX if isinstance(part, Maximum) else dist.ReduceOp.MIN
        return type(part)(value=_all_reduce(part["value"], operation, group))
    if isinstance(part, LogSums):
        shift = _all_reduce(part["shift"], dist.ReduceOp.MAX, group)
        sums = {name: _all_reduce(tensor, dist.ReduceOp.SUM, group) for name, tensor in part.at(shift).items()}
        return LogSums(**sums, shift=shift)
    return part.map(lambda tensor: _all_reduce(tensor, dist.ReduceOp.SUM, group))


def reduce_state(state: State, group: Group) -> State:
    """The sum of all ranks' states, on every rank."""
    parts = {name: _reduce_part(part, group) for name, part in state.accumulators.items()}
    return State(parts, _all_reduce(state.count, dist.ReduceOp.SUM, group), state.origin)


def share_draw(state: State, group: Group) -> State:
    """The state with the random draw of the group's first rank, so that all parts of a set meet the same slots."""
    first = dist.get_global_rank(group, 0)
    for part in state.accumulators.values():
        if isinstance(part, Shared):
            for tensor in part.tensors.values():
                dist.broadcast(tensor, src=first, group=group)
    return state


def owns(mine: Tensor, whole: Tensor, group: Group) -> Tensor:
    """Where this rank holds the extreme value; on a tie the lowest rank does."""
    rank = dist.get_rank(group)
    nobody = dist.get_world_size(group)
    candidate = torch.where(mine == whole, rank, nobody)
    return _all_reduce(candidate, dist.ReduceOp.MIN, group) == rank


def sum_gradients(gradients: Sequence[Tensor | None], like: Sequence[Tensor], group: Group) -> list[Tensor | None]:
    """Each gradient summed over the ranks, in the accumulators' type. A rank without elements has none and adds zeros."""
    return [
        _all_reduce(
            (torch.zeros_like(tensor) if gradient is None else gradient).to(accumulator_dtype(tensor.device)),
            dist.ReduceOp.SUM,
            group,
        )
        for gradient, tensor in zip(gradients, like, strict=True)
    ]
