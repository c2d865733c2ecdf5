"""Slots: the K learned queries of a pool.

    learned           s_i = μ_i
    gaussian          s_i = μ_i + softplus(v_i) ε_i,   ε_i ~ N(0, I)         one Gaussian for each slot
    shared-gaussian   s_i = μ   + softplus(v)   ε_i                          one Gaussian for all slots
    given             what an earlier pass gives (see `multi_pass.py`): no parameters

ε is drawn once for each set and pass in training mode and is part of the state, so that all chunks of a set use the same
slots. In eval mode the slots are the mean, or, on request, one fixed draw that is saved with the weights: the mean of a
*shared* Gaussian makes all slots equal, which is rarely useful.

softplus(v) is the standard deviation. The paper writes it as the covariance; its experiments use the standard deviation, too.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from setstream.errors import ConfigurationError

KINDS = ("learned", "gaussian", "shared-gaussian", "given")
EVAL_SLOTS = ("mean", "fixed")


class Slots(nn.Module):
    """K slots of width slot_dim, of one of the kinds.

    >>> slots = Slots("gaussian", num_slots=4, slot_dim=8).train()
    >>> slots(slots.draw(2, torch.device("cpu"))).shape        # (B, K, slot_dim)
    torch.Size([2, 4, 8])
    >>> slots.eval().draw(2, torch.device("cpu")) is None      # the mean: one for all sets
    True
    >>> slots(None).shape
    torch.Size([1, 4, 8])
    """

    fixed: Tensor | None

    def __init__(self, kind: str, num_slots: int, slot_dim: int, eval_slots: str = "mean") -> None:
        super().__init__()
        if kind not in KINDS:
            raise ConfigurationError(f"unknown slots {kind!r}: choose one of {', '.join(KINDS)}")
        if eval_slots not in EVAL_SLOTS:
            raise ConfigurationError(f"unknown eval_slots {eval_slots!r}: choose one of {', '.join(EVAL_SLOTS)}")
        self.kind, self.num_slots, self.slot_dim = kind, num_slots, slot_dim
        if kind == "given":
            self.register_parameter("mean", None)
            self.register_parameter("raw_std", None)
            self.register_buffer("fixed", None)
            return
        rows = 1 if kind == "shared-gaussian" else num_slots
        self.mean = nn.Parameter(torch.empty(rows, slot_dim))
        if kind == "learned":
            self.register_parameter("raw_std", None)
            nn.init.xavier_uniform_(self.mean)
        else:
            self.raw_std = nn.Parameter(torch.empty(rows, slot_dim).uniform_(-5.0, -4.0))
            nn.init.uniform_(self.mean, -0.2, 0.2)
        fixed = torch.randn(1, num_slots, slot_dim) if eval_slots == "fixed" and kind != "learned" else None
        self.register_buffer("fixed", fixed)

    def draw(self, batch: int, device: torch.device, generator: torch.Generator | None = None) -> Tensor | None:
        """ε (batch, K, slot_dim) for one training pass; None where nothing is random."""
        if self.raw_std is None or not self.training:
            return None
        where = device if generator is None else generator.device
        noise = torch.randn(batch, self.num_slots, self.slot_dim, device=where, dtype=self.mean.dtype, generator=generator)
        return noise.to(device)

    def forward(self, noise: Tensor | None) -> Tensor:
        """The slots (B or 1, K, slot_dim) for a draw, or for eval mode."""
        if self.mean is None:
            raise ConfigurationError(
                "slots='given' are for a later pass of ss.MultiPass, which gives them: alone, or as a first pass, a pool needs "
                "slots of its own (learned, gaussian or shared-gaussian)"
            )
        noise = self.fixed if noise is None else noise
        mean = self.mean.expand(1, self.num_slots, self.slot_dim)
        return mean if noise is None or self.raw_std is None else mean + F.softplus(self.raw_std) * noise

    @torch.no_grad()
    def permute_(self, order: Tensor) -> None:
        """Reorder the slots in place: slot i becomes what slot order[i] was."""
        if sorted(order.tolist()) != list(range(self.num_slots)):
            raise ConfigurationError(f"an order of {self.num_slots} slots names each once; got {order.tolist()}")
        if self.mean is not None and self.kind != "shared-gaussian":
            self.mean.copy_(self.mean[order])
            if self.raw_std is not None:
                self.raw_std.copy_(self.raw_std[order])
        if self.fixed is not None:
            self.fixed.copy_(self.fixed[:, order])

    def extra_repr(self) -> str:
        return f"{self.kind}, num_slots={self.num_slots}, slot_dim={self.slot_dim}"
