"""TransMIL: two attention layers over all instances of a bag, with convolutions on their order between them::

    X  = [c, h_1, ..., h_N, h_1, ..., h_(s² - N)]     s = ⌈√N⌉: the class token c, and a square of instances; the first repeat
    X ← X + A(LN(X));   X ← PPEG(X);   X ← X + A(LN(X));   z = LN(X)_1
    PPEG   the square Q (s, s, dim) ← Q + conv7(Q) + conv5(Q) + conv3(Q), each channel by itself; the class token stays
    A      softmax(Q K̃ᵀ/√d) [softmax(Q̃ K̃ᵀ/√d)]⁺ softmax(Q̃ Kᵀ/√d) V + conv33(V)       Q̃, K̃: means of m landmark segments

Shao et al., "TransMIL: Transformer based Correlated Multiple Instance Learning for Whole Slide Image Classification", NeurIPS
2021; its attention: Xiong et al., "Nyströmformer", AAAI 2021. It depends on the order of the instances, so no partition into
chunks gives the same answer: it is a baseline. Memory is O(N m).
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from setstream.errors import ConfigurationError
from setstream.nn.set_transformer import check_set

ITERATIONS = 6  #: of the pseudo-inverse


def pseudo_inverse(matrix: Tensor) -> Tensor:
    """The pseudo-inverse of matrices (..., m, m) of softmax rows, by an iteration of third order without any decomposition."""
    columns, rows = (matrix.abs().sum(axis, keepdim=True).amax((-2, -1), keepdim=True) for axis in (-2, -1))
    inverse, one = matrix.mT / (columns * rows), torch.eye(matrix.shape[-1], dtype=matrix.dtype, device=matrix.device)
    for _ in range(ITERATIONS):
        product = matrix @ inverse
        inverse = 0.25 * inverse @ (13 * one - product @ (15 * one - product @ (7 * one - product)))
    return inverse


class NystromAttention(nn.Module):
    """Self-attention (B, N, dim) to (B, N, dim) by `landmarks` segments; exact for sequences that are not longer than that."""

    def __init__(self, dim: int, heads: int, landmarks: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.landmarks = heads, landmarks
        self.project = nn.Linear(dim, 3 * dim, bias=False)
        self.local = nn.Conv2d(heads, heads, (33, 1), padding=(16, 0), groups=heads, bias=False)
        self.out = nn.Sequential(nn.Linear(dim, dim), nn.Dropout(dropout))

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.project(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)  # (B, heads, N, d)
        attended = self.attend(query / math.sqrt(query.shape[-1]), key, value) + self.local(value)
        mixed: Tensor = self.out(attended.transpose(1, 2).flatten(2))
        return mixed

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """The attention itself; queries are scaled."""
        if query.shape[2] <= self.landmarks:
            return (query @ key.mT).softmax(-1) @ value
        few_queries, few_keys = (self._means(rows) for rows in (query, key))
        middle = pseudo_inverse((few_queries @ few_keys.mT).softmax(-1))
        return (query @ few_keys.mT).softmax(-1) @ (middle @ ((few_queries @ key.mT).softmax(-1) @ value))

    def _means(self, rows: Tensor) -> Tensor:
        return F.adaptive_avg_pool1d(rows.flatten(0, 1).mT, self.landmarks).mT.unflatten(0, rows.shape[:2])


class TransMIL(nn.Module):
    """TransMIL: (B, N, dim) to the class token (B, dim).

    Args:
        dim: The width of the features.
        heads: Heads of both attention layers; must divide `dim`.
        landmarks: Segments of the approximation; dim // 2 unless given, as published.
        dropout: After each attention layer.

    >>> ss.nn.TransMIL(16, heads=2)(torch.randn(3, 50, 16)).shape
    torch.Size([3, 16])
    """

    def __init__(self, dim: int, heads: int = 8, landmarks: int | None = None, dropout: float = 0.1) -> None:
        super().__init__()
        if heads < 1 or dim % heads:
            raise ConfigurationError(f"heads must divide dim; got dim = {dim} and heads = {heads}")
        landmarks = max(1, dim // 2) if landmarks is None else landmarks
        if landmarks < 1:
            raise ConfigurationError(f"landmarks must be at least 1; got {landmarks}")
        self.dim = dim
        self.token = nn.Parameter(torch.randn(1, 1, dim))
        self.norms = nn.ModuleList(nn.LayerNorm(dim) for _ in range(3))
        self.layers = nn.ModuleList(NystromAttention(dim, heads, landmarks, dropout) for _ in range(2))
        self.places = nn.ModuleList(nn.Conv2d(dim, dim, size, padding=size // 2, groups=dim) for size in (7, 5, 3))

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        x = check_set(x, self.dim, mask, self)
        if mask is None:
            return self._tokens(x)
        return torch.cat([self._tokens(rows[real].unsqueeze(0)) for rows, real in zip(x, mask, strict=True)])

    def _tokens(self, x: Tensor) -> Tensor:
        """The class tokens (B, dim) of sets of one size; the token's own, for sets without elements."""
        batch, size = x.shape[:2]
        side = math.ceil(math.sqrt(size))
        x = torch.cat([self.token.expand(batch, -1, -1), x, x[:, : side * side - size]], dim=1)
        x = x + self.layers[0](self.norms[0](x))
        if size:
            square = x[:, 1:].mT.unflatten(-1, (side, side))
            square = square + torch.stack([place(square) for place in self.places]).sum(0)
            x = torch.cat([x[:, :1], square.flatten(2).mT], dim=1)
        x = x + self.layers[1](self.norms[1](x))
        tokens: Tensor = self.norms[2](x[:, 0])
        return tokens
