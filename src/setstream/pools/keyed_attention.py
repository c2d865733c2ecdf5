"""The base of attention with keys from a network, whose sums merge like those of UMBC::

    l_rj = q_r · k(h_j)                         h_j (in_dim,) features; k: a network; q_r (hidden,) query of branch r
    z_r  = Σ_j e^(l_rj) h_j / Σ_j e^(l_rj)      (branches, in_dim)

An empty set gives zeros.
"""

from typing import cast as typed

import torch
from torch import Tensor

from setstream.errors import ConfigurationError
from setstream.pools.activations import ACTIVATIONS
from setstream.pools.base import Context, Pool, parameter_dtype
from setstream.pools.kernels.block_sums import log_weights
from setstream.pools.kernels.weighted_sums import weighted_sums
from setstream.states.accumulators import Accumulator, LogSums
from setstream.states.state import State


class KeyedAttention(Pool):
    """Attention of `branches` queries to the features: (B, N, in_dim) to (B, branches, in_dim), in any chunks.

    A subclass has the modules behind `keys` and `queries`, and may have another activation than softmax.
    """

    sums_only = True  # 0 · ∞ and ∞ - ∞ are NaN
    activation = ACTIVATIONS["softmax"]

    def __init__(self, in_dim: int, hidden: int, branches: int) -> None:
        super().__init__()
        for name, value in {"in_dim": in_dim, "hidden": hidden, "branches": branches}.items():
            if value < 1:
                raise ConfigurationError(f"{name} must be at least 1; got {value}")
        self.in_dim, self.hidden, self.branches = in_dim, hidden, branches

    def keys(self, features: Tensor) -> Tensor:
        """The keys (b, n, hidden) of features (b, n, in_dim), which are in the type of the parameters."""
        raise NotImplementedError

    def queries(self, state: State) -> Tensor:
        """The queries (B or 1, branches, hidden)."""
        raise NotImplementedError

    @property
    def width(self) -> int:
        return max(self.in_dim or 1, 2 * self.hidden)

    def empty_accumulators(self, batch: int, device: torch.device, width: int | None = None) -> dict[str, Accumulator]:
        slots = (batch, 1, self.branches)
        return {"pooled": LogSums.nothing((*slots, self.in_dim or 1), slots, device)}

    def prepare(self, state: State) -> Context:
        with torch.autocast(state.device.type, enabled=False):
            queries = self.queries(state).unsqueeze(1)
            return {"queries": queries.to(torch.promote_types(queries.dtype, torch.float32))}

    def accumulate(self, context: Context, features: Tensor, mask: Tensor | None) -> dict[str, Accumulator]:
        with torch.autocast(features.device.type, enabled=False):
            queries, features = self._common(context, features)
            return {"pooled": weighted_sums(queries, features, self._project, None, self.activation, (1, self.branches), mask)}

    def finalize(self, state: State) -> Tensor:
        return typed(LogSums, state.accumulators["pooled"]).mean().squeeze(1)

    def attention(self, features: Tensor, state: State, mask: Tensor | None = None) -> Tensor:
        """Weights (B, 1, branches, n) of a chunk's features (B, n, in_dim) against a finished state, zero where masked."""
        batch = len(features)
        if not features.shape[1]:
            return features.new_zeros(batch, 1, self.branches, 0)
        with torch.autocast(features.device.type, enabled=False):
            queries, features = self._common(self.prepare(state), features)
            queries = queries.expand(batch, *queries.shape[1:]).flatten(0, 1)
            keys = self._project(features)[0]
            weights, shift, _ = log_weights(queries, keys, None, self.activation, (batch, 1, self.branches), mask)
        return typed(LogSums, state.accumulators["pooled"]).shares(weights, shift)

    def _common(self, context: Context, features: Tensor) -> tuple[Tensor, Tensor]:
        """Queries and features in one floating-point type: the wider of the two, float32 at least."""
        dtype = torch.promote_types(context["queries"].dtype, features.dtype)
        return context["queries"].to(dtype), features.to(dtype)

    def _project(self, features: Tensor) -> tuple[Tensor, Tensor]:
        """Keys (b, hidden, n) and values (b, n, in_dim)."""
        keys = self.keys(features.to(parameter_dtype(self) or features.dtype))
        return keys.to(features.dtype).mT, features
