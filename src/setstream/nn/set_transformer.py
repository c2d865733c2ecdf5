"""The blocks of the Set Transformer, and the whole::

    MAB(X, Y)  = LN(H + ReLU(H W)),   H = LN(X + Multihead(X, Y))           LN optional
    SAB(X)     = MAB(X, X)                                                  every element sees every other: O(N²)
    ISAB(X)    = MAB(X, MAB(I, X))                                          through m inducing points I: O(N m)
    PMA(X)     = MAB(S, X)                                                  k seeds S attend to the set
    SetTransformer(X) = W · SAB(... PMA(SAB(... X)))

Lee et al., "Set Transformer: A Framework for Attention-based Permutation-Invariant Neural Networks", ICML 2019.
These need their whole input, so use them after a pool, on its few slots.
"""

import torch
from torch import Tensor, nn

from setstream.errors import ConfigurationError
from setstream.nn.attention import Attention, check_set


class MAB(nn.Module):
    """Multihead attention block: rows x (B, M, dim) look at the set y (B, N, dim), by default at themselves.

    The mask belongs to y.

    >>> import torch, setstream as ss
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

    >>> import torch, setstream as ss
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

    >>> import torch, setstream as ss
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

    >>> import torch, setstream as ss
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
        dim: Width of the blocks.
        heads: Heads of each attention; they must divide dim.
        in_dim: Width of the elements, if it is not dim: a linear layer comes first.
        out_dim: Width of the output, if it is not dim: a linear layer comes last.
        num_blocks: SABs before the pooling; ISABs if num_inducing is given.
        num_inducing: Inducing points of the ISABs.
        num_seeds: Rows of the output.
        num_after: SABs after the pooling, in which seeds attend to each other; by default one, and none for a single seed.
        layer_norm: Normalise after each attention and each layer.
        dropout: Dropout before and after the pooling.

    >>> import torch, setstream as ss
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
        options = (dim, heads) if num_inducing is None else (dim, heads, num_inducing)
        block = SAB if num_inducing is None else ISAB
        self.project = nn.Identity() if in_dim in (None, dim) else nn.Linear(self.in_dim, dim)
        self.before = nn.ModuleList(block(*options, layer_norm=layer_norm) for _ in range(num_blocks))
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


def set_transformer_head(dim: int, heads: int = 4, dropout: float = 0.5, outputs: int = 1) -> nn.Sequential:
    """SAB, PMA with one seed and dropout before and after it, a linear layer: (B, N, dim) to (B, outputs)."""
    pooled = (SAB(dim, heads, layer_norm=True), nn.Dropout(dropout), PMA(dim, heads, layer_norm=True))
    return nn.Sequential(*pooled, nn.Flatten(1), nn.Dropout(dropout), nn.Linear(dim, outputs))
