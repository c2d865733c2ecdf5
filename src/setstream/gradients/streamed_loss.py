"""A loss that is a sum over the set's own elements, in constant memory.

    L_i = Σ_j fn(x_ij; inputs)          or the mean over j

A likelihood of the set under a model that was fitted to it (clustering, completion) reads every element again: evaluated at
once it needs memory for all of them, even if the encoding is small. Here it is evaluated chunk by chunk, forward without a
graph, and recomputed chunk by chunk in the backward pass, with the exact gradient.
"""

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor, nn

from setstream.errors import ConfigurationError, ShapeError
from setstream.gradients.base import Leaves, recomputed
from setstream.sets.layout import Packed, Sets, pack
from setstream.sets.partition import Blocks, columns, cut
from setstream.states.accumulators import accumulator_dtype

REDUCTIONS = ("mean", "sum")
# fn(*inputs, chunk (B, n, ...), mask (B, n)) -> loss of each element (B, n)
ElementLoss = Callable[..., Tensor]


def streamed_loss(
    fn: ElementLoss,
    sets: Sets,
    inputs: Sequence[Tensor] = (),
    mask: Tensor | None = None,
    *,
    chunk_size: int = 4096,
    reduction: str = "mean",
) -> Tensor:
    """The loss (B,) of each set: the mean or sum of fn over its elements, with exact gradients and the memory of one chunk.

    Args:
        fn: `fn(*inputs, chunk, mask)` returns the loss of each element: chunk (B, n, ...), mask (B, n), result (B, n). Masked
            entries do not count. If fn is a module, its parameters get their gradient.
        sets: Sets in memory, in any layout.
        inputs: Tensors that fn needs and that should get a gradient, such as the parameters that a head predicted.
        mask: True for real elements, for sets (B, N, ...).
        chunk_size: How many elements of each set are in memory at a time.
        reduction: mean or sum.

    Example:
        >>> import torch, setstream as ss
        >>> x = torch.randn(2, 1000, 3)
        >>> centre = torch.zeros(2, 3, requires_grad=True)
        >>> def distance(centre, chunk, mask):
        ...     return (chunk - centre[:, None]).square().sum(-1)
        >>> loss = ss.streamed_loss(distance, x, [centre], chunk_size=100)
        >>> loss.sum().backward()
        >>> torch.allclose(centre.grad, -2 * x.mean(1), atol=1e-5)
        True
    """
    if reduction not in REDUCTIONS:
        raise ConfigurationError(f"unknown reduction {reduction!r}: choose one of {', '.join(REDUCTIONS)}")
    if chunk_size < 1:
        raise ConfigurationError(f"chunk_size must be at least 1; got {chunk_size}")
    packed = pack(sets, mask)
    if packed.elements.requires_grad:
        raise ConfigurationError("streamed_loss gives no gradient to the elements: detach them, or compute this loss at once")
    pieces = columns(cut(packed.lengths, chunk_size, "contiguous", None), packed.lengths)
    blocks = Blocks(packed.elements, [piece for piece in pieces if sum(piece.lengths)])
    device = packed.elements.device
    divisor = torch.tensor(packed.lengths, device=device).clamp(min=1) if reduction == "mean" else 1
    leaves = Leaves(fn if isinstance(fn, nn.Module) else nn.Identity(), {str(i): t for i, t in enumerate(inputs)})
    with torch.no_grad():
        total = torch.zeros(len(packed), dtype=accumulator_dtype(device), device=device)
        for block in blocks:
            total += _sum_of(fn, inputs, block)

    def pull_back(cotangents: dict[str, Tensor]) -> list[Tensor | None]:
        sums = leaves.sums()
        for block in blocks:
            with torch.enable_grad():
                loss = _sum_of(leaves.module if isinstance(fn, nn.Module) else fn, leaves.context.values(), block)
            sums.add([loss], [cotangents["loss"] / divisor])
        return leaves.gradients(leaves.totals(sums))

    loss = (total / divisor).to(inputs[0].dtype if inputs else torch.get_default_dtype())
    return recomputed(pull_back, {"loss": loss}, leaves.inputs)["loss"]


def _sum_of(fn: ElementLoss, inputs: Iterable[Tensor], block: Packed) -> Tensor:
    """The summed loss (B,) of one block, which fn gets as (B, n, ...) with a mask; padding repeats some element."""
    lengths = torch.tensor(block.lengths)
    offsets = torch.arange(max(block.lengths))
    mask = offsets < lengths[:, None]
    positions = ((lengths.cumsum(0) - lengths)[:, None] + offsets).masked_fill(~mask, 0)
    device = block.elements.device
    mask = mask.to(device)
    losses = fn(*inputs, block.elements[positions.to(device)], mask)
    if losses.shape != mask.shape:
        raise ShapeError(
            f"the loss function must return one number per element, {tuple(mask.shape)}; it returned {tuple(losses.shape)}"
        )
    return losses.masked_fill(~mask, 0.0).sum(1, dtype=accumulator_dtype(device))
