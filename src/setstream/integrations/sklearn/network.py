"""The network behind the estimators: it standardises, reads a set in two streams, and gives one row of outputs a stream.

    x --(x - mean) / scale, layers--> h --+-- W h + b, maximum over the set -------> outputs of the elements' stream
                                          +-- UMBC, SAB, PMA on its slots ---------> outputs of the set's stream

The means and scales are those of the elements it was fitted on, and part of its weights: a fitted network takes raw elements,
in chunks, in a stream, or in ONNX. The elements' stream, max_j (W h_j + b), is the one of multiple instance learning: a set is
positive if one of its elements is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from setstream.encoder import SetEncoder
from setstream.model import SetModel
from setstream.nn.mlp import mlp
from setstream.pools import UMBC, DeepSets, Parallel, Projected
from setstream.tasks.mil.models import set_transformer_body


class Standardise(nn.Module):
    """(x - mean) / scale, feature by feature."""

    mean: Tensor
    scale: Tensor

    def __init__(self, in_dim: int) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(in_dim))
        self.register_buffer("scale", torch.ones(in_dim))

    def forward(self, x: Tensor) -> Tensor:
        """The elements (M, in_dim) in units of their deviation."""
        return (x - self.mean) / self.scale


class StreamsHead(nn.Module):
    """Outputs of the streams, (B, S, outputs): the elements' stream first where there is one, the set's last."""

    def __init__(self, decoder: nn.Module) -> None:
        super().__init__()
        self.decoder = decoder

    def forward(self, z: Tensor | dict[str, Tensor]) -> Tensor:
        """From what the pools gave to outputs."""
        if isinstance(z, dict):
            return torch.stack([z["elements"], self.decoder(z["set"])], dim=1)
        return self.decoder(z).unsqueeze(1)


def two_stream(
    in_dim: int,
    outputs: int = 1,
    widths: Sequence[int] = (256, 128, 64),
    num_slots: int = 64,
    heads: int = 4,
    dropout: float = 0.5,
    elements_stream: bool = True,
    activation: str = "softmax",
    slots: str = "learned",
) -> SetModel:
    """UMBC and a Set Transformer on its slots, beside the maximum of the elements' own outputs."""
    width = [in_dim, *widths][-1]
    phi = nn.Sequential(Standardise(in_dim), mlp([in_dim, *widths]))
    pool: Any = UMBC(width, num_slots, heads=heads, activation=activation, slots=slots)
    if elements_stream:
        pool = Parallel(elements=Projected(nn.Linear(width, outputs), DeepSets("max")), set=pool)
    return SetModel(SetEncoder(phi, pool), StreamsHead(set_transformer_body(width, dropout, outputs)))


MODELS: dict[str, Callable[..., SetModel]] = {"two-stream": two_stream}
