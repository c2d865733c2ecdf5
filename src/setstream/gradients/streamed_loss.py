"""A loss that is a sum over the set's own elements, in constant memory.

    L_i = Σ_j fn(x_ij; inputs)          or the mean over j

A likelihood of the set under a model that was fitted to it (clustering, completion) touches every element again: evaluated at
once it needs memory for all of them, however small the encoding is. Here it goes chunk by chunk, forward without a graph, and
again chunk by chunk on the way back, each time with the exact gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from setstream.errors import ConfigurationError, ShapeError
from setstream.sets.layout import Packed, Sets, pack
from setstream.sets.partition import Piece, columns, cut
from setstream.states.accumulators import accumulator_dtype

REDUCTIONS = ("mean", "sum")
# fn(*inputs, chunk (B, n, ...), mask (B, n)) -> loss of each element (B, n)
ElementLoss = Callable[..., Tensor]


def _dense(packed: Packed) -> tuple[Tensor, Tensor]:
    """A piece of each set as (B, n, ...) with a mask; padding repeats some element."""
    lengths = torch.tensor(packed.lengths)
    width = max(packed.lengths)
    starts = lengths.cumsum(0) - lengths
    offsets = torch.arange(width)
    mask = offsets < lengths[:, None]
    index = (starts[:, None] + offsets).masked_fill(~mask, 0)
    return packed.elements[index.to(packed.elements.device)], mask.to(packed.elements.device)


class _Streamed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, job: _Job, *inputs: Tensor) -> Tensor:
        ctx.job = job
        ctx.save_for_backward(*inputs)
        return job.total(inputs[: job.count])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, cotangent: Tensor) -> tuple[Tensor | None, ...]:
        return (None, *ctx.job.pull_back(ctx.saved_tensors, cotangent))


class _Job:
    def __init__(self, fn: ElementLoss, packed: Packed, pieces: list[Piece], count: int, mean: bool) -> None:
        self.fn, self.packed, self.pieces, self.count, self.mean = fn, packed, pieces, count, mean

    def piece(self, piece: Piece, inputs: Sequence[Tensor], elements: Tensor) -> Tensor:
        """The summed loss (B,) of one piece."""
        chunk, mask = _dense(piece.of(elements))
        losses = self.fn(*inputs, chunk, mask)
        if losses.shape != mask.shape:
            raise ShapeError(
                f"the loss function must give one number for each element, {tuple(mask.shape)}; it gave {tuple(losses.shape)}"
            )
        return losses.masked_fill(~mask, 0.0).sum(1, dtype=accumulator_dtype(losses.device))

    def total(self, inputs: Sequence[Tensor]) -> Tensor:
        batch = len(self.packed)
        device = self.packed.elements.device
        total = torch.zeros(batch, dtype=accumulator_dtype(device), device=device)
        for piece in self.pieces:
            if piece.total:
                total = total + self.piece(piece, inputs, self.packed.elements)
        return (total / self.sizes(device) if self.mean else total).to(
            torch.get_default_dtype() if not inputs else inputs[0].dtype
        )

    def sizes(self, device: torch.device) -> Tensor:
        return torch.tensor(self.packed.lengths, device=device).clamp(min=1)

    def pull_back(self, saved: Sequence[Tensor], cotangent: Tensor) -> list[Tensor | None]:
        cotangent = cotangent / self.sizes(cotangent.device) if self.mean else cotangent
        leaves = [t.detach().requires_grad_(t.requires_grad) for t in saved[: self.count]]
        others = list(saved[self.count :])  # parameters of fn, and the elements if they learn
        targets = [t for t in (*leaves, *others) if t.requires_grad]
        sums = [torch.zeros_like(t, dtype=accumulator_dtype(t.device)) for t in targets]
        for piece in self.pieces:
            if not piece.total:
                continue
            with torch.enable_grad():
                loss = self.piece(piece, leaves, self.packed.elements)
            found = torch.autograd.grad(loss, targets, cotangent.to(loss.dtype), allow_unused=True)
            for total, gradient in zip(sums, found, strict=True):
                if gradient is not None:
                    total += gradient
        gradients = iter(s.to(t.dtype) for s, t in zip(sums, targets, strict=True))
        return [next(gradients) if t.requires_grad else None for t in (*leaves, *others)]


def streamed_loss(
    fn: ElementLoss,
    sets: Sets,
    inputs: Sequence[Tensor] = (),
    mask: Tensor | None = None,
    *,
    chunk_size: int = 4096,
    reduction: str = "mean",
) -> Tensor:
    """The loss (B,) of each set: the mean or sum over its elements of fn, with exact gradients and memory of one chunk.

    fn:      fn(*inputs, chunk, mask) gives the loss of each element: chunk (B, n, ...), mask (B, n), result (B, n). What lies
             under the mask does not count. If fn is a module, its parameters get their gradient.
    inputs:  tensors that fn needs and that should get a gradient, such as the parameters that a head predicted.

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
    job = _Job(fn, packed, pieces, len(inputs), reduction == "mean")
    parameters = [p for p in fn.parameters() if p.requires_grad] if isinstance(fn, nn.Module) else []
    return _Streamed.apply(job, *inputs, *parameters)
