"""Window: the last elements of a stream only, for every pool, without subtraction.

    tile k      the state of the elements with k·tile <= t < (k + 1)·tile         t: a time, or the number of the element
    window      Σ tiles head - n + 1 .. head                                      n = length / tile, head: the newest tile

Subtracting old elements needs sums that are exact, which maxima and sharp attention do not have. A window merges the states of
its tiles instead (`sliding_sum.py`). It is exact at the granularity of a tile: it never holds an element older than its
length, and holds every element younger than its length less one tile.
"""

from __future__ import annotations

import hashlib
import json
import time as clock
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch
from torch import Tensor

from setstream._utils.atomic import whole_or_nothing
from setstream.errors import ConfigurationError, LateError, MismatchError, ShapeError, StateFormatError
from setstream.models.sliding_sum import NEVER, SlidingSum
from setstream.models.stream import evaluating
from setstream.models.tiling import Times, states_by_tile, tile_number, tile_numbers
from setstream.sets.layout import Packed, Sets, pack
from setstream.states.serialization import header_of
from setstream.states.state import State

if TYPE_CHECKING:
    from setstream.models.model import SetModel

Late = Literal["drop", "raise"]
FORMAT = b"setstream.window 1\n"


class Window:
    """The last elements of a stream, and the model's prediction for them: `model.window(...)`.

    Always runs in eval mode and without a graph. A chunk costs one pass of the encoder. Tiles are merged when a state is asked
    for: at most three merges per tile on average. Memory is at most two states per tile, and one more per tile of each shorter
    length that is asked for.

    Args:
        model: The model that predicts.
        count: The length in elements: the last `count` that came.
        span: The length in time instead, in the unit of the elements' times (seconds, where no times are given).
        tile: What enters and leaves together, in the same unit; the length is a multiple of it.
        late: What to do with elements that are older than the window when they come: "drop" them and count them in
            `dropped`, or "raise" a LateError and add nothing of the chunk.
        chunks: "average" lets a model that is not consistent average over its chunks; otherwise a ConsistencyError.

    Example:
        >>> import torch, setstream as ss
        >>> encoder = ss.SetEncoder(torch.nn.Linear(2, 8), ss.DeepSets("max"))
        >>> model = ss.SetModel(encoder, torch.nn.Linear(8, 1)).eval()
        >>> week = model.window(span=7 * 86_400, tile=3_600)
        >>> x = torch.randn(1, 200, 2)
        >>> week.update(x, time=torch.arange(200) * 3_600)           # one element per hour
        >>> week.state.count, week.last(86_400).count
        (tensor([168]), tensor([24]))
        >>> torch.allclose(week.predict(86_400), model(x[:, -24:]), atol=1e-6)
        True
        >>> week.update(x[:, :1], time=-3_600)                       # older than the window
        >>> week.dropped
        1
    """

    def __init__(
        self,
        model: SetModel,
        *,
        count: int | None = None,
        span: float | None = None,
        tile: float,
        late: Late = "drop",
        chunks: str | None = None,
    ) -> None:
        if (count is None) == (span is None):
            raise ConfigurationError(f"a window has a count or a span, and not both; got count={count}, span={span}")
        if late not in get_args(Late):
            raise ConfigurationError(f"late is one of {get_args(Late)}; got {late!r}")
        model.encoder.check_one_pass("a window, which keeps states and not elements")
        if model.encoder.pool.refuse_chunks(chunks):
            raise model.encoder.pool.inconsistent()
        self.model, self.tile, self.late, self.chunks = model, tile, late, chunks
        #: Whether its length is a number of elements, not a span of time.
        self.by_count = span is None
        #: The length, in elements or in time.
        self.length: float = (count or 0) if span is None else span
        self._tiles: dict[int, State] = {}
        self._head = NEVER  # the newest tile
        self._seen = 0  # elements per set, in a window by count
        self._batch: int | None = None
        #: Elements that came too late, of all sets.
        self.dropped = 0
        self._sums = {self._in_tiles(self.length): SlidingSum(self._in_tiles(self.length))}
        self._totals: dict[int, State] = {}

    def update(self, chunk: Sets, time: Times | None = None, mask: Tensor | None = None) -> None:
        """Add elements (B, n, ...), or of any other layout. The first chunk decides how many sets there are.

        The elements of a chunk come together: those that would leave the window before the chunk ends are not late.

        Args:
            chunk: The elements.
            time: When they happened: one time, or one per element in the layout of the chunk (float64 or integers). None:
                now, in seconds since 1970. In a window by count it must be None.
            mask: (B, n), True for real elements.

        Raises:
            LateError: If elements are older than the window, and `late` is "raise".
        """
        packed = pack(chunk, mask)
        if self._batch not in (None, len(packed)):
            raise ShapeError(f"the window holds {self._batch} sets, the chunk {len(packed)}: one chunk per set is needed")
        numbers = self._numbers(packed, time, mask)
        first, head = self._first(self._head), max(self._head, int(numbers.max()) if len(numbers) else NEVER)
        late = int((numbers < first).sum())
        if late and self.late == "raise":
            raise LateError(
                f"{late} of {len(numbers)} elements are older than the window, which begins at {first * self.tile:g}; nothing "
                "was added. A longer span admits them; late='drop' leaves them out and counts them"
            )
        seen = self._seen + packed.lengths[0]
        packed, numbers = _select(packed, numbers, numbers >= self._first(head))
        with evaluating(self.model):
            parts = states_by_tile(self.model.encoder, packed, numbers) if len(numbers) else {}
        self._batch, self._seen, self.dropped = len(packed), seen, self.dropped + late
        self._add(parts, head)

    def advance(self, time: float) -> None:
        """Move the window to a time without adding elements. A time before its newest changes nothing."""
        if self.by_count:
            raise ConfigurationError("a window by count moves with its elements: it has no time to advance to")
        self._add({}, tile_number(time, self.tile))

    def merge(self, other: Window) -> None:
        """Add the elements of another machine's window of the same model, tile by tile. The other stays."""
        if other is self:
            raise MismatchError("a window cannot be merged into itself: every element would count twice")
        if self.by_count or other.by_count:
            raise ConfigurationError("windows by count cannot be merged: which elements of both are the last is not known")
        if other.tile != self.tile:
            raise MismatchError(f"windows of one tile can be merged; these have {self.tile:g} and {other.tile:g}")
        if other._batch is not None and self._batch not in (None, other._batch):
            raise ShapeError(f"cannot merge windows of {self._batch} and {other._batch} sets")
        with evaluating(self.model):
            for state in other._tiles.values():
                self.model.encoder.check_state(state)
        self._batch, self.dropped = self._batch or other._batch, self.dropped + other.dropped
        self._add(other._tiles, other._head)

    @property
    def state(self) -> State:
        """The state of all elements in the window."""
        return self.last(self.length)

    def last(self, length: float) -> State:
        """The state of the last elements or time of this length, which is a multiple of the tile and at most the window's."""
        tiles = self._in_tiles(length)
        if length > self.length:
            raise ConfigurationError(f"the window has a length of {self.length:g}; {length:g} is more than it keeps")
        if tiles not in self._totals:
            sums = self._sums.setdefault(tiles, SlidingSum(tiles))
            with evaluating(self.model):
                total = sums.total(self._tiles, self._head)
                self._totals[tiles] = self.model.encoder.empty(self._batch or 1) if total is None else total
        return self._totals[tiles]

    def predict(self, length: float | None = None) -> Any:
        """The model's output for the elements in the window, or for the last of them (`last`)."""
        state = self.state if length is None else self.last(length)
        with evaluating(self.model):
            return self.model.finalize(state, chunks=self.chunks)

    def to_bytes(self) -> bytes:
        """The window as bytes, with a checksum; `from_bytes` reads them."""
        batch = self._batch or 1
        states = [self._tiles[number] for number in sorted(self._tiles)]
        with evaluating(self.model):
            state = (State.cat(states) if states else self.model.encoder.empty(batch)).to_bytes()
        kept: dict[str, Any] = {"length": self.length, "by_count": self.by_count, "tile": self.tile, "late": self.late}
        kept |= {"chunks": self.chunks, "tiles": sorted(self._tiles), "head": self._head, "seen": self._seen}
        header = json.dumps(kept | {"batch": self._batch, "dropped": self.dropped}).encode()
        return b"".join([FORMAT, _checksum(header, state), b"\n", header, b"\n", state])

    @classmethod
    def from_bytes(cls, data: bytes, model: SetModel) -> Window:
        """The window in `data`, for the model that made it; StateFormatError if they are damaged."""
        if not data.startswith(FORMAT):
            raise StateFormatError("these bytes are not a window: expected what Window.to_bytes() or Window.save() wrote")
        checksum, header, state = [*data[len(FORMAT) :].split(b"\n", 2), b"", b""][:3]
        if checksum != _checksum(header, state):
            raise StateFormatError("the window is damaged: its checksum does not match its contents")
        try:
            kept = json.loads(header)
            length = {"count" if kept["by_count"] else "span": kept["length"]}
            window = cls(model, **length, tile=kept["tile"], late=kept["late"], chunks=kept["chunks"])
            window._head, window._seen, window._batch = kept["head"], kept["seen"], kept["batch"]
            window.dropped = kept["dropped"]
        except (ValueError, KeyError, TypeError) as error:
            raise StateFormatError(f"the header of the window cannot be read, it was edited: {error!r}") from None
        states = State.from_bytes(state).to(model.encoder.device or torch.device("cpu"))
        with evaluating(model):
            model.encoder.check_state(states)
        rows = torch.arange(len(states), device=states.device).split(window._batch or 1)
        window._tiles = {
            number: states[some] for number, some in zip(kept["tiles"], rows, strict=False)
        }  # no tiles: an empty row
        return window

    def save(self, path: str | Path) -> None:
        """Write the window to a file atomically: a crash leaves the old file or the new one."""
        with whole_or_nothing(Path(path)) as hidden:
            hidden.write_bytes(self.to_bytes())

    @classmethod
    def load(cls, path: str | Path, model: SetModel) -> Window:
        """Read a window that `save` wrote."""
        return cls.from_bytes(Path(path).read_bytes(), model)

    def __repr__(self) -> str:
        kind = "count" if self.by_count else "span"
        return f"Window({kind}={self.length:g}, tile={self.tile:g}, {len(self._tiles)} tiles, dropped={self.dropped})"

    def _numbers(self, packed: Packed, time: Times | None, mask: Tensor | None) -> Tensor:
        """The tile of each element."""
        if not self.by_count:
            return tile_numbers(clock.time() if time is None else time, self.tile, packed, mask)
        if time is not None:
            raise ConfigurationError("a window by count takes elements in the order in which they come, without a time")
        if len(set(packed.lengths)) > 1:
            raise ShapeError(
                f"a window by count gets as many elements for each of its sets; got {packed.lengths[:8]}. Use a window per set"
            )
        return (torch.arange(self._seen, self._seen + packed.lengths[0]) // int(self.tile)).repeat(len(packed))

    def _add(self, parts: dict[int, State], head: int) -> None:
        """Move the newest tile to `head`, unless it is further already, and add parts to the tiles that are in the window."""
        self._totals.clear()
        left = self._first(self._head)
        self._head = max(self._head, head)
        first = self._first(self._head)
        for number in range(left, first) if first - left <= len(self._tiles) else [one for one in self._tiles if one < first]:
            self._tiles.pop(number, None)
        for number, part in parts.items():
            if number >= first:
                self._tiles[number] = self._tiles[number] + part if number in self._tiles else part
                for sums in self._sums.values():
                    sums.add(number, part)

    def _first(self, head: int) -> int:
        """The oldest tile in the window whose newest is `head`."""
        return head - self._in_tiles(self.length) + 1

    def _in_tiles(self, length: float) -> int:
        tiles = round(length / self.tile) if self.tile > 0 else 0
        whole = not self.by_count or (isinstance(length, int) and isinstance(self.tile, int))
        if tiles < 1 or abs(length / self.tile - tiles) > 1e-9 * tiles or not whole:
            kind = "whole numbers of elements" if self.by_count else "positive"
            raise ConfigurationError(
                f"a length is a multiple of the tile, and both are {kind}; got a length of {length} and a tile of {self.tile}"
            )
        return tiles


def _select(packed: Packed, numbers: Tensor, keep: Tensor) -> tuple[Packed, Tensor]:
    """Some of the elements, and their tiles."""
    if bool(keep.all()):
        return packed, numbers
    lengths = [int(part.sum()) for part in keep.split(packed.lengths)]
    return Packed(packed.elements[keep.to(packed.elements.device)], lengths), numbers[keep]


def _checksum(header: bytes, state: bytes) -> bytes:
    """Of the header, and of the state's header, which holds its checksum."""
    return hashlib.blake2b(header + header_of(state), digest_size=16).hexdigest().encode()
