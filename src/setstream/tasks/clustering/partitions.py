"""The variance of an encoding over random partitions of its set: zero, within rounding, for consistent encoders."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from setstream.models.encoder import SetEncoder
from setstream.models.model import SetModel
from setstream.nn import DiffEM, FSPool, SetTransformer
from setstream.pools import UMBC, ChunkMean
from setstream.pools.base import AVERAGE
from setstream.report.plotting import pyplot

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def draw_distributions(size: int, width: int, generator: torch.Generator) -> Tensor:
    """A set of which a quarter each is normal, uniform on (-3, 3), exponential and Cauchy: (1, size, width)."""
    shape = (size // 4, width)
    parts = [
        torch.randn(shape, generator=generator),
        torch.rand(shape, generator=generator) * 6 - 3,
        torch.empty(shape).exponential_(generator=generator),
        torch.empty(shape).cauchy_(generator=generator),
    ]
    return torch.cat(parts).unsqueeze(0)


@torch.no_grad()
def partition_variance(partitions: int = 100, width: int = 128, size: int = 1024) -> dict[str, dict[int, tuple[float, float]]]:
    """Variance of the encoding over random partitions, against the number of chunks: mean and deviation over its features."""
    generator = torch.Generator().manual_seed(0)
    x = draw_distributions(size, width, generator)
    torch.manual_seed(0)
    models = {
        "UMBC + Set Transformer": SetModel(SetEncoder(nn.Identity(), UMBC(width, 16, heads=4)), SetTransformer(width)),
        "Set Transformer": SetModel(SetEncoder(nn.Identity(), ChunkMean(SetTransformer(width), width)), nn.Identity()),
        "FSPool": SetModel(SetEncoder(nn.Identity(), ChunkMean(FSPool(width), width)), nn.Identity()),
        "Diff EM": SetModel(SetEncoder(nn.Identity(), ChunkMean(DiffEM(width, 1, 5, 3), width)), nn.Identity()),
    }
    found: dict[str, dict[int, tuple[float, float]]] = {}
    for name, model in models.items():
        for chunks in (1, 2, 4, 8, 16, 32):
            codes = []
            for _ in range(partitions):
                stream = model.stream(chunks=AVERAGE)
                for chunk in x[:, torch.randperm(size, generator=generator)].chunk(chunks, dim=1):
                    stream.update(chunk)
                codes.append(stream.predict().flatten().double())
            variance = torch.stack(codes).var(0)
            found.setdefault(name, {})[chunks] = (float(variance.mean()), float(variance.std()))
    return found


def variance_figure(found: dict[str, dict[int, tuple[float, float]]]) -> Figure:
    """The variances, on a scale that shows zero."""
    plt = pyplot()
    figure, axis = plt.subplots(figsize=(5.5, 3.6), constrained_layout=True)
    for name, values in found.items():
        chunks = list(values)
        axis.plot(chunks, [max(values[c][0], 1e-18) for c in chunks], "o-", label=name)
    axis.set(xscale="log", yscale="log", xlabel="chunks that the set was cut into", ylabel="variance over 100 partitions")
    axis.legend(fontsize=8)
    return figure
