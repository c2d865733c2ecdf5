"""A part of a source: its elements n·i/k .. n·(i+1)/k, as a separate source. Nothing else of the file is read."""

import torch
from torch import Tensor

from setstream.errors import ConfigurationError
from setstream.sets.source import SetSource


class PartSource(SetSource):
    """Part `number` of `parts` contiguous parts of nearly equal size, which together are the whole.

    Example:
        >>> from setstream.data import ArraySource
        >>> source = ArraySource(torch.arange(5.0)[:, None], id="a")
        >>> [PartSource(source, number, 2).tensor().flatten().tolist() for number in (0, 1)]
        [[0.0, 1.0, 2.0], [3.0, 4.0]]
    """

    def __init__(self, source: SetSource, number: int, parts: int) -> None:
        if not 0 <= number < parts:
            raise ConfigurationError(f"there is no part {number} of {parts}: parts are counted from 0")
        super().__init__(source.id, source.label, source.metadata)
        self.source, self.number, self.parts = source, number, parts

    def _bounds(self) -> tuple[int, int]:
        """As torch.tensor_split cuts: the first parts may have one element more."""
        each, more = divmod(len(self.source), self.parts)
        start = self.number * each + min(self.number, more)
        return start, start + each + (self.number < more)

    def __len__(self) -> int:
        start, stop = self._bounds()
        return stop - start

    @property
    def shape(self) -> tuple[int, ...]:
        return self.source.shape

    @property
    def dtype(self) -> torch.dtype:
        return self.source.dtype

    def read(self, start: int, stop: int) -> Tensor:
        first, last = self._bounds()
        return self.source.read(first + start, min(first + stop, last))

    def take(self, index: Tensor) -> Tensor:
        return self.source.take(index + self._bounds()[0])

    def close(self) -> None:
        self.source.close()
