"""The sums of rows that are keys and values at once, with their derivative, both in blocks that stay in the cache.

    l = q xᵀ + b                     (R, n)      a = e^(w(l) - m),   v = a x,   c = a 1
    ā = v̄ xᵀ + c̄                     (R, n)      bars: cotangents
    l̄ = Jᵀ (a ∘ ā)                   (R, n)      J: the derivative of the log-weights w, the identity for a softmax
    x̄ = aᵀ v̄ + l̄ᵀ q                  (n, E)      the second product adds to the first, where autograd adds two results
    q̄ = l̄ x,   b̄ = l̄ 1
    |x̄_j|² = u_jᵀ G u_j              (n,)        u = [a; l̄],  G = [v̄; q] [v̄; q]ᵀ (2R, 2R): x̄ itself is not needed for its size

Between forward and backward the shift m of the whole is kept, and the weights of a softmax where they are fewer numbers than
the rows; otherwise they are computed again.
"""

from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from setstream.pools.activations import ACTIVATIONS, Activation
from setstream.pools.kernels.weighted_sums import block_shape, weighted_sums
from setstream.states.accumulators import LogSums, accumulator_dtype

FEW = 2**16  # numbers in the rows: for fewer, autograd's own derivative takes less time to start


class Bars(NamedTuple):
    """Cotangents of a block: of its rows (b, n, E), or their norms (b, n); of queries (b, R, E); of the offset (b, H, K)."""

    rows: Tensor | None
    queries: Tensor | None
    offset: Tensor | None


def pull_back(
    queries: Tensor,
    rows: Tensor,
    offset: Tensor | None,
    activation: Activation,
    mask: Tensor | None,
    shift: Tensor,
    numerator_bar: Tensor,
    normaliser_bar: Tensor,
    want: Literal["rows", "norms", "rows only"] | None = "rows",
    kept: tuple[Tensor, Tensor] | None = None,
    out: Tensor | None = None,
) -> Bars:
    """The cotangents of one block, given those of the whole's sums, which are relative to `shift`.

    kept: the block's own weights (b, R, n) and shift, of a softmax. out: where x̄ is written.
    queries (b or 1, R, E), rows (b, n, E), offset (b or 1, H, K), mask (b, n); shift, normaliser_bar (b, H, K),
    numerator_bar (b, R, E). want: x̄ of the rows, |x̄| of each of them, or nothing (None); "rows only": x̄, and no q̄ and b̄.
    """
    slots, batch = shift.shape, len(rows)
    queries = queries.expand(batch, -1, -1)
    softmax = activation.weigh is ACTIVATIONS["softmax"].weigh
    shift, constant = shift.reshape(batch, -1, 1), None if offset is None else offset.expand(slots).reshape(batch, -1, 1)
    normaliser_bar, number = normaliser_bar.reshape(batch, -1, 1), queries.shape[1]
    both = None
    if kept is not None:
        given = weights = kept[0] * (kept[1].reshape(batch, -1, 1) - shift).exp_()
    elif softmax:  # one product gives logits, less the shift, and ā
        start = torch.cat([-shift if constant is None else constant - shift, normaliser_bar], 1)
        both = torch.baddbmm(start, torch.cat([queries, numerator_bar], 1), rows.mT)
        given = weights = both[:, :number].exp_()
    else:
        logits = torch.bmm(queries, rows.mT)
        logits = (logits if constant is None else logits + constant).view(*slots, -1).requires_grad_()
        with torch.enable_grad():
            given = activation.weigh(logits)
        weights = given.detach().flatten(1, 2)
        weights = (weights - shift).exp_() if activation.log else weights
    if mask is not None:
        weights = weights.masked_fill(~mask[:, None], 0.0)
    bars = torch.baddbmm(normaliser_bar, numerator_bar, rows.mT) if both is None else both[:, number:]
    if activation.log:
        bars = bars.mul_(weights)
    elif mask is not None:
        bars = bars.masked_fill_(~mask[:, None], 0.0)
    if not softmax:
        (through,) = torch.autograd.grad(given, logits, bars.view_as(given))
        bars = through.flatten(1, 2)
    queries_bar = None if want == "rows only" else torch.bmm(bars, rows)
    offset_bar = None if offset is None or want == "rows only" else bars.sum(-1).view(slots)
    if want is None:
        return Bars(None, queries_bar, offset_bar)
    if want != "norms" or 2 * number >= rows.shape[2]:
        rows_bar = torch.bmm(weights.mT, numerator_bar, out=out).baddbmm_(bars.mT, queries)
        return Bars(rows_bar if want != "norms" else torch.linalg.vector_norm(rows_bar, dim=-1), queries_bar, offset_bar)
    both = torch.cat([weights, bars], 1) if both is None or mask is not None else both
    factors = torch.cat([numerator_bar, queries], 1)
    squares = torch.bmm(torch.bmm(factors, factors.mT), both).mul_(both).sum(1)
    # Cancellation may leave nothing of a small norm; only without any weight it is zero.
    least = weights.amax(1).clamp_(max=torch.finfo(squares.dtype).tiny)
    return Bars(torch.maximum(squares, least).sqrt_(), queries_bar, offset_bar)


