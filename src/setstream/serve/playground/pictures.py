"""Pixels that stream into an image, completed live; painted-over or erased pixels are subtracted from the state."""

from contextlib import suppress
from functools import cache
from typing import Annotated, Any

import torch
from pydantic import Field, validate_call
from torch import Tensor

from setstream.errors import PrecisionError
from setstream.models.stream import SetStream
from setstream.pools.base import AVERAGE
from setstream.tasks.completion.pretrained import pretrained
from setstream.tasks.completion.task import as_pixels, places

MODELS = ("umbc+anchors", "umbc+set-transformer", "deepsets")
SIDE = 32
PIXELS = SIDE * SIDE

Place = Annotated[int, Field(ge=0, lt=PIXELS)]
Byte = Annotated[int, Field(ge=0, le=255)]
Colour = tuple[Byte, Byte, Byte]
Painted = Annotated[tuple[tuple[Place, Byte, Byte, Byte], ...], Field(max_length=PIXELS)]
Erased = Annotated[tuple[Place, ...], Field(max_length=PIXELS)]
Whole = Annotated[list[Colour], Field(min_length=PIXELS, max_length=PIXELS)]

load = cache(pretrained)


class Picture:
    """One visitor's pixels. Public methods are messages; their parameters are the message's fields."""

    def __init__(self) -> None:
        self.models = {name: load(name) for name in MODELS}
        self.grid = places(SIDE, SIDE)
        self.picture()

    @validate_call
    def picture(self, colours: Whole | None = None) -> dict[str, Any]:
        """Begin a picture; with all of its colours, row by row, if they are known."""
        pixels = None if colours is None else torch.tensor(colours, dtype=torch.uint8).T.reshape(1, 3, SIDE, SIDE)
        self.truth = None if pixels is None else as_pixels(pixels)
        self.known: dict[int, Colour] = {}
        self.streams = {name: model.stream(chunks=AVERAGE) for name, model in self.models.items()}
        return {"count": 0, "models": {}}

    @validate_call
    def paint(self, pixels: Painted = (), erase: Erased = ()) -> dict[str, Any]:
        """Add pixels, place and colour, and remove others; answers mean and uncertainty of every pixel, by each model.

        A pixel that is painted twice has the last colour.
        """
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
