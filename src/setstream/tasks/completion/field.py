"""What a completion model predicts of an image: a Gaussian for every place and channel.

    (μ, s) = decoder([r, p])           r (width,) the encoding of the context, p in [0, 1]² a place
    y_p ~ N(μ, σ²),  σ = σ₀ + (1 - σ₀) softplus(s)

Any places can be predicted: those of the image, of a finer grid, or a few of them.
"""

from abc import ABC, abstractmethod

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributions import Normal

from setstream.gradients.streamed_loss import streamed_loss
from setstream.nn.mlp import mlp

STREAMED_FROM = 16_384  # with more places than this, the loss is streamed
SMALLEST_SCALE = 0.1  # σ₀, as in conditional neural processes: no predicted deviation is below a tenth of the range of a colour


class Waves(nn.Module):
    """Prepends sin 2^i πp and cos 2^i πp for i < count to rows that begin with a place p: (..., n) to (..., 4 count + n)."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.count = count

    def forward(self, rows: Tensor) -> Tensor:
        angles = rows[..., :2].unsqueeze(-1) * (torch.pi * 2.0 ** torch.arange(self.count, device=rows.device))
        waves = torch.cat([angles.sin().flatten(-2), angles.cos().flatten(-2)], -1)
        return torch.cat([waves.to(rows.dtype), rows], -1)


class GaussianDecoder(nn.Module, ABC):
    """Encodings of sets (B, ...), and places (B, T, 2), to means and scales (B, T, channels)."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.channels = channels

    @abstractmethod
    def raw(self, read: Tensor, places: Tensor) -> Tensor:
        """μ and s, concatenated: (B, T, 2 channels)."""

    def forward(self, read: Tensor, places: Tensor) -> tuple[Tensor, Tensor]:
        mean, raw = self.raw(read, places).chunk(2, dim=-1)
        return mean, SMALLEST_SCALE + (1 - SMALLEST_SCALE) * F.softplus(raw)


class Decoder(GaussianDecoder):
    """r and a place to mean and scale of each channel: five layers, as in the paper's appendix."""

    def __init__(self, width: int, channels: int, waves: int = 0) -> None:
        super().__init__(channels)
        self.waves = Waves(waves)
        self.first = nn.Linear(width + 2 + 4 * waves, width)
        self.rest = nn.Sequential(nn.ReLU(), mlp([width] * 4), nn.Linear(width, 2 * channels))

    def raw(self, read: Tensor, places: Tensor) -> Tensor:
        read = read.flatten(1)
        of_read, of_place = self.first.weight.split([read.shape[-1], 2 + 4 * self.waves.count], dim=1)
        # The part of the first layer that depends on r is the same for all places of an image.
        shared = F.linear(read, of_read, self.first.bias)  # (B, width)
        return self.rest(F.linear(self.waves(places), of_place) + shared.unsqueeze(1))


class PixelLoss(nn.Module):
    """The negative log-likelihood (B, T) of each pixel, summed over its channels; targets (B, T, 2 + channels)."""

    def __init__(self, decoder: GaussianDecoder) -> None:
        super().__init__()
        self.decoder = decoder

    def forward(self, read: Tensor, targets: Tensor, mask: Tensor | None = None) -> Tensor:
        places, values = targets.split([2, self.decoder.channels], dim=-1)
        mean, scale = self.decoder(read, places)
        return F.gaussian_nll_loss(mean, values, scale.square(), full=True, reduction="none").sum(-1)


class Field:
    """A predicted image: `at(places)` is a distribution, `nll(targets)` its mean loss over targets."""

    def __init__(self, read: Tensor, decoder: GaussianDecoder) -> None:
        self.read, self.decoder = read, decoder

    def at(self, places: Tensor) -> Normal:
        """The channels at places (B, T, 2) in [0, 1]²."""
        mean, scale = self.decoder(self.read, places)
        return Normal(mean, scale, validate_args=False)

    def nll(self, targets: Tensor, chunk_size: int = STREAMED_FROM) -> Tensor:
        """Nats per pixel (B,), over targets (B, T, 2 + channels); in constant memory if there are many."""
        loss = PixelLoss(self.decoder)
        if targets.shape[1] <= chunk_size:
            return loss(self.read, targets).mean(1)
        return streamed_loss(loss, targets, [self.read], chunk_size=chunk_size)


class FieldHead(nn.Module):
    """A body on the pool's output (B, ...), and the decoder that reads the result."""

    def __init__(self, body: nn.Module, decoder: GaussianDecoder) -> None:
        super().__init__()
        self.body, self.decoder = body, decoder

    def forward(self, z: Tensor) -> Field:
        return Field(self.body(z), self.decoder)