def add_bar(total: Tensor, bar: Tensor, sets: slice | list[int]) -> None:
    """Add the cotangents of some sets to the total, (B, ...), or (1, ...) where all sets share the tensor."""
    if len(total) in (1, len(bar)):
        total += bar.sum_to_size(total.shape)
    else:
        total[sets] += bar


class SharedRows(torch.autograd.Function):
    """queries (B or 1, 1, R, E), rows (B, n, E), offset (B or 1, H, K) -> numerator, normaliser, shift (and reach)."""

    @staticmethod
    def forward(
        ctx: Any, queries: Tensor, rows: Tensor, offset: Tensor | None, activation: Activation, slots: Any, mask: Tensor | None
    ) -> tuple[Tensor, ...]:
        """The sums; keeps their shift for the backward pass, and few weights."""
        few = activation == ACTIVATIONS["softmax"] and queries.shape[-2] <= rows.shape[-1]
        kept: list[Tensor] | None = [] if few else None
        sums = weighted_sums(queries, rows, None, offset, activation, slots, mask, kept)
        ctx.activation, ctx.slots = activation, slots
        numerator, normaliser, shift, *reach = sums.tensors.values()
        ctx.save_for_backward(queries, rows, offset, mask, shift, *kept or ())
        ctx.mark_non_differentiable(shift, *reach)
        return numerator.contiguous(), normaliser, shift, *reach  # not a view of the rows

    @staticmethod
    def backward(ctx: Any, numerator_bar: Tensor, normaliser_bar: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        """x̄, q̄ and b̄; by autograd itself where the gradient is to be differentiated again."""
        queries, rows, offset, mask, shift, *kept = ctx.saved_tensors
        if torch.is_grad_enabled():
            return _again(ctx, queries, rows, offset, mask, [numerator_bar, normaliser_bar])
        wanted = ctx.needs_input_grad[:3]
        (batch, size), number = rows.shape[:2], 0
        shift, numerator_bar, normaliser_bar = (t.to(rows.dtype) for t in (shift, numerator_bar, normaliser_bar))
        numerator_bar = numerator_bar.flatten(1, 2)
        together, step = block_shape(rows, numerator_bar.shape[1])
        wide = accumulator_dtype(rows.device)
        rows_bar, queries_bar = torch.empty_like(rows), torch.zeros_like(queries, dtype=wide)
        offset_bar = None if offset is None else torch.zeros_like(offset, dtype=wide)
        for first in range(0, batch, together):
            sets = slice(first, min(first + together, batch))
            own, own_offset = (t if t is None or len(t) == 1 else t[sets] for t in (queries.flatten(1, 2), offset))
            for start in range(0, size, step):
                part = (sets, slice(start, min(start + step, size)))
                hidden = None if mask is None else mask[part]
                weights = (kept[number], kept[number + 1]) if kept else None
                given = (shift[sets], numerator_bar[sets], normaliser_bar[sets])
                want: Literal["rows"] | None = "rows" if wanted[1] else None
                here = (own, rows[part], own_offset, ctx.activation, hidden)
                bars = pull_back(*here, *given, want, weights, out=rows_bar[part])
                number += 2
                to_queries = None if bars.queries is None else bars.queries.unsqueeze(1)
                for total, bar in ((queries_bar, to_queries), (offset_bar, bars.offset)):
                    if total is not None and bar is not None:
                        add_bar(total, bar, sets)
        totals = zip((queries_bar, rows_bar, offset_bar), wanted, strict=True)
        return *(total.to(rows.dtype) if need and total is not None else None for total, need in totals), None, None, None


def _again(
    ctx: Any, queries: Tensor, rows: Tensor, offset: Tensor | None, mask: Tensor | None, cotangents: list[Tensor]
) -> tuple[Tensor | None, ...]:
    sums = weighted_sums(queries, rows, None, offset, ctx.activation, ctx.slots, mask)
    needed = ctx.needs_input_grad[:3]
    inputs = [tensor for tensor, need in zip((queries, rows, offset), needed, strict=True) if need and tensor is not None]
    gradients = iter(torch.autograd.grad([sums["numerator"], sums["normaliser"]], inputs, cotangents, create_graph=True))
    return (*(next(gradients) if need else None for need in needed), None, None, None)


def shared_rows(
    queries: Tensor,
    rows: Tensor,
    offset: Tensor | None,
    activation: Activation,
    slots: tuple[int, int],
    mask: Tensor | None,
) -> LogSums:
    """`weighted_sums` of rows that are keys and values at once, with an explicit derivative where autograd records."""
    if not torch.is_grad_enabled() or torch.compiler.is_compiling() or rows.numel() < FEW:
        return weighted_sums(queries, rows, None, offset, activation, slots, mask)
    sums = SharedRows.apply(queries, rows, offset, activation, slots, mask)
    return LogSums(**dict(zip(("numerator", "normaliser", "shift", "reach"), sums, strict=False)))
