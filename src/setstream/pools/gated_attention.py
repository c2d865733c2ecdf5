"""Gated attention (AB-MIL) as a pool: its weights need one element at a time, and its sums merge::

    l_j = w · (tanh(V h_j) ⊙ σ(U h_j))          h_j (in_dim,) features; V, U (hidden, in_dim); w (hidden,), one for each branch
    z   = Σ_j e^(l_j) h_j / Σ_j e^(l_j)         (branches, in_dim); without the gate: l_j = w · tanh(V h_j)

Ilse et al., "Attention-based Deep Multiple Instance Learning", ICML 2018. The bias of the scores shifts all l_j alike, which
leaves z the same: there is none.
"""

from typing import Any
from typing import cast as typed

import torch
from torch import Tensor, nn

from setstream.errors import ConfigurationError
from setstream.pools.activations import ACTIVATIONS
from setstream.pools.base import Context, Pool
from setstream.pools.kernels.block_sums import log_weights
from setstream.pools.kernels.weighted_sums import weighted_sums
from setstream.states.accumulators import Accumulator, LogSums
from setstream.states.state import State

SOFTMAX = ACTIVATIONS["softmax"]


class GatedAttention(Pool):
    """Gated attention pooling: (B, N, in_dim) to (B, branches, in_dim), in any chunks.

    Args:
        in_dim: The width of the features.
        hidden: The width of the attention network.
        branches: How many attention distributions there are, as in ACMIL and in CLAM with several branches.
        gated: Multiply by a sigmoid gate.

    Example:
        >>> import torch, setstream as ss
        >>> pool = ss.GatedAttention(16, hidden=8)
        >>> pool(torch.randn(2, 100, 16)).shape
        torch.Size([2, 1, 16])
    """

    sums_only = True  # 0 · ∞ and ∞ - ∞ are NaN

    def __init__(self, in_dim: int, hidden: int = 128, branches: int = 1, gated: bool = True) -> None:
        super().__init__()
        for name, value in {"in_dim": in_dim, "hidden": hidden, "branches": branches}.items():
            if value < 1:
                raise ConfigurationError(f"{name} must be at least 1; got {value}")
        self.in_dim, self.hidden, self.branches = in_dim, hidden, branches
        self.content = nn.Sequential(nn.Linear(in_dim, hidden), nn.Tanh())
        self.gate = nn.Sequential(nn.Linear(in_dim, hidden), nn.Sigmoid()) if gated else None
        self.score = nn.Linear(hidden, branches, bias=False)
        self.register_load_state_dict_pre_hook(_rename)

    @property
    def width(self) -> int:
        return max(self.in_dim or 1, 2 * self.hidden)

    def empty_accumulators(self, batch: int, device: torch.device, width: int | None = None) -> dict[str, Accumulator]:
        slots = (batch, 1, self.branches)
        return {"pooled": LogSums.nothing((*slots, self.in_dim or 1), slots, device)}

    def accumulate(self, context: Context, features: Tensor, mask: Tensor | None) -> dict[str, Accumulator]:
        with torch.autocast(features.device.type, enabled=False):
            queries, features = self._queries(), features.to(self._dtype(features))
            return {"pooled": weighted_sums(queries, features, self._project, None, SOFTMAX, (1, self.branches), mask)}

    def finalize(self, state: State) -> Tensor:
        return typed(LogSums, state.accumulators["pooled"]).mean().squeeze(1)

    def attention(self, features: Tensor, state: State, mask: Tensor | None = None) -> Tensor:
        """Weights (B, 1, branches, n) of a chunk's features (B, n, in_dim) against a finished state, zero where masked."""
        batch = len(features)
        if not features.shape[1]:
            return features.new_zeros(batch, 1, self.branches, 0)
        queries, features = self._queries(), features.to(self._dtype(features))
        keys = self._project(features)[0]
        weights, shift, _ = log_weights(
            queries.expand(batch, *queries.shape[1:]).flatten(0, 1), keys, None, SOFTMAX, (batch, 1, self.branches), mask
        )
        return typed(LogSums, state.accumulators["pooled"]).shares(weights, shift)

    def _dtype(self, features: Tensor) -> torch.dtype:
        return torch.promote_types(self.score.weight.dtype, torch.promote_types(features.dtype, torch.float32))

    def _queries(self) -> Tensor:
        """The scores' weights (1, 1, branches, hidden), in float32 at least."""
        return self.score.weight.to(torch.promote_types(self.score.weight.dtype, torch.float32))[None, None]

    def _project(self, features: Tensor) -> tuple[Tensor, Tensor]:
        """Keys (b, hidden, n) and values (b, n, in_dim)."""
        h = features.to(self.score.weight.dtype)
        keys = self.content(h) if self.gate is None else self.content(h) * self.gate(h)
        return keys.to(features.dtype).mT, features

    @staticmethod
    def rename_weights(weights: dict[str, Any], prefix: str) -> None:
        """Weights of `ss.nn.GatedAttention`, alone or in a `ChunkMean`, load into this pool."""
        for key in [key for key in weights if key.startswith(f"{prefix}module.")]:
            weights[prefix + key.removeprefix(f"{prefix}module.")] = weights.pop(key)
        weights.pop(f"{prefix}score.bias", None)

    def extra_repr(self) -> str:
        return f"{self.in_dim}, hidden={self.hidden}, branches={self.branches}, gated={self.gate is not None}"


def _rename(module: nn.Module, weights: dict[str, Any], prefix: str, *_: Any) -> None:
    GatedAttention.rename_weights(weights, prefix)
