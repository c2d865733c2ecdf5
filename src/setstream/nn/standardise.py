"""Features in units of their own spread, learned in one pass over sets of any size::

    y = (x - μ) / σ                       feature by feature; μ, σ: mean and deviation over all elements of all sets

    n = n_a + n_b,   μ = μ_a + (μ_b - μ_a) n_b / n,   M = M_a + M_b + (μ_b - μ_a)² n_a n_b / n,   σ² = M / n     (Chan et al.)

A state of three sums per feature, merged chunk by chunk in float64: no set is in memory.
"""

from collections.abc import Iterable
from typing import Self

import numpy as np
import torch
from torch import Tensor, nn

from setstream.errors import NonFiniteError, ShapeError, wrong_width
from setstream.sets.partition import runs
from setstream.sets.source import ArraySource, SetSource


class Standardise(nn.Module):
    """(x - mean) / scale, feature by feature: the first layer of a phi for features in different units.

    >>> sets = [torch.randn(50, 2) * torch.tensor([1000.0, 0.01]), torch.randn(7, 2)]
    >>> phi = torch.nn.Sequential(ss.nn.Standardise(2).fit(sets), torch.nn.Linear(2, 16), torch.nn.ReLU())
    >>> torch.allclose(phi[0](torch.cat(sets)).std(0, correction=0), torch.ones(2), atol=1e-4)
    True
    """

    def __init__(self, in_dim: int) -> None:
        super().__init__()
        self.in_features = in_dim
        self.mean, self.scale = nn.Buffer(torch.zeros(in_dim)), nn.Buffer(torch.ones(in_dim))

    @property
    def out_features(self) -> int:
        return len(self.mean)

    def expand(self, x: Tensor) -> Tensor:
        """The numbers that are standardised: elements themselves. NaN are left out of mean and scale."""
        return x

    def fill_missing(self, x: Tensor) -> Tensor:
        """Elements with a number in place of each NaN that this layer takes as a missing value; here, none is."""
        return x

    @torch.no_grad()
    def fit(self, sets: Iterable[SetSource | Tensor | np.ndarray], chunk_size: int = 1024) -> Self:
        """Take mean and scale from sets: sources, tensors or arrays (N, in_dim), of any size. They are weights from then on."""
        sources = [one if isinstance(one, SetSource) else ArraySource(one) for one in sets]
        for number, one in enumerate(sources):
            if tuple(one.shape) != (self.in_features,):
                raise ShapeError(wrong_width("Standardise", self.in_features, f"those of set {number}", tuple(one.shape)))
        if not any(map(len, sources)):
            raise ShapeError(f"mean and scale need elements; the {len(sources)} given sets have none")
        count, mean, moment = torch.zeros(3, len(self.mean), dtype=torch.float64)
        finite = True
        for run in runs(map(len, sources), chunk_size):  # small sets together, large ones in chunks
            for start in range(0, max(map(len, sources[run])), chunk_size):
                chunk = torch.cat([one.read(start, min(start + chunk_size, len(one))).cpu().double() for one in sources[run]])
                finite = finite and bool(torch.isfinite(self.fill_missing(chunk)).all())
                values = self.expand(chunk)
                known = ~values.isnan()
                added = known.sum(0)
                total, centre = count + added, values.where(known, 0.0).sum(0) / added.clamp(min=1)
                share, apart = added / total.clamp(min=1), centre - mean
                mean = mean + apart * share
                moment = moment + (values - centre).where(known, 0.0).square().sum(0) + apart.square() * (count * share)
                count = total
        if not (finite and bool(torch.isfinite(moment).all())):
            raise NonFiniteError("the sets hold NaN or infinity, or numbers so large that their squares are infinite")
        scale = (moment / count.clamp(min=1)).sqrt()
        varies = (scale > 1e-7 * mean.abs()) & (scale > torch.finfo(torch.float32).tiny)
        self.mean.copy_(mean)
        self.scale.copy_(torch.where(varies, scale, 1.0))
        return self

    def forward(self, x: Tensor) -> Tensor:
        return (x - self.mean) / self.scale

    def extra_repr(self) -> str:
        return str(self.in_features)
