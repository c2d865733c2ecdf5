"""Points that stream into four clustering models side by side.

Three of them give one answer for any order and any chunks; the Set Transformer, which is averaged over chunks, does not.
"""

from collections.abc import Iterator
from functools import cache
from typing import Any

import torch
from torch import Tensor

from setstream.models.model import SetModel
from setstream.pools.base import AVERAGE
from setstream.serve.answers import as_json
from setstream.serve.playground.messages import MOST_POINTS, Append, Compare, Draw, Message, Order, Put
from setstream.serve.problems import BadMessage
from setstream.tasks.clustering import DiagonalMixture, pretrained, sample
from setstream.tasks.clustering.report import STREAMS, disagreement, stream_ends, stream_order

MODELS = ("umbc+set-transformer", "deepsets", "sse", "set-transformer")
#: The smallest deviation of a colour: points that coincide would have an unbounded density.
SMALLEST_SCALE = 0.05


class Clusters:
    """One visitor's points and streams."""

    points: Tensor
    labels: Tensor
    truth: DiagonalMixture | None

    def __init__(self) -> None:
        self.models = models()
        self._begin(torch.zeros(0, 2), torch.zeros(0, dtype=torch.long), None)

    def draw(self, message: Draw) -> dict[str, Any]:
        """A new set, and how well the mixture that made it explains it."""
        drawn = sample(1, message.points, generator=torch.Generator().manual_seed(message.seed))
        self._begin(drawn.points[0], drawn.labels[0], drawn.truth)
        return {"points": self.points.tolist(), "labels": self.labels.tolist()} | self._oracle()

    def put(self, message: Put) -> dict[str, Any]:
        """Add points to the set."""
        if len(message.points) != len(message.labels):
            raise BadMessage(f"every point has a label: got {len(message.points)} points and {len(message.labels)} labels")
        if len(self.points) + len(message.points) > MOST_POINTS:
            raise BadMessage(f"a set has at most {MOST_POINTS} points here")
        self.points = torch.cat([self.points, torch.tensor(message.points).reshape(-1, 2)])
        self.labels = torch.cat([self.labels, torch.tensor(message.labels, dtype=torch.long)])
        self.truth = None
        return self._oracle()

    def clear(self, message: Message) -> dict[str, Any]:
        """Begin with an empty set."""
        self._begin(torch.zeros(0, 2), torch.zeros(0, dtype=torch.long), None)
        return self._oracle()

    def rewind(self, message: Message) -> dict[str, Any]:
        """Begin the same set again, with nothing streamed."""
        self._begin(self.points, self.labels, self.truth)
        return {"count": 0}

    def order(self, message: Order) -> dict[str, Any]:
        """The positions of each chunk."""
        self._need_points()
        if message.kind not in STREAMS:
            raise BadMessage(f"unknown stream {message.kind[:40]!r}: choose one of {', '.join(STREAMS)}")
        chunks = stream_order(message.kind, self.labels, torch.Generator().manual_seed(message.seed))
        return {"chunks": [chunk.tolist() for chunk in chunks]}

    def append(self, message: Append) -> dict[str, Any]:
        """Each model's prediction for all that has streamed in, and how well that explains the whole set."""
        self._need_points()
        if any(position >= len(self.points) for chunk in message.chunks for position in chunk):
            raise BadMessage(f"the set has {len(self.points)} points: positions end at {len(self.points) - 1}")
        for chunk in message.chunks:
            for stream in self.streams.values():
                stream.update(self.points[chunk].unsqueeze(0))
            self.count += len(chunk)
        predictions = {name: self._mixture(stream.predict()) for name, stream in self.streams.items()} if self.count else {}
        return {"count": self.count, "models": predictions}

    def compare(self, message: Compare) -> Iterator[dict[str, Any]]:
        """For each model, where the four streams end, and by how much they disagree."""
        self._need_points()
        points = self.points.unsqueeze(0)
        for name, model in self.models.items():
            ends = stream_ends(model, self.points, self.labels, message.seed)
            predictions = {kind: self._mixture(end) for kind, end in ends.items()}
            yield {"model": name, "streams": predictions, "disagreement": disagreement(ends, points)}

    def _begin(self, points: Tensor, labels: Tensor, truth: DiagonalMixture | None) -> None:
        self.points, self.labels, self.truth, self.count = points, labels, truth, 0
        self.streams = {name: model.stream(chunks=AVERAGE) for name, model in self.models.items()}

    def _mixture(self, mixture: DiagonalMixture) -> dict[str, Any]:
        return {"nll": float(mixture.nll(self.points.unsqueeze(0))), "mixture": as_json(mixture)}

    def _oracle(self) -> dict[str, Any]:
        """The NLL of the true mixture; of painted points, of the mixture of their colours."""
        known = self.truth or (by_colour(self.points, self.labels) if len(self.points) else None)
        return {"oracle": None if known is None else float(known.nll(self.points.unsqueeze(0)))}

    def _need_points(self) -> None:
        if not len(self.points):
            raise BadMessage("the set is empty: draw one, or paint some points")


@cache
def models() -> dict[str, SetModel]:
    """The four models, loaded for the first visitor."""
    return {name: pretrained(name) for name in MODELS}


def by_colour(points: Tensor, labels: Tensor) -> DiagonalMixture:
    """The likeliest mixture with one Gaussian for the points (N, 2) of each colour.

    >>> by_colour(torch.tensor([[0.0, 0.0], [2.0, 0.0], [9.0, 9.0]]), torch.tensor([0, 0, 1])).means
    tensor([[[1., 0.],
             [9., 9.]]])
    """
    groups = [points[labels == label] for label in labels.unique()]
    shares = torch.tensor([[len(group) / len(points) for group in groups]])
    scales = torch.stack([group.std(0, correction=0) for group in groups]).clamp_min(SMALLEST_SCALE)
    return DiagonalMixture(shares.log(), torch.stack([group.mean(0) for group in groups]).unsqueeze(0), scales.unsqueeze(0))
