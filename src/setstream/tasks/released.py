"""What the released models of several tasks share: one layer for UMBC and SSE, and the attention blocks.

    MAB(X, Y) = LN(H + ReLU(H Wo)),   H = LN(Q + Attend(Q, Y Wk, Y Wv)),   Q = X Wq          LN optional
    SAB(X) = MAB(X, X),   ISAB(X) = MAB(X, MAB(I, X)),   PMA(X) = MAB(S, X)

They are not those of `setstream.nn`: the residual connection takes the *projected* queries, and attention has no output
projection, so widths of X and Y are free. Willette et al., ICML 2023, published code; docs/recipes.md lists all differences.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from setstream.pools import UMBC
from setstream.states.state import State

#: UMBC and SSE are one layer in the release, with these options. Some tasks add the slots to the result.
LAYER: dict[str, Any] = {"slots": "gaussian", "eval_slots": "mean", "shared_draw": True, "slot_norm": False}
LAYER |= {"query_bias": True, "norm_after": True}
ONE_SLOT: dict[str, Any] = {"num_slots": 1, "activation": "slot-sigmoid", "normalise": True}  # of SSE: all weights are equal


class NormedSlots(UMBC):
    """UMBC with a layer norm on its slots, before their projection."""

    def __init__(self, *sizes: int, **options: Any) -> None:
        super().__init__(*sizes, **(LAYER | options))
        self.slots_norm = nn.LayerNorm(self.slot_dim)

    def own_slots(self, state: State) -> Tensor:
        slots: Tensor = self.slots_norm(super().own_slots(state))
        return slots


class MAB(nn.Module):
    """Rows x (B, M, x_dim) attend to a set y (B, N, y_dim) with an optional mask (B, N): (B, M, dim)."""

    def __init__(self, x_dim: int, y_dim: int, dim: int, heads: int, *, layer_norm: bool = True) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value = nn.Linear(x_dim, dim), nn.Linear(y_dim, dim), nn.Linear(y_dim, dim)
        self.out = nn.Linear(dim, dim)
        self.norm1, self.norm2 = (nn.LayerNorm(dim) if layer_norm else nn.Identity() for _ in range(2))

    def forward(self, x: Tensor, y: Tensor, mask: Tensor | None = None) -> Tensor:
        queries = self.query(x)
        q, k, v = (rows.unflatten(-1, (self.heads, -1)).transpose(1, 2) for rows in (queries, self.key(y), self.value(y)))
        attended = F.scaled_dot_product_attention(q, k, v, attn_mask=None if mask is None else mask[:, None, None])
        h = self.norm1(queries + attended.transpose(1, 2).flatten(2))
        return self.norm2(h + F.relu(self.out(h)))


class SAB(nn.Module):
    """Every row attends to all rows: (B, N, dim) to (B, N, dim)."""

    def __init__(self, dim: int, heads: int, *, layer_norm: bool = True) -> None:
        super().__init__()
        self.block = MAB(dim, dim, dim, heads, layer_norm=layer_norm)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return self.block(x, x, mask)


class PMA(nn.Module):
    """Learned seeds attend to the set: (B, N, in_dim) to (B, num_seeds, dim)."""

    def __init__(self, in_dim: int, dim: int, heads: int, num_seeds: int) -> None:
        super().__init__()
        self.seeds = nn.Parameter(nn.init.xavier_uniform_(torch.empty(num_seeds, dim)))
        self.block = MAB(dim, in_dim, dim, heads)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return self.block(self.seeds.expand(len(x), -1, -1), x, mask)


class ISAB(nn.Module):
    """Inducing points attend to the set, and every row to them: (B, N, in_dim) to (B, N, dim)."""

    def __init__(self, in_dim: int, dim: int, heads: int, num_inducing: int) -> None:
        super().__init__()
        self.gather, self.spread = PMA(in_dim, dim, heads, num_inducing), MAB(in_dim, dim, dim, heads)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return self.spread(x, self.gather(x, mask))
