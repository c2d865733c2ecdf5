"""Moments: the plain statistics of a set, feature by feature::

    μ = (1/N) Σ_j φ_j,    σ = √((1/N) Σ_j φ_j² - μ²),    min_j φ_j,    max_j φ_j,    log(1 + N)

The state is Σ φ, Σ φ², N (in float64), and the two extrema: all of them merge. Sums can be removed and decay, extrema cannot:
without them (`extrema=False`) the whole pool can. An empty set gives zeros.
"""

from typing import Any, ClassVar, cast

import torch
from torch import Tensor

from setstream.pools.base import Context, Pool
from setstream.states.accumulators import Accumulator, LogSums, Maximum, Minimum, accumulator_dtype, align
from setstream.states.state import State

# A variance below this share of the mean square is rounding, and its root would have an infinite derivative.
ROUNDING = 1e-14


class Moments(Pool):
    """Mean, deviation, minimum, maximum and the logarithm of the size: (B, N, D) to (B, 4 D + 1).

    Args:
        extrema: Include minimum and maximum; without them (B, 2 D + 1), and elements can be removed.
        in_dim: Checked if given; it also gives empty states their width.

    >>> import torch, setstream as ss
    >>> x = torch.tensor([[[1.0], [3.0], [5.0]]])
    >>> ss.Moments()(x).round(decimals=3)
    tensor([[3.0000, 1.6330, 1.0000, 5.0000, 1.3860]])
    """

    not_in_fingerprint: ClassVar[tuple[str, ...]] = ("in_dim",)

    def __init__(self, *, extrema: bool = True, in_dim: int | None = None) -> None:
        super().__init__()
        self.extrema, self.in_dim = extrema, in_dim

    def configuration(self) -> dict[str, Any]:
        return {"extrema": self.extrema}

    def out_dim(self, width: int) -> int:
        """The number of statistics of features of this width."""
        return (4 if self.extrema else 2) * width + 1

    def empty_accumulators(self, batch: int, device: torch.device, width: int | None = None) -> dict[str, Accumulator]:
        # Of width one where the width is not known yet, which fits any.
        width = self.in_dim or width
        accumulators: dict[str, Accumulator] = {"sums": LogSums.nothing((batch, 2 * width if width else 1), (batch,), device)}
        for name, kind in (("least", Minimum), ("most", Maximum)) if self.extrema else ():
            accumulators[name] = kind(value=torch.full((batch, width or 1), kind.nothing, device=device))
        return accumulators

    def accumulate(self, context: Context, features: Tensor, mask: Tensor | None) -> dict[str, Accumulator]:
        features = features.to(torch.promote_types(features.dtype, torch.float32))
        hidden = None if mask is None else ~mask.unsqueeze(-1)
        wide = features.to(accumulator_dtype(features.device))  # squares in float32 lose a small deviation beside a large mean
        wide = wide if hidden is None else wide.masked_fill(hidden, 0.0)
        total = torch.cat([wide.sum(1), wide.square().sum(1)], -1)
        mass = torch.full_like(total[:, 0], features.shape[1]) if mask is None else mask.sum(1).to(total)
        accumulators: dict[str, Accumulator] = {"sums": LogSums.of_ones(total, mass.detach(), features.dtype)}
        if self.extrema:
            low, high = (
                (features, features) if hidden is None else (features.masked_fill(hidden, s) for s in (torch.inf, -torch.inf))
            )
            accumulators |= {"least": Minimum(value=low.amin(1)), "most": Maximum(value=high.amax(1))}
        return accumulators

    def finalize(self, state: State) -> Tensor:
        sums = cast(LogSums, state.accumulators["sums"])
        means = sums.mean()
        half = max(1, means.shape[-1] // 2)  # an empty state of unknown width holds one number
        mean, square = means[:, :half], means[:, -half:]
        variance = square - mean.square()
        spread = variance > ROUNDING * square
        deviation = torch.where(spread, variance, 1.0).sqrt() * spread
        size = sums.true_sums()[1].log1p().unsqueeze(-1)
        nothing = align(state.count == 0, mean)
        extrema = [
            state.accumulators[name]["value"].masked_fill(nothing, 0.0).to(mean) for name in ("least", "most") if self.extrema
        ]
        return torch.cat([mean, deviation, *extrema, size], -1)

    def extra_repr(self) -> str:
        return "" if self.extrema else "extrema=False"
