"""The four ways in which the paper streams a set, and a model's predictions along the way."""

from collections.abc import Iterator

import torch
from torch import Tensor

from setstream.models.model import SetModel
from setstream.pools.base import AVERAGE
from setstream.tasks.clustering.mixtures import DiagonalMixture
from setstream.tasks.prediction import predict_in_chunks

#: The paper's names, and what they mean.
STREAMS = {
    "single point": "one at a time",
    "class": "cluster after cluster",
    "chunk": "eight at a time",
    "one each": "one of each cluster at a time",
}
CHUNK = 8


def stream_order(kind: str, labels: Tensor, generator: torch.Generator | None = None) -> list[Tensor]:
    """The chunks of one set, as lists of positions; labels (N,) give the component of each point.

    >>> [chunk.tolist() for chunk in stream_order("class", torch.tensor([1, 0, 1]))]
    [[1], [0, 2]]
    """
    if kind not in STREAMS:
        raise ValueError(f"unknown stream {kind!r}: choose one of {', '.join(STREAMS)}")
    shuffled = torch.randperm(len(labels), generator=generator)
    if kind in ("single point", "chunk"):
        return list(shuffled.split(1 if kind == "single point" else CHUNK))
    clusters = [shuffled[labels[shuffled] == label] for label in labels.unique()]
    if kind == "class":
        return [cluster.sort().values for cluster in clusters]
    return [torch.stack([c[turn] for c in clusters if turn < len(c)]) for turn in range(max(map(len, clusters)))]


@torch.no_grad()
def predictions(model: SetModel, points: Tensor, chunks: list[Tensor]) -> Iterator[DiagonalMixture]:
    """The model's mixture of one set (N, D) after each chunk."""
    stream = model.stream(chunks=AVERAGE)
    for chunk in chunks:
        stream.update(points[chunk].unsqueeze(0))
        yield stream.predict()


def stream_ends(model: SetModel, points: Tensor, labels: Tensor, seed: int = 0) -> dict[str, DiagonalMixture]:
    """The model's mixture of one set (N, D) at the end of each of the four streams."""
    orders = {kind: stream_order(kind, labels, torch.Generator().manual_seed(seed)) for kind in STREAMS}
    return {kind: predict_in_chunks(model, (points[chunk].unsqueeze(0) for chunk in order)) for kind, order in orders.items()}


def disagreement(ends: dict[str, DiagonalMixture], points: Tensor) -> float:
    """Largest minus smallest log-likelihood of a point over the streams' mixtures, mean over the points (1, N, D)."""
    values = torch.stack([end.log_prob(points) for end in ends.values()])
    return float((values.amax(0) - values.amin(0)).mean())
