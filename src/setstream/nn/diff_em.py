"""Set pooling by differentiable expectation maximisation.

Each head is a mixture of p diagonal Gaussians with a learned prior (Dirichlet on the weights, normal-inverse-Wishart on
means and variances). Starting from the prior's mode, L steps of MAP-EM fit it to the set::

    q_nc = π_c N(x_n; μ_c, σ²_c) / Σ_c' ...                              responsibilities
    w_c  = Σ_n q_nc
    π_c  = (w_c + τ) / Σ_c' (w_c' + τ)
    μ_c  = (Σ_n q_nc x_n + τ m_c) / (w_c + τ)                            m_c, v_c: the prior's anchors
    σ²_c = (Σ_n q_nc x_n² + τ (v_c + m_c²)) / (w_c + τ) - μ_c²           τ: the prior's strength

Kim, "Differentiable Expectation-Maximization for Set Representation Learning", ICLR 2022. All steps are differentiable;
an empty set gives the prior.

Output, of H heads of p components in dim d::

    best   one-hot of the head with the highest likelihood, and its π, μ, σ²:     H + p + 2 p d     (1286 for H=1, p=5, d=128)
    all    π, μ, σ² of every head:                                                H (p + 2 p d)
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from setstream.errors import ConfigurationError
from setstream.nn.set_transformer import check_set

OUTPUTS = ("best", "all")
SMALLEST_VARIANCE = 1e-6


class DiffEM(nn.Module):
    """Differentiable EM pooling: (B, N, dim) to (B, out_dim), with `out_dim` as in the formula above.

    >>> pool = ss.nn.DiffEM(128, heads=1, components=5)
    >>> pool(torch.randn(2, 10, 128)).shape, pool.out_dim
    (torch.Size([2, 1286]), 1286)
    """

    def __init__(
        self, dim: int, heads: int = 5, components: int = 4, steps: int = 3, strength: float = 0.01, output: str = "best"
    ) -> None:
        super().__init__()
        if output not in OUTPUTS:
            raise ConfigurationError(f"unknown output {output!r}: choose one of {', '.join(OUTPUTS)}")
        if min(sizes := (heads, components, steps)) < 1 or not strength > 0:
            raise ConfigurationError(f"heads, components, steps >= 1 and strength > 0 are needed; got {(*sizes, strength)}")
        self.dim, self.heads, self.components, self.steps = dim, heads, components, steps
        self.strength, self.output = strength, output
        mixture = components + 2 * components * dim
        self.out_dim = heads + mixture if output == "best" else heads * mixture
        self.means = nn.Parameter(torch.randn(heads, components, dim) / math.sqrt(dim))
        self.raw_variances = nn.Parameter(torch.full((heads, components, dim), math.log(math.e - 1)))  # softplus gives 1

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        x = check_set(x, self.dim, mask, self)
        with torch.autocast(x.device.type, enabled=False):  # differences of squares need all their digits
            weights, means, variances, likelihood = self.fit(x.to(torch.promote_types(x.dtype, torch.float32)), mask)
        fitted = [tensor.to(x.dtype) for tensor in (weights, means, variances)]
        if self.output == "all":
            return torch.cat([tensor.flatten(1) for tensor in fitted], dim=1)
        best = likelihood.argmax(1)  # (B,)
        rows = torch.arange(x.shape[0], device=x.device)
        return torch.cat([F.one_hot(best, self.heads).to(x.dtype), *(t[rows, best].flatten(1) for t in fitted)], dim=1)

    def fit(self, x: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """MAP-EM: weights (B, H, p), means and variances (B, H, p, d), mean log-likelihood (B, H) of the fit."""
        batch, size = x.shape[:2]
        count = (x.new_full((batch, 1), size) if mask is None else mask.sum(1, keepdim=True)).clamp(min=1)
        # EM is shift-equivariant: around the set's mean, differences of squares lose the fewest digits.
        centre = (x.detach().sum(1) / count)[:, None, None]  # (B, 1, 1, d)
        x = x - centre[:, 0]
        anchors, spread = self.means.to(x.dtype) - centre, F.softplus(self.raw_variances.to(x.dtype))  # (B, H, p, d), (H, p, d)
        tau = self.strength
        weights = x.new_full((batch, self.heads, self.components), 1.0 / self.components)
        means, variances = anchors, spread.expand(batch, -1, -1, -1)
        real = None if mask is None else mask[:, None, :, None].to(x.dtype)
        for _ in range(self.steps):
            joint = self._log_joint(x, weights, means, variances)
            q = joint.softmax(-1) if real is None else joint.softmax(-1) * real  # (B, H, N, p)
            w = q.sum(2) + tau  # (B, H, p)
            first, second = q.mT @ x.unsqueeze(1), q.mT @ x.square().unsqueeze(1)  # (B, H, p, d)
            weights = w / w.sum(-1, keepdim=True)
            means = (first + tau * anchors) / w.unsqueeze(-1)
            raw = (second + tau * (spread + anchors.square())) / w.unsqueeze(-1) - means.square()
            variances = raw.clamp(min=SMALLEST_VARIANCE)
        evidence = self._log_joint(x, weights, means, variances).logsumexp(-1)  # (B, H, N)
        if mask is not None:
            evidence = evidence * mask[:, None]
        return weights, means + centre, variances, evidence.sum(-1) / count

    @staticmethod
    def _log_joint(x: Tensor, weights: Tensor, means: Tensor, variances: Tensor) -> Tensor:
        """Log π_c + log N(x_n; μ_c, σ²_c), (B, H, N, p), by products: no (N, p, d) tensor."""
        precision = variances.reciprocal()
        quadratic = x.square().unsqueeze(1) @ precision.mT - 2 * x.unsqueeze(1) @ (means * precision).mT
        quadratic = quadratic + (means.square() * precision).sum(-1).unsqueeze(2)
        constant = weights.log() - 0.5 * (variances.log().sum(-1) + x.shape[-1] * math.log(2 * math.pi))
        return constant.unsqueeze(2) - 0.5 * quadratic
