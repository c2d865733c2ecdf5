"""Multi-head attention of queries over the real elements of a set, through torch's fused kernel.

    Multihead(Q, X) = [softmax(Q_h K_hᵀ / √(d/H)) V_h]_h Wo,     Q_h, K_h, V_h: heads of Q Wq, X Wk, X Wv

Scaled by the width of a head. A set without real elements gives zeros. Masked elements do not matter, even if they are NaN.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from setstream.errors import ConfigurationError, MaskError, ShapeError


def check_set(x: Tensor, dim: int, mask: Tensor | None, module: nn.Module) -> Tensor:
    """X (B, N, dim) with zeros where masked; an error that names the module if the shapes do not fit."""
    name = type(module).__name__
    if x.dim() != 3 or x.shape[-1] != dim:
        raise ShapeError(f"{name} takes sets of shape (B, N, {dim}); got {tuple(x.shape)}")
    if mask is None:
        return x
    if mask.dtype != torch.bool or mask.shape != x.shape[:2]:
        expected, got = tuple(x.shape[:2]), tuple(mask.shape)
        raise MaskError(f"{name} takes a bool mask {expected}, True for real elements; got {mask.dtype} {got}")
    return x.masked_fill(~mask.unsqueeze(-1), 0.0)


def check_heads(dim: int, heads: int) -> None:
    """Raise ConfigurationError unless heads divide dim."""
    if heads < 1 or dim % heads:
        raise ConfigurationError(f"heads must divide dim; got dim = {dim} and heads = {heads}")


class Attention(nn.Module):
    """Multi-head attention: queries (B, M, dim) over elements (B, N, dim) with an optional mask (B, N), to (B, M, dim)."""

    def __init__(self, dim: int, heads: int = 4) -> None:
        super().__init__()
        check_heads(dim, heads)
        self.heads = heads
        self.query, self.key, self.value, self.out = (nn.Linear(dim, dim) for _ in range(4))

    def forward(self, queries: Tensor, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Attend to `x`, which is zero where masked."""
        projected = (self.query(queries), self.key(x), self.value(x))
        q, k, v = (rows.unflatten(-1, (self.heads, -1)).transpose(1, 2) for rows in projected)
        if not x.shape[1]:
            return torch.zeros_like(queries)
        # Rows without any key would be 0/0: they attend to their (zeroed) padding instead, and the result is dropped.
        keys = None if mask is None else (mask | ~mask.any(1, keepdim=True))[:, None, None]  # (B, 1, 1, N)
        attended = self.out(F.scaled_dot_product_attention(q, k, v, attn_mask=keys).transpose(1, 2).flatten(2))
        return attended if mask is None else attended.masked_fill(~mask.any(1)[:, None, None], 0.0)
