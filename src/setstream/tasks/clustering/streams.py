"""The four ways in which the paper streams a set, and what a model says along the way."""

from collections.abc import Iterator

import torch
from torch import Tensor

from setstream.models.model import SetModel
from setstream.pools.base import AVERAGE
from setstream.tasks.clustering.mixtures import DiagonalMixture

#: The paper's names, and what they mean.
STREAMS = {
    "single point": "one at a time",
    "class": "cluster after cluster",
    "chunk": "eight at a time",
    "one each": "one of each cluster at a time",
}
CHUNK = 8


def stream_order(kind: str, labels: Tensor, generator: torch.Generator | None = None) -> list[Tensor]:
    """The chunks of one set, as lists of positions; labels (N,) say which component each point is of.

        single point   one at a time, in random order
        class          all of a class at once, class after class
        chunk          eight at a time, in random order
        one each       one of each class at a time, as long as there are any

    >>> [chunk.tolist() for chunk in stream_order("class", torch.tensor([1, 0, 1]))]
    [[1], [0, 2]]
    """
    if kind not in STREAMS:
        raise ValueError(f"unknown stream {kind!r}: choose one of {', '.join(STREAMS)}")
    shuffled = torch.randperm(len(labels), generator=generator)
    if kind == "single point":
        return list(shuffled.split(1))
    if kind == "chunk":
        return list(shuffled.split(CHUNK))
    classes = [shuffled[labels[shuffled] == own] for own in labels.unique()]
    if kind == "class":
        return [own.sort().values for own in classes]
    longest = max(len(own) for own in classes)
    return [torch.stack([own[turn] for own in classes if turn < len(own)]) for turn in range(longest)]


@torch.no_grad()
def predictions(model: SetModel, points: Tensor, chunks: list[Tensor]) -> Iterator[DiagonalMixture]:
    """What the model says of one set (N, D) after each chunk."""
    stream = model.stream(chunks=AVERAGE)
    for chunk in chunks:
        stream.update(points[chunk].unsqueeze(0))
        yield stream.predict()


@torch.no_grad()
def stream_ends(model: SetModel, points: Tensor, labels: Tensor, seed: int = 0) -> dict[str, DiagonalMixture]:
    """What the model says of one set (N, D) at the end of each of the four streams."""
    ends = {}
    for kind in STREAMS:
        stream = model.stream(chunks=AVERAGE)
        for chunk in stream_order(kind, labels, torch.Generator().manual_seed(seed)):
            stream.update(points[chunk].unsqueeze(0))
        ends[kind] = stream.predict()
    return ends


def disagreement(ends: dict[str, DiagonalMixture], points: Tensor) -> float:
    """How far apart the streams' log-likelihoods of a point are: largest minus smallest, mean over the points (1, N, D)."""
    values = torch.stack([end.log_prob(points) for end in ends.values()])
    return float((values.amax(0) - values.amin(0)).mean())
