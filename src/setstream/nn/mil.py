"""The two classic poolings of multiple instance learning::

    gated attention (AB-MIL)   a_n = softmax_n( wᵀ (tanh(V h_n) ⊙ σ(U h_n)) ),   z = Σ_n a_n h_n
    DS-MIL                     instance stream  s_n = W h_n,  s = max_n s_n,  m = argmax_n s_n
                               bag stream       a_n = softmax_n(q_nᵀ q_m / √d),  b = B(Σ_n a_n v_n);   y = (s + b) / 2

Ilse et al., "Attention-based Deep Multiple Instance Learning", ICML 2018. Li et al., "Dual-stream Multiple Instance Learning
Network for Whole Slide Image Classification with Self-supervised Contrastive Learning", CVPR 2021.

These modules hold the whole bag. `ss.GatedAttention` and `ss.DSMIL` are pools that load their weights and read any chunks.
"""

import torch
from torch import Tensor, nn

from setstream.nn.set_transformer import check_set


def masked_softmax(scores: Tensor, mask: Tensor | None) -> Tensor:
    """Softmax over axis 1 of scores (B, N, C), zero where masked, all zero for a set without elements."""
    if mask is None:
        return scores.softmax(1)
    hidden = ~mask.unsqueeze(-1)
    return scores.masked_fill(hidden, torch.finfo(scores.dtype).min).softmax(1).masked_fill(hidden, 0.0)


class GatedAttention(nn.Module):
    """Gated attention pooling: (B, N, dim) to (B, dim), and the weights (B, N) on request.

    >>> z, weights = ss.nn.GatedAttention(16)(torch.randn(2, 10, 16), return_attention=True)
    >>> z.shape, torch.allclose(weights.sum(1), torch.ones(2))
    (torch.Size([2, 16]), True)
    """

    def __init__(self, dim: int, hidden: int = 128) -> None:
        super().__init__()
        self.dim = dim
        self.content = nn.Sequential(nn.Linear(dim, hidden), nn.Tanh())
        self.gate = nn.Sequential(nn.Linear(dim, hidden), nn.Sigmoid())
        self.score = nn.Linear(hidden, 1)

    def forward(self, x: Tensor, mask: Tensor | None = None, return_attention: bool = False) -> Tensor | tuple[Tensor, Tensor]:
        x = check_set(x, self.dim, mask, self)
        weights = masked_softmax(self.score(self.content(x) * self.gate(x)), mask)  # (B, N, 1)
        z = (weights.mT @ x).squeeze(1)
        return (z, weights.squeeze(-1)) if return_attention else z


class DSMIL(nn.Module):
    """Dual-stream MIL: (B, N, dim) to logits (B, num_classes), and each class's weights (B, N, num_classes) on request.

    >>> ss.nn.DSMIL(16, num_classes=2)(torch.randn(3, 10, 16)).shape
    torch.Size([3, 2])
    """

    def __init__(self, dim: int, num_classes: int = 1, hidden: int = 128) -> None:
        super().__init__()
        self.dim = dim
        self.instance = nn.Linear(dim, num_classes)
        self.query = nn.Sequential(nn.Linear(dim, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.Tanh())
        self.value = nn.Linear(dim, dim)
        self.bag = nn.Parameter(nn.init.xavier_uniform_(torch.empty(num_classes, dim)))
        self.bag_bias = nn.Parameter(torch.zeros(num_classes))

    def forward(self, x: Tensor, mask: Tensor | None = None, return_attention: bool = False) -> Tensor | tuple[Tensor, Tensor]:
        instance, bag, weights = self.streams(x, mask)
        logits = (instance + bag) / 2
        return (logits, weights) if return_attention else logits

    def streams(self, x: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Logits (B, C) of the instance stream (zero for an empty set) and of the bag stream, and the weights (B, N, C)."""
        x = check_set(x, self.dim, mask, self)
        batch, size = x.shape[:2]
        if not size:
            nothing = x.new_zeros(batch, len(self.bag))
            return nothing, nothing + self.bag_bias, x.new_zeros(batch, 0, len(self.bag))
        scores = self.instance(x)  # (B, N, C)
        ranked = scores if mask is None else scores.masked_fill(~mask.unsqueeze(-1), torch.finfo(scores.dtype).min)
        top, critical = ranked.max(1)  # (B, C)
        instance = top if mask is None else top.masked_fill(~mask.any(1, keepdim=True), 0.0)
        queries = self.query(x)  # (B, N, hidden)
        chosen = queries.gather(1, critical.unsqueeze(-1).expand(-1, -1, queries.shape[-1]))  # (B, C, hidden)
        weights = masked_softmax(queries @ chosen.mT / queries.shape[-1] ** 0.5, mask)  # (B, N, C)
        pooled = weights.mT @ self.value(x)  # (B, C, dim)
        return instance, (pooled * self.bag).sum(-1) + self.bag_bias, weights
