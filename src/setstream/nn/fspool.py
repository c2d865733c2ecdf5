"""Featurewise sort pooling::

    z_d = Σ_r w_d(r / (N - 1)) x_(r),d         x_(r),d  the r-th largest value of feature d, r = 0 .. N-1
    w_d piecewise linear on [0, 1], with `pieces` pieces and learned heights at their ends

Zhang et al., "FSPool: Learning Set Representations with Featurewise Sort Pooling", ICLR 2020. One weight function serves
sets of all sizes.
"""

import torch
from torch import Tensor, nn

from setstream.errors import ConfigurationError
from setstream.nn.set_transformer import check_set


class FSPool(nn.Module):
    """Featurewise sort pooling: (B, N, dim) to (B, dim). Empty sets give zeros.

    >>> ss.nn.FSPool(16)(torch.randn(2, 10, 16)).shape
    torch.Size([2, 16])
    """

    def __init__(self, dim: int, pieces: int = 20) -> None:
        super().__init__()
        if pieces < 1:
            raise ConfigurationError(f"the weights need at least one piece; got {pieces}")
        self.dim, self.pieces = dim, pieces
        self.heights = nn.Parameter(torch.randn(dim, pieces + 1))

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        x = check_set(x, self.dim, mask, self)
        rank = torch.arange(x.shape[1], device=x.device)
        if mask is None:
            weights = self.weights(rank, torch.full_like(rank[:1], len(rank)))
            return torch.einsum("bnd,nd->bd", x.sort(dim=1, descending=True).values, weights)
        ordered = x.masked_fill(~mask.unsqueeze(-1), float("-inf")).sort(dim=1, descending=True).values  # padding is last
        count = mask.sum(1, keepdim=True)  # (B, 1)
        real = (rank < count).unsqueeze(-1)
        return (ordered.masked_fill(~real, 0.0) * self.weights(rank, count)).sum(1)

    def weights(self, rank: Tensor, count: Tensor) -> Tensor:
        """W at rank r of a set of `count` elements: ranks (N,) and counts (..., 1) to (..., N, dim)."""
        wide = torch.promote_types(self.heights.dtype, torch.float32)
        position = (rank.to(wide) / (count - 1).clamp(min=1)).clamp(max=1.0) * self.pieces  # (..., N)
        left = position.floor().clamp(max=self.pieces - 1)
        heights, share, index = self.heights.T, (position - left).unsqueeze(-1), left.long()  # heights (pieces + 1, dim)
        return ((1 - share) * heights[index] + share * heights[index + 1]).to(self.heights.dtype)
