"""A step of expectation maximisation as a pass over the points: it improves the mixture that earlier passes found::

    l_kn = log π_k + log N(x_n; μ_k, diag σ_k²)       π, μ, σ given; x_n the first D of the features
    q_kn = softmax over k of l_kn                     the slot-softmax activation
    w_k  = Σ_n q_kn
    μ_k' = (Σ_n q_kn x_n + τ μ_k) / (w_k + τ),        σ_k'² likewise,        π_k' ∝ w_k + τ π_k

The sums over the points merge like those of any attention, so sets may be read in chunks. The given mixture counts as τ points
per component: a component without points stays where it is, an empty set keeps its mixture, and a small set is not overfitted.
Points and means are taken relative to c = Σ_k π_k μ_k: the squares in l_kn and in σ_k'² then cancel as little far from the
origin as near it.

A step has no weights. In training mode it returns the mixture that it was given, so that the earlier passes are trained alone.
Training through the steps was worse: they move every component to the nearest optimum, and the gradient no longer says that a
cluster has none (docs/results/passes.md).
"""

from typing import NamedTuple
from typing import cast as typed

import torch
from torch import Tensor, nn

from setstream.errors import ConfigurationError, ShapeError
from setstream.models.encoder import SetEncoder
from setstream.models.model import SetModel
from setstream.pools import MultiPass, Projected
from setstream.pools.activations import ACTIVATIONS
from setstream.pools.base import Context, Pool, given_slots
from setstream.pools.keyed_attention import KeyedAttention
from setstream.states.accumulators import Accumulator, LogSums, accumulator_dtype
from setstream.states.state import State
from setstream.tasks.clustering.mixtures import DiagonalMixture

STRENGTH = 4.0  # τ: on points not seen, 4 is as good as 0.1 for sets of 1,024, and far better for sets of 16
SMALLEST_VARIANCE = 1e-4


def rows_of(mixture: DiagonalMixture) -> Tensor:
    """Mixtures as rows (B, K, 1 + 2 D): logit, mean, scale of each component."""
    return torch.cat([mixture.logits.unsqueeze(-1), mixture.means, mixture.scales], dim=-1)


