"""Pixels that stream into an image, completed live; painted-over or erased pixels are subtracted from the state."""

from functools import cache
from typing import Any

import torch
from torch import Tensor

from setstream.errors import PrecisionError
from setstream.models.model import SetModel
from setstream.models.stream import SetStream
from setstream.pools.base import AVERAGE
from setstream.serve.playground.messages import SIDE, Paint, Truth
from setstream.tasks.completion.field import Field
from setstream.tasks.completion.models import pretrained
from setstream.tasks.completion.task import as_pixels, places

MODELS = ("umbc+anchors", "umbc+set-transformer", "deepsets")

Colour = tuple[int, int, int]


class Picture:
    """One visitor's pixels."""

    truth: Tensor | None
    known: dict[int, Colour]

    def __init__(self) -> None:
        self.models = models()
        self.grid = places(SIDE, SIDE)
        self._begin()

    def picture(self, message: Truth) -> dict[str, Any]:
        """An empty picture."""
        self._begin()
        if message.colours is not None:
            self.truth = as_pixels(torch.tensor(message.colours, dtype=torch.uint8).T.reshape(1, 3, SIDE, SIDE))
        return {"count": 0, "models": {}}

    def paint(self, message: Paint) -> dict[str, Any]:
        """The picture that each model predicts now: mean and uncertainty of every pixel."""
        new = {place: (r, g, b) for place, r, g, b in message.pixels}
        gone = {place: self.known.pop(place) for place in {*message.erase, *new} if place in self.known}
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
        try:
            if self.known:
                stream.remove(self._rows(gone))
                return stream
        except PrecisionError:  # they had almost all of the weight: encode the rest anew
            pass
        stream = self.models[name].stream(chunks=AVERAGE)
        if self.known:
            stream.update(self._rows(self.known))
        return stream

    def _begin(self) -> None:
        self.truth = None
        self.known = {}
        self.streams = {name: model.stream(chunks=AVERAGE) for name, model in self.models.items()}

    def _rows(self, pixels: dict[int, Colour]) -> Tensor:
        """Pixels as the models take them: place and colour (1, n, 5)."""
        return torch.cat([self.grid[list(pixels)], torch.tensor(list(pixels.values())) / 255], dim=1).unsqueeze(0)

    def _image(self, stream: SetStream) -> dict[str, Any]:
        field: Field = stream.predict()
        with torch.no_grad():
            pixels = field.at(self.grid.unsqueeze(0))
            nll = None if self.truth is None else float(field.nll(self.truth))
        mean = (pixels.mean[0].clamp(0, 1) * 255).round().int().flatten().tolist()
        return {"mean": mean, "scale": pixels.stddev[0].mean(-1).mul(1000).round().int().tolist(), "nll": nll}


@cache
def models() -> dict[str, SetModel]:
    """The models, loaded for the first visitor."""
    return {name: pretrained(name) for name in MODELS}
