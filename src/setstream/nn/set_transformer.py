"""The blocks of the Set Transformer, and the whole::

    Multihead(Q, X) = [softmax(Q_h K_hᵀ / √(d/H)) V_h]_h Wo                 Q_h, K_h, V_h: heads of Q Wq, X Wk, X Wv
    MAB(X, Y)  = LN(H + ReLU(H W)),   H = LN(X + Multihead(X, Y))           LN optional
    SAB(X)     = MAB(X, X)                                                  every element sees every other: O(N²)
    ISAB(X)    = MAB(X, MAB(I, X))                                          through m inducing points I: O(N m)
    PMA(X)     = MAB(S, X)                                                  k seeds S attend to the set
    SetTransformer(X) = W · SAB(... PMA(SAB(... X)))

Lee et al., "Set Transformer: A Framework for Attention-based Permutation-Invariant Neural Networks", ICML 2019.
These need their whole input, so use them after a pool, on its few slots. Attention to a set without real elements gives zeros.
Masked elements do not matter, even if they are NaN.
"""

from functools import partial

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


class Attention(nn.Module):
    """Multi-head attention: queries (B, M, dim) over elements (B, N, dim) with an optional mask (B, N), to (B, M, dim)."""

    def __init__(self, dim: int, heads: int = 4) -> None:
        super().__init__()
        if heads < 1 or dim % heads:
            raise ConfigurationError(f"heads must divide dim; got dim = {dim} and heads = {heads}")
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


class MAB(nn.Module):
    """Multihead attention block: rows x (B, M, dim) look at the set y (B, N, dim), which the mask belongs to; None: at x.

    >>> ss.nn.MAB(16)(torch.randn(2, 3, 16), torch.randn(2, 10, 16)).shape
    torch.Size([2, 3, 16])
    """

    def __init__(self, dim: int, heads: int = 4, *, layer_norm: bool = False) -> None:
        super().__init__()
        self.dim = dim
        self.attention = Attention(dim, heads)
        self.feed_forward = nn.Sequential(nn.Linear(dim, dim), nn.ReLU())
        self.norm1, self.norm2 = (nn.LayerNorm(dim) if layer_norm else nn.Identity() for _ in range(2))

    def forward(self, x: Tensor, y: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
        y = check_set(x if y is None else y, self.dim, mask, self)
        h = self.norm1(x + self.attention(x, y, mask))
        return self.norm2(h + self.feed_forward(h))


class SAB(nn.Module):
    """Set attention block: (B, N, dim) to (B, N, dim), zero where masked.

    >>> ss.nn.SAB(16)(torch.randn(2, 10, 16)).shape
    torch.Size([2, 10, 16])
    """

    def __init__(self, dim: int, heads: int = 4, *, layer_norm: bool = False) -> None:
        super().__init__()
        self.block = MAB(dim, heads, layer_norm=layer_norm)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        x = check_set(x, self.block.dim, mask, self)
        return check_set(self.block(x, x, mask), self.block.dim, mask, self)


class ISAB(nn.Module):
    """Induced set attention block: (B, N, dim) to (B, N, dim), through num_inducing points; zero where masked.

    >>> ss.nn.ISAB(16, num_inducing=4)(torch.randn(2, 10, 16)).shape
    torch.Size([2, 10, 16])
    """

    def __init__(self, dim: int, heads: int = 4, num_inducing: int = 16, *, layer_norm: bool = False) -> None:
        super().__init__()
        self.gather = PMA(dim, heads, num_inducing, layer_norm=layer_norm)
        self.spread = MAB(dim, heads, layer_norm=layer_norm)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        x = check_set(x, self.spread.dim, mask, self)
        return check_set(self.spread(x, self.gather(x, mask)), self.spread.dim, mask, self)


class PMA(nn.Module):
    """Pooling by multihead attention: (B, N, dim) to (B, num_seeds, dim).

    >>> ss.nn.PMA(16, num_seeds=2)(torch.randn(2, 10, 16)).shape
    torch.Size([2, 2, 16])
    """

    def __init__(self, dim: int, heads: int = 4, num_seeds: int = 1, *, layer_norm: bool = False) -> None:
        super().__init__()
        if num_seeds < 1:
            raise ConfigurationError(f"at least one seed (or inducing point) is needed; got {num_seeds}")
        self.seeds = nn.Parameter(nn.init.xavier_uniform_(torch.empty(num_seeds, dim)))
        self.block = MAB(dim, heads, layer_norm=layer_norm)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        x = check_set(x, self.block.dim, mask, self)
        return self.block(self.seeds.to(x.dtype).expand(x.shape[0], -1, -1), x, mask)


class SetTransformer(nn.Module):
    """Set Transformer: (B, N, in_dim) to (B, num_seeds, out_dim).

    Args:
        heads: Heads of each attention; they must divide dim.
        in_dim: Width of the elements, if it is not dim: a linear layer comes first.
        out_dim: Width of the output, if it is not dim: a linear layer comes last.
        num_blocks: SABs before the pooling; ISABs if num_inducing, the number of their inducing points, is given.
        num_after: SABs after the pooling, in which seeds attend to each other; by default one, and none for a single seed.
        layer_norm: Normalise after each attention and each layer.
        dropout: Dropout before and after the pooling.

    >>> ss.nn.SetTransformer(16, in_dim=2, num_seeds=4, out_dim=5)(torch.randn(3, 100, 2)).shape
    torch.Size([3, 4, 5])
    """

    def __init__(
        self,
        dim: int,
        heads: int = 4,
        *,
        in_dim: int | None = None,
        out_dim: int | None = None,
        num_blocks: int = 2,
        num_inducing: int | None = None,
        num_seeds: int = 1,
        num_after: int | None = None,
        layer_norm: bool = False,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.dim, self.in_dim = dim, dim if in_dim is None else in_dim
        block = SAB if num_inducing is None else partial(ISAB, num_inducing=num_inducing)
        self.project = nn.Identity() if in_dim in (None, dim) else nn.Linear(self.in_dim, dim)
        self.before = nn.ModuleList(block(dim, heads, layer_norm=layer_norm) for _ in range(num_blocks))
        self.pool = PMA(dim, heads, num_seeds, layer_norm=layer_norm)
        after = int(num_seeds > 1) if num_after is None else num_after
        self.after = nn.ModuleList(SAB(dim, heads, layer_norm=layer_norm) for _ in range(after))
        self.dropout = nn.Dropout(dropout)
        self.out = nn.Identity() if out_dim is None else nn.Linear(dim, out_dim)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        x = self.project(check_set(x, self.in_dim, mask, self))
        for block in self.before:
            x = block(x, mask)
        z = self.dropout(self.pool(self.dropout(x), mask))
        for block in self.after:
            z = block(z)
        return self.out(z)


def set_transformer_head(
    dim: int, heads: int = 4, dropout: float = 0.5, outputs: int = 1, layer_norm: bool = True
) -> nn.Sequential:
    """SAB, PMA with one seed and dropout before and after it, a linear layer: (B, N, dim) to (B, outputs)."""
    pooled = (SAB(dim, heads, layer_norm=layer_norm), nn.Dropout(dropout), PMA(dim, heads, layer_norm=layer_norm))
    return nn.Sequential(*pooled, nn.Flatten(1), nn.Dropout(dropout), nn.Linear(dim, outputs))
