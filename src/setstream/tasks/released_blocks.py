"""Attention blocks in the form of the published experiments of UMBC, which differs from `setstream.nn`.

    MAB(X, Y) = LN(H + ReLU(H Wo)),   H = LN(Q + Attend(Q, Y Wk, Y Wv)),   Q = X Wq          LN optional

The residual connection takes the *projected* queries, and attention has no output projection, so X and Y may have other widths
than the result.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from setstream.nn.attention import check_heads


class MAB(nn.Module):
    """Rows x (B, M, x_dim) attend to a set y (B, N, y_dim): (B, M, dim)."""

    def __init__(self, x_dim: int, y_dim: int, dim: int, heads: int, *, layer_norm: bool) -> None:
        super().__init__()
        check_heads(dim, heads)
        self.heads = heads
        self.query, self.key, self.value = nn.Linear(x_dim, dim), nn.Linear(y_dim, dim), nn.Linear(y_dim, dim)
        self.out = nn.Linear(dim, dim)
        self.norm1 = nn.LayerNorm(dim) if layer_norm else nn.Identity()
        self.norm2 = nn.LayerNorm(dim) if layer_norm else nn.Identity()

    def forward(self, x: Tensor, y: Tensor, mask: Tensor | None = None) -> Tensor:
        queries = self.query(x)
        q, k, v = (rows.unflatten(-1, (self.heads, -1)).transpose(1, 2) for rows in (queries, self.key(y), self.value(y)))
        attended = F.scaled_dot_product_attention(q, k, v, attn_mask=None if mask is None else mask[:, None, None])
        h = self.norm1(queries + attended.transpose(1, 2).flatten(2))
        return self.norm2(h + F.relu(self.out(h)))


class SAB(nn.Module):
    """Every row attends to all rows: (B, N, dim) to (B, N, dim)."""

    def __init__(self, dim: int, heads: int, *, layer_norm: bool) -> None:
        super().__init__()
        self.block = MAB(dim, dim, dim, heads, layer_norm=layer_norm)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return self.block(x, x, mask)


class PMA(nn.Module):
    """Learned seeds attend to the set: (B, N, in_dim) to (B, num_seeds, dim)."""

    def __init__(self, in_dim: int, dim: int, heads: int, num_seeds: int, *, layer_norm: bool) -> None:
        super().__init__()
        self.seeds = nn.Parameter(nn.init.xavier_uniform_(torch.empty(num_seeds, dim)))
        self.block = MAB(dim, in_dim, dim, heads, layer_norm=layer_norm)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return self.block(self.seeds.expand(len(x), -1, -1), x, mask)


class ISAB(nn.Module):
    """Inducing points attend to the set, and every row to them: (B, N, in_dim) to (B, N, dim)."""

    def __init__(self, in_dim: int, dim: int, heads: int, num_inducing: int, *, layer_norm: bool) -> None:
        super().__init__()
        self.gather = PMA(in_dim, dim, heads, num_inducing, layer_norm=layer_norm)
        self.spread = MAB(in_dim, dim, dim, heads, layer_norm=layer_norm)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return self.spread(x, self.gather(x, mask))
