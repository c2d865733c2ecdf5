"""The tabs of the playground: points that stream into clusters, pixels that stream into a picture.

The methods of a tab are its messages, and their parameters are the message's fields. Four of the clustering models give one
answer for any order and any chunks; the Set Transformer, which is averaged over chunks, does not. One model needs several
passes, so the points that have arrived are kept and read again. Pixels that are painted over or erased are subtracted from the
state.
"""

from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import cache
from typing import Annotated, Any

import torch
from pydantic import Field, validate_call
from torch import Tensor

from setstream.errors import DataError, PrecisionError
from setstream.models.model import SetModel
from setstream.models.stream import SetStream
from setstream.pools.base import AVERAGE
from setstream.serve.answers import as_json
from setstream.tasks import clustering, completion
from setstream.tasks.clustering import DiagonalMixture, sample
from setstream.tasks.clustering.task import STREAMS, disagreement, stream_ends, stream_order
from setstream.tasks.completion import as_pixels, places
from setstream.tasks.registry import predict_in_chunks

CLUSTERING = ("umbc+em", "umbc+set-transformer", "deepsets", "sse", "set-transformer")
COMPLETION = ("umbc+anchors", "umbc+set-transformer", "deepsets")
MOST_POINTS = 2048
#: The smallest deviation of a colour: points that coincide would have an unbounded density.
SMALLEST_SCALE = 0.05
SIDE = 32
PIXELS = SIDE * SIDE
Number = Annotated[float, Field(ge=-100, le=100, allow_inf_nan=False)]
Points = Annotated[list[tuple[Number, Number]], Field(max_length=MOST_POINTS)]
Labels = Annotated[list[Annotated[int, Field(ge=0, le=15)]], Field(max_length=MOST_POINTS)]
Chunk = Annotated[list[Annotated[int, Field(ge=0, lt=MOST_POINTS)]], Field(min_length=1)]
Seed = Annotated[int, Field(ge=0, lt=2**31)]
Place = Annotated[int, Field(ge=0, lt=PIXELS)]
Byte = Annotated[int, Field(ge=0, le=255)]
Colour = tuple[Byte, Byte, Byte]
Painted = Annotated[tuple[tuple[Place, Byte, Byte, Byte], ...], Field(max_length=PIXELS)]
Erased = Annotated[tuple[Place, ...], Field(max_length=PIXELS)]
Whole = Annotated[list[Colour], Field(min_length=PIXELS, max_length=PIXELS)]


@cache
def load(pretrained: Callable[[str], SetModel], names: tuple[str, ...]) -> dict[str, SetModel]:
    """The models of a tab, loaded for the first visitor."""
    return {name: pretrained(name) for name in names}


