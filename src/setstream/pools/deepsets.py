"""DeepSets: plain pooling of features over the set::

    sum    z = Σ_j φ_j                 mean   z = (1/N) Σ_j φ_j
    max    z = max_j φ_j               min    z = min_j φ_j          feature by feature

Zaheer et al., "Deep Sets", NeurIPS 2017. An empty set gives zeros.
"""

from typing import Any, ClassVar, cast

import torch
from torch import Tensor

from setstream.errors import ConfigurationError
from setstream.pools.base import Context, Pool
from setstream.states.accumulators import Accumulator, LogSums, Maximum, Minimum, accumulator_dtype, align
from setstream.states.state import State

EXTREMA: dict[str, type[Maximum] | type[Minimum]] = {"max": Maximum, "min": Minimum}
POOLS = ("mean", "sum", *EXTREMA)


class DeepSets(Pool):
    """Mean, sum, max or min over the elements: (B, N, D) to (B, D).

    Args:
        pool: mean, sum, max or min.
        in_dim: checked if given; it also gives empty states their width.

    >>> import torch, setstream as ss
    >>> x = torch.tensor([[[1.0, -2.0], [3.0, 0.0]]])
    >>> [ss.DeepSets(pool)(x).tolist() for pool in ("mean", "sum", "max", "min")]
    [[[2.0, -1.0]], [[4.0, -2.0]], [[3.0, 0.0]], [[1.0, -2.0]]]
    """

    not_in_fingerprint: ClassVar[tuple[str, ...]] = ("in_dim",)

    def __init__(self, pool: str = "mean", in_dim: int | None = None) -> None:
        super().__init__()
        if pool not in POOLS:
            raise ConfigurationError(f"unknown pool {pool!r}: choose one of {', '.join(POOLS)}")
        self.pool, self.in_dim = pool, in_dim

    def configuration(self) -> dict[str, Any]:
        return {"pool": self.pool}

    def empty_accumulators(self, batch: int, device: torch.device, width: int | None = None) -> dict[str, Accumulator]:
        # Of width one where the width is not known yet, which fits any.
        shape = (batch, self.in_dim or width or 1)
        if self.pool in EXTREMA:
            kind = EXTREMA[self.pool]
            return {"pooled": kind(value=torch.full(shape, kind.nothing, device=device))}
        return {"pooled": LogSums.nothing(shape, (batch,), device)}

    def accumulate(self, context: Context, features: Tensor, mask: Tensor | None) -> dict[str, Accumulator]:
        features = features.to(torch.promote_types(features.dtype, torch.float32))
        hidden = None if mask is None else ~mask.unsqueeze(-1)
        if self.pool in EXTREMA:
            kind = EXTREMA[self.pool]
            features = features if hidden is None else features.masked_fill(hidden, kind.nothing)
            return {"pooled": kind(value=features.amax(1) if self.pool == "max" else features.amin(1))}
        dtype = accumulator_dtype(features.device)
        features = features if hidden is None else features.masked_fill(hidden, 0.0)
        mass = torch.full((features.shape[0],), features.shape[1], device=features.device) if mask is None else mask.sum(1)
        return {"pooled": LogSums.of_ones(features.sum(1, dtype=dtype), mass.to(dtype), features.dtype)}

    def finalize(self, state: State) -> Tensor:
        pooled = state.accumulators["pooled"]
        if self.pool in EXTREMA:
            value = pooled["value"]
            return value.masked_fill(align(state.count == 0, value), 0.0)
        sums = cast(LogSums, pooled)
        return sums.mean() if self.pool == "mean" else sums.true_sums()[0]

    def extra_repr(self) -> str:
        return self.pool
