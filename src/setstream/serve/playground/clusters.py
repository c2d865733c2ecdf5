"""Points that stream into four clustering models side by side.

Three of them give one answer for any order and any chunks; the Set Transformer, which is averaged over chunks, does not.
"""

from collections.abc import Iterator
from functools import cache
from typing import Annotated, Any

import torch
from pydantic import Field, validate_call
from torch import Tensor

from setstream.errors import DataError
from setstream.pools.base import AVERAGE
from setstream.serve.answers import as_json
from setstream.tasks.clustering import DiagonalMixture, pretrained, sample
from setstream.tasks.clustering.streams import STREAMS, disagreement, stream_ends, stream_order

MODELS = ("umbc+set-transformer", "deepsets", "sse", "set-transformer")
MOST_POINTS = 2048
#: The smallest deviation of a colour: points that coincide would have an unbounded density.
SMALLEST_SCALE = 0.05

Number = Annotated[float, Field(ge=-100, le=100, allow_inf_nan=False)]
Points = Annotated[list[tuple[Number, Number]], Field(max_length=MOST_POINTS)]
Labels = Annotated[list[Annotated[int, Field(ge=0, le=15)]], Field(max_length=MOST_POINTS)]
Chunk = Annotated[list[Annotated[int, Field(ge=0, lt=MOST_POINTS)]], Field(min_length=1)]
Seed = Annotated[int, Field(ge=0, lt=2**31)]

load = cache(pretrained)


class Clusters:
    """One visitor's points and streams. Public methods are messages; their parameters are the message's fields."""

    def __init__(self) -> None:
        self.models = {name: load(name) for name in MODELS}
        self._clear()

    def _clear(self) -> None:
        self._begin(torch.zeros(0, 2), torch.zeros(0, dtype=torch.long), None)

    def _begin(self, points: Tensor, labels: Tensor, truth: DiagonalMixture | None) -> None:
        self.points, self.labels, self.truth, self.count = points, labels, truth, 0
        self.streams = {name: model.stream(chunks=AVERAGE) for name, model in self.models.items()}

    @validate_call
    def draw(self, seed: Seed = 0, points: Annotated[int, Field(ge=1, le=MOST_POINTS)] = 256) -> dict[str, Any]:
        """Begin with a set from a random mixture; answers how well that mixture explains it."""
        drawn = sample(1, points, generator=torch.Generator().manual_seed(seed))
        self._begin(drawn.points[0], drawn.labels[0], drawn.truth)
        return {"points": self.points.tolist(), "labels": self.labels.tolist()} | self._oracle()

    @validate_call
    def put(self, points: Points, labels: Labels) -> dict[str, Any]:
        """Add points to the set, each with a colour. They are not streamed yet."""
        if len(points) != len(labels):
            raise DataError(f"every point has a label: got {len(points)} points and {len(labels)} labels")
        if len(self.points) + len(points) > MOST_POINTS:
            raise DataError(f"a set has at most {MOST_POINTS} points here")
        self.points = torch.cat([self.points, torch.tensor(points).reshape(-1, 2)])
        self.labels = torch.cat([self.labels, torch.tensor(labels, dtype=torch.long)])
        self.truth = None
        return self._oracle()

    @validate_call
    def clear(self) -> dict[str, Any]:
        """Begin with an empty set."""
        self._clear()
        return self._oracle()

    @validate_call
    def rewind(self) -> dict[str, Any]:
        """Begin the same set again, with nothing streamed."""
        self._begin(self.points, self.labels, self.truth)
        return {"count": 0}

    @validate_call
    def order(self, kind: str, seed: Seed = 0) -> dict[str, Any]:
        """The positions of each chunk of the set in one of the streams."""
        self._need_points()
        if kind not in STREAMS:
            raise DataError(f"unknown stream {kind[:40]!r}: choose one of {', '.join(STREAMS)}")
        chunks = stream_order(kind, self.labels, torch.Generator().manual_seed(seed))
        return {"chunks": [chunk.tolist() for chunk in chunks]}

    @validate_call
    def append(self, chunks: Annotated[list[Chunk], Field(max_length=MOST_POINTS)]) -> dict[str, Any]:
        """Stream chunks of the set; answers each model's prediction for all that has streamed in, and the whole set's NLL."""
        self._need_points()
        if any(position >= len(self.points) for chunk in chunks for position in chunk):
            raise DataError(f"the set has {len(self.points)} points: positions end at {len(self.points) - 1}")
        for chunk in chunks:
            for stream in self.streams.values():
                stream.update(self.points[chunk].unsqueeze(0))
            self.count += len(chunk)
        predictions = {name: self._mixture(stream.predict()) for name, stream in self.streams.items()} if self.count else {}
        return {"count": self.count, "models": predictions}

    @validate_call
    def compare(self, seed: Seed = 0) -> Iterator[dict[str, Any]]:
        """For each model, where the four streams end, and by how much they disagree."""
        self._need_points()
        for name, model in self.models.items():
            ends = stream_ends(model, self.points, self.labels, seed)
            predictions = {kind: self._mixture(end) for kind, end in ends.items()}
            yield {"model": name, "streams": predictions, "disagreement": disagreement(ends, self.points.unsqueeze(0))}

    def _mixture(self, mixture: DiagonalMixture) -> dict[str, Any]:
        return {"nll": float(mixture.nll(self.points.unsqueeze(0))), "mixture": as_json(mixture)}

    def _oracle(self) -> dict[str, Any]:
        """The NLL of the true mixture; of painted points, of the mixture of their colours."""
        known = self.truth or (by_colour(self.points, self.labels) if len(self.points) else None)
        return {"oracle": None if known is None else float(known.nll(self.points.unsqueeze(0)))}

    def _need_points(self) -> None:
        if not len(self.points):
            raise DataError("the set is empty: draw one, or paint some points")


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
