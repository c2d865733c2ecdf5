"""Sets of points drawn from mixtures of Gaussians, and the likelihood of such mixtures.

    π ~ Dirichlet(1),  μ_k ~ U(-4, 4),  σ_k ~ U(low, high)           one mixture per set, K components in D dimensions
    x_j ~ Σ_k π_k N(μ_k, diag σ_k²)

`released`: σ ~ U(0.1, 0.6), as in the paper's published code. `text`: σ ~ U(0.3, 0.6), as in its appendix, with set sizes
between half of the given number and all of it.
"""

import math
from typing import NamedTuple

import torch
from torch import Generator, Tensor
from torch.distributions import Categorical, Independent, MixtureSameFamily, Normal

from setstream.errors import ConfigurationError
from setstream.gradients.streamed_loss import streamed_loss

SCALES = {"released": (0.1, 0.6), "text": (0.3, 0.6)}
STREAMED_FROM = 16_384  # sets larger than this have their likelihood streamed, in chunks of this size


def log_likelihood(logits: Tensor, means: Tensor, scales: Tensor, x: Tensor) -> Tensor:
    """log Σ_k π_k N(x; μ_k, diag σ_k²) of points x (B, N, D): (B, N). logits (B, K), means and scales (B, K, D)."""
    distance = (x.unsqueeze(2) - means.unsqueeze(1)) / scales.unsqueeze(1)  # (B, N, K, D)
    constant = logits.log_softmax(-1) - scales.log().sum(-1) - 0.5 * x.shape[-1] * math.log(2 * math.pi)  # (B, K)
    return (constant.unsqueeze(1) - 0.5 * distance.square().sum(-1)).logsumexp(-1)


class DiagonalMixture(MixtureSameFamily):
    """One mixture of diagonal Gaussians for each of B sets: batch shape (B, 1), so that log_prob takes points (B, N, D).

    >>> mixture = DiagonalMixture(torch.zeros(3, 4), torch.randn(3, 4, 2), torch.ones(3, 4, 2))
    >>> mixture.log_prob(torch.randn(3, 100, 2)).shape
    torch.Size([3, 100])
    """

    def __init__(self, logits: Tensor, means: Tensor, scales: Tensor) -> None:
        self.logits, self.means, self.scales = logits, means, scales
        components = Independent(Normal(means.unsqueeze(1), scales.unsqueeze(1), validate_args=False), 1, validate_args=False)
        super().__init__(Categorical(logits=logits.unsqueeze(1), validate_args=False), components, validate_args=False)

    def log_prob(self, value: Tensor) -> Tensor:
        return log_likelihood(self.logits, self.means, self.scales, value)

    def named(self) -> dict[str, Tensor]:
        """The parameters of each set's mixture: weights (B, K), means and scales (B, K, D)."""
        return {"weights": self.logits.softmax(-1), "means": self.means, "scales": self.scales}

    def flat(self) -> Tensor:
        """All parameters of each set's mixture as one row: weights, means, scales."""
        return torch.cat([parameter.flatten(1) for parameter in self.named().values()], dim=1)

    def nll(self, points: Tensor) -> Tensor:
        """The mean negative log-likelihood of each set's points (B, N, D): (B,), streamed where N is large."""
        if points.shape[1] <= STREAMED_FROM:
            return -self.log_prob(points).mean(1)
        parameters = [self.logits, self.means, self.scales]  # the loss gets them, a chunk and its mask
        return streamed_loss(lambda *given: -log_likelihood(*given[:-1]), points, parameters, chunk_size=STREAMED_FROM)


class Sample(NamedTuple):
    """Points (B, N, D), the component (B, N) of each, and the mixtures that they were drawn from."""

    points: Tensor
    labels: Tensor
    truth: DiagonalMixture

    def oracle(self) -> Tensor:
        """The NLL (B,) of the points under the true parameters."""
        return self.truth.nll(self.points)


def sample(
    sets: int, points: int, *, clusters: int = 4, dim: int = 2, variant: str = "released", generator: Generator | None = None
) -> Sample:
    """Draw sets of points, each set from another mixture.

    >>> drawn = sample(2, 100, generator=torch.Generator().manual_seed(0))
    >>> drawn.points.shape, drawn.labels.shape
    (torch.Size([2, 100, 2]), torch.Size([2, 100]))
    """
    if variant not in SCALES:
        raise ConfigurationError(f"unknown variant {variant!r} of the mixtures: choose one of {', '.join(SCALES)}")
    if min(sets, points, clusters, dim) < 1:
        raise ConfigurationError(f"sets, points, clusters and dim must be at least 1; got {sets}, {points}, {clusters}, {dim}")
    low, high = SCALES[variant]
    weights = torch.empty(sets, clusters).exponential_(generator=generator)  # normalised: a flat Dirichlet
    weights = weights / weights.sum(1, keepdim=True)
    means = torch.rand(sets, clusters, dim, generator=generator) * 8 - 4
    scales = torch.rand(sets, clusters, dim, generator=generator) * (high - low) + low
    labels = torch.multinomial(weights, points, replacement=True, generator=generator)
    index = labels.unsqueeze(-1).expand(-1, -1, dim)
    noise = torch.randn(sets, points, dim, generator=generator)
    drawn = torch.addcmul(means.gather(1, index), scales.gather(1, index), noise)
    return Sample(drawn, labels, DiagonalMixture(weights.log(), means, scales))
