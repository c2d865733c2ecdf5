"""Gated attention (AB-MIL) as a pool: its weights need one element at a time, and its sums merge::

    l_j = w · (tanh(V h_j) ⊙ σ(U h_j))          h_j (in_dim,) features; V, U (hidden, in_dim); w (hidden,), one for each branch
    z   = Σ_j e^(l_j) h_j / Σ_j e^(l_j)         (branches, in_dim); without the gate: l_j = w · tanh(V h_j)

Ilse et al., "Attention-based Deep Multiple Instance Learning", ICML 2018. The bias of the scores shifts all l_j alike, which
leaves z the same: there is none.
"""

from typing import Any

import torch
from torch import Tensor, nn

from setstream.pools.base import Context
from setstream.pools.kernels.block_sums import block_sums
from setstream.pools.keyed_attention import KeyedAttention
from setstream.states.accumulators import Accumulator
from setstream.states.state import State


class GatedAttention(KeyedAttention):
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

    def __init__(self, in_dim: int, hidden: int = 128, branches: int = 1, gated: bool = True) -> None:
        super().__init__(in_dim, hidden, branches)
        self.content = nn.Sequential(nn.Linear(in_dim, hidden), nn.Tanh())
        self.gate = nn.Sequential(nn.Linear(in_dim, hidden), nn.Sigmoid()) if gated else None
        self.score = nn.Linear(hidden, branches, bias=False)
        self.register_load_state_dict_pre_hook(rename_hook)

    def keys(self, features: Tensor) -> Tensor:
        content: Tensor = self.content(features)
        return content if self.gate is None else content * self.gate(features)

    def queries(self, state: State) -> Tensor:
        return self.score.weight.unsqueeze(0)

    def accumulate(self, context: Context, features: Tensor, mask: Tensor | None) -> dict[str, Accumulator]:
        """A caller that has computed the `logits` of these features puts them into the context: they are most of the work."""
        if (logits := context.get("logits")) is None:
            return super().accumulate(context, features, mask)
        with torch.autocast(features.device.type, enabled=False):
            features, slots = features.to(logits.dtype), (len(features), 1, self.branches)
            branch = torch.eye(self.branches, dtype=logits.dtype, device=logits.device).expand(len(features), -1, -1)
            return {"pooled": block_sums(branch, logits, features, None, self.activation, slots, mask)}

    def logits(self, features: Tensor) -> Tensor:
        """The logits (B, branches, n) of features (B, n, in_dim): attention is their softmax over the set."""
        with torch.autocast(features.device.type, enabled=False):
            query = self.score.weight.to(torch.promote_types(self.score.weight.dtype, torch.float32))
            keys = self.keys(features.to(self.score.weight.dtype))
            return (keys.to(query.dtype) @ query.T).mT

    @staticmethod
    def rename_weights(weights: dict[str, Any], prefix: str) -> None:
        """Weights of `ss.nn.GatedAttention`, alone or in a `ChunkMean`, load into this pool."""
        for key in [key for key in weights if key.startswith(f"{prefix}module.")]:
            weights[prefix + key.removeprefix(f"{prefix}module.")] = weights.pop(key)
        weights.pop(f"{prefix}score.bias", None)

    def extra_repr(self) -> str:
        return f"{self.in_dim}, hidden={self.hidden}, branches={self.branches}, gated={self.gate is not None}"


def rename_hook(module: Any, weights: dict[str, Any], prefix: str, *_: Any) -> None:
    """Rename weights of an earlier version when they are loaded."""
    module.rename_weights(weights, prefix)