def parameters(rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Logits (B, K), means and scales (B, K, D) of rows (B, K, 1 + 2 D)."""
    dim = rows.shape[-1] // 2
    logits, means, scales = rows.split([1, dim, dim], dim=-1)
    return logits.squeeze(-1), means, scales


class Given(NamedTuple):
    """The mixtures that a step begins with: logits (B, K), means and precisions (B, K, D), centre c (B, 1, D)."""

    logits: Tensor
    means: Tensor  #: relative to c
    precisions: Tensor
    centre: Tensor


class EMStep(KeyedAttention):
    """Mixtures as rows (B, K, 1 + 2 D), given as slots, to those after a step of EM.

    The first D columns of the features (B, N, in_dim) are the points.
    """

    takes_slots = True
    activation = ACTIVATIONS["slot-softmax"]

    def __init__(self, in_dim: int, clusters: int, dim: int) -> None:
        super().__init__(in_dim, 2 * dim + 1, clusters)
        self.dim, self.slot_dim = dim, 2 * dim + 1

    def prepare(self, state: State) -> Context:
        return super().prepare(state) | {"centre": self._given(state).centre}

    def queries(self, state: State) -> Tensor:
        logits, means, precisions, _ = self._given(state)
        constants = logits.log_softmax(-1) + 0.5 * (precisions.log() - means.square() * precisions).sum(-1)
        return torch.cat([means * precisions, -0.5 * precisions, constants.unsqueeze(-1)], dim=-1)

    def empty_accumulators(self, batch: int, device: torch.device, width: int | None = None) -> dict[str, Accumulator]:
        slots = (batch, 1, self.branches)
        return {"pooled": LogSums.nothing((*slots, 2 * self.dim), slots, device)}

    def finalize(self, state: State) -> Tensor:
        if self.training:
            return typed(Tensor, given_slots(state))
        logits, means, precisions, centre = self._given(state)
        sums, weights = (some.squeeze(1) for some in typed(LogSums, state.accumulators["pooled"]).true_sums())
        first, second = sums.split(self.dim, dim=-1)
        points = (weights + STRENGTH).unsqueeze(-1)
        new = (first + STRENGTH * means) / points
        variances = (second + STRENGTH * (precisions.reciprocal() + means.square())) / points - new.square()
        shares = (weights + STRENGTH * logits.softmax(-1)).clamp(min=torch.finfo(weights.dtype).tiny).log()  # finite
        return torch.cat([shares.unsqueeze(-1), new + centre, variances.clamp(min=SMALLEST_VARIANCE).sqrt()], dim=-1)

    def _given(self, state: State) -> Given:
        given = given_slots(state)
        if given is None:
            raise ConfigurationError("EMStep improves a mixture that an earlier pass found: it cannot be the first pass")
        if given.shape[1:] != (self.branches, self.slot_dim):
            raise ShapeError(
                f"this EMStep takes mixtures of {self.branches} components as rows (B, {self.branches}, {self.slot_dim}); got "
                f"{tuple(given.shape)} from the earlier pass. Give refined() the model's numbers of clusters and dimensions"
            )
        logits, means, scales = parameters(given.to(accumulator_dtype(given.device)))
        centre = (logits.softmax(-1).unsqueeze(-1) * means).sum(1, keepdim=True).detach()  # the result does not depend on it
        return Given(logits, means - centre, scales.square().reciprocal(), centre)

    def _common(self, context: Context, features: Tensor) -> tuple[Tensor, Tensor]:
        """The queries, and the points relative to the centre; in float64 where there is one: a mixture is only some numbers."""
        dtype = accumulator_dtype(features.device)
        return context["queries"].to(dtype), features[..., : self.dim].to(dtype) - context["centre"]

    def _project(self, points: Tensor) -> tuple[Tensor, Tensor]:
        values = torch.cat([points, points.square()], dim=-1)
        return torch.cat([values, torch.ones_like(points[..., :1])], dim=-1).mT, values


class Beside(nn.Module):
    """[x, module(x)]: features with the elements themselves before them."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([x, self.module(x)], dim=-1)


class Without(nn.Module):
    """Features without the first `count` of them: `out_features` are left."""

    def __init__(self, count: int, out_features: int) -> None:
        super().__init__()
        self.count, self.out_features = count, out_features

    def forward(self, features: Tensor) -> Tensor:
        return features[..., self.count :]


class ToRows(nn.Module):
    """A head whose mixtures are returned as rows, for `EMStep`."""

    def __init__(self, head: nn.Module) -> None:
        super().__init__()
        self.head = head

    def forward(self, z: Tensor) -> Tensor:
        return rows_of(self.head(z))


class FromRows(nn.Module):
    """Mixtures of rows."""

    def forward(self, rows: Tensor) -> DiagonalMixture:
        return DiagonalMixture(*parameters(rows))


def refined(model: SetModel, steps: int = 2, clusters: int = 4, dim: int = 2) -> SetModel:
    """A model with `steps` more passes over the points, each a step of EM. It shares the weights of `model`.

    >>> from setstream.tasks.clustering import pretrained, sample
    >>> model, drawn = pretrained("umbc+set-transformer"), sample(50, 1000, generator=torch.Generator().manual_seed(0))
    >>> better = refined(model, steps=2)
    >>> better.encoder.passes
    3
    >>> bool(better(drawn.points).nll(drawn.points).mean() < model(drawn.points).nll(drawn.points).mean() - 0.1)
    True
    """
    if steps < 1:
        raise ConfigurationError(f"refined() adds at least one step of EM; got steps = {steps}")
    encoder, pool = model.encoder, model.encoder.pool
    pools, between = ([*pool.pools], [*pool.between]) if isinstance(pool, MultiPass) else ([pool], [])
    if len(pools) != pool.passes or len(between) != len(pools) - 1:
        raise ConfigurationError(
            "refined() takes a pool of one pass, or a MultiPass with a pool for each pass and modules between"
        )
    with torch.no_grad():
        width = encoder.features(torch.zeros(1, dim, device=encoder.device), known=True).shape[-1]
    earlier = [Projected(Without(dim, width), typed(Pool, one), dim + width) for one in pools]
    later = [EMStep(dim + width, clusters, dim) for _ in range(steps)]
    between += [ToRows(model.head), *(nn.Identity() for _ in range(steps - 1))]
    return SetModel(SetEncoder(Beside(encoder.phi), MultiPass([*earlier, *later], between)), FromRows()).train(model.training)