class Clusters:
    """One visitor's points and streams."""

    def __init__(self) -> None:
        self.models = load(clustering.pretrained, CLUSTERING)
        self.clear()

    def _begin(self, points: Tensor, labels: Tensor, truth: DiagonalMixture | None) -> None:
        self.points, self.labels, self.truth, self.count = points, labels, truth, 0
        self.arrived: list[Tensor] = []
        self.streams = {name: m.stream(chunks=AVERAGE) for name, m in self.models.items() if m.encoder.passes == 1}

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
        self._begin(torch.zeros(0, 2), torch.zeros(0, dtype=torch.long), None)
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
        generator = torch.Generator().manual_seed(seed)
        return {"chunks": [chunk.tolist() for chunk in stream_order(kind, self.labels, generator)]}

    @validate_call
    def append(self, chunks: Annotated[list[Chunk], Field(max_length=MOST_POINTS)]) -> dict[str, Any]:
        """Stream chunks of the set; answers each model's prediction for all that has streamed in, and the whole set's NLL."""
        self._need_points()
        if any(position >= len(self.points) for chunk in chunks for position in chunk):
            raise DataError(f"the set has {len(self.points)} points: positions end at {len(self.points) - 1}")
        for chunk in chunks:
            self.arrived.append(self.points[chunk].unsqueeze(0))
            for stream in self.streams.values():
                stream.update(self.arrived[-1])
            self.count += len(chunk)
        predictions = {name: self._mixture(self._predict(name)) for name in self.models} if self.count else {}
        return {"count": self.count, "models": predictions}

    @validate_call
    def compare(self, seed: Seed = 0) -> Iterator[dict[str, Any]]:
        """For each model, where the four streams end, and by how much they disagree."""
        self._need_points()
        for name, model in self.models.items():
            ends = stream_ends(model, self.points, self.labels, seed)
            predictions = {kind: self._mixture(end) for kind, end in ends.items()}
            yield {"model": name, "streams": predictions, "disagreement": disagreement(ends, self.points.unsqueeze(0))}

    def _predict(self, name: str) -> DiagonalMixture:
        stream = self.streams.get(name)
        return stream.predict() if stream else predict_in_chunks(self.models[name], [torch.cat(self.arrived, dim=1)])

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
    """The likeliest mixture with one Gaussian for the points (N, 2) of each colour."""
    groups = [points[labels == label] for label in labels.unique()]
    shares = torch.tensor([[len(group) / len(points) for group in groups]])
    scales = torch.stack([group.std(0, correction=0) for group in groups]).clamp_min(SMALLEST_SCALE)
    return DiagonalMixture(shares.log(), torch.stack([group.mean(0) for group in groups]).unsqueeze(0), scales.unsqueeze(0))


class Picture:
    """One visitor's pixels."""

    def __init__(self) -> None:
        self.models = load(completion.pretrained, COMPLETION)
        self.grid = places(SIDE, SIDE)
        self.picture()

    @validate_call
    def picture(self, colours: Whole | None = None) -> dict[str, Any]:
        """Begin a picture; with all of its colours, row by row, if they are known."""
        self.truth = None if colours is None else as_pixels(torch.tensor(colours, dtype=torch.uint8).T.reshape(1, 3, SIDE, -1))
        self.known: dict[int, Colour] = {}
        self.arrived: list[Tensor] = []
        self.streams = {name: m.stream(chunks=AVERAGE) for name, m in self.models.items() if m.encoder.passes == 1}
        return {"count": 0, "models": {}}

    @validate_call
    def paint(self, pixels: Painted = (), erase: Erased = ()) -> dict[str, Any]:
        """Add pixels (place and colour; the last one counts), remove others; answers the image that each model predicts."""
        new = {place: (r, g, b) for place, r, g, b in pixels}
        gone = {place: self.known.pop(place) for place in {*erase, *new} if place in self.known}
        if gone:
            self.streams = {name: self._without(gone, name) for name in self.models}
        if new:
            for stream in self.streams.values():
                stream.update(self._rows(new))
            self.known |= new
        predictions = {name: self._image(stream) for name, stream in self.streams.items()} if self.known else {}
        return {"count": len(self.known), "models": predictions}

    def _without(self, gone: dict[int, Colour], name: str) -> SetStream:
        """A model's stream that has not seen these pixels."""
        stream = self.streams[name]
        with suppress(PrecisionError):  # if they had almost all of the weight, encode the rest anew
            if self.known:
                stream.remove(self._rows(gone))
                return stream
        stream = self.models[name].stream(chunks=AVERAGE)
        if self.known:
            stream.update(self._rows(self.known))
        return stream

    def _rows(self, pixels: dict[int, Colour]) -> Tensor:
        """Pixels as the models take them: place and colour (1, n, 5)."""
        return torch.cat([self.grid[list(pixels)], torch.tensor(list(pixels.values())) / 255], dim=1).unsqueeze(0)

    def _image(self, stream: SetStream) -> dict[str, Any]:
        field = stream.predict()
        with torch.no_grad():
            pixels = field.at(self.grid.unsqueeze(0))
            nll = None if self.truth is None else float(field.nll(self.truth))
        mean = (pixels.mean[0].clamp(0, 1) * 255).round().int().flatten().tolist()
        return {"mean": mean, "scale": pixels.stddev[0].mean(-1).mul(1000).round().int().tolist(), "nll": nll}
