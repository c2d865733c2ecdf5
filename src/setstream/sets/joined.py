"""Several sources as one set, without copying: the slides of a patient."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from setstream.errors import ShapeError
from setstream.sets.source import Metadata, SetSource


class JoinedSource(SetSource):
    """The elements of several sources, one after another.

    Example:
        >>> from setstream.data import ArraySource
        >>> patient = JoinedSource([ArraySource(torch.zeros(2, 3)), ArraySource(torch.ones(4, 3))], id="patient")
        >>> len(patient), patient.read(1, 3)[:, 0].tolist()
        (6, [0.0, 1.0])
    """

    def __init__(self, parts: Sequence[SetSource], id: str = "", label: Any = None, metadata: Metadata = None) -> None:
        super().__init__(id, label, metadata)
        self.parts = list(parts)

    def _example(self) -> SetSource:
        """A part that has elements, if there is one: an empty file need not know their shape."""
        return next((part for part in self.parts if len(part)), self.parts[0])

    def __len__(self) -> int:
        return sum(map(len, self.parts))

    @property
    def shape(self) -> tuple[int, ...]:
        return self._example().shape

    @property
    def dtype(self) -> torch.dtype:
        return self._example().dtype

    def read(self, start: int, stop: int) -> Tensor:
        pieces, begin, shape = [], 0, self.shape
        for part in self.parts:
            end = begin + len(part)
            if max(start, begin) < min(stop, end):
                if part.shape != shape:
                    raise ShapeError(
                        f"{self.id}: elements of {part.id} are {part.shape}; those of {self._example().id} are {shape}"
                    )
                pieces.append(part.read(max(start, begin) - begin, min(stop, end) - begin))
            begin = end
        return torch.cat(pieces) if len(pieces) > 1 else pieces[0] if pieces else self._example().read(0, 0)

    def close(self) -> None:
        for part in self.parts:
            part.close()
