"""Partial states: what each engine computes from some of the elements.

    blocks of a share  ->  names of sets, and one state that holds a row for each          in any process, in any order

States of one set add up, wherever they were made; they are finalised once. Many rows are merged in one step.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from setstream._utils.prefetch import decoded_ahead
from setstream.data.collection import Block, Ids, SetCollection, Share, Skip
from setstream.errors import DataError, NonFiniteError, ShapeError
from setstream.models.encoder import SetEncoder
from setstream.models.tiling import tile_numbers
from setstream.pools.base import AVERAGE, Context
from setstream.sets.layout import Packed
from setstream.sets.partition import runs
from setstream.states.state import State
from setstream.stores.tiles import merge_rows

# Rows that wait until they are merged: fewer, if they take more bytes than this.
WAITING_ROWS, WAITING_BYTES = 256, 2**24
BAD = (DataError, NonFiniteError, ShapeError)  # errors of a single set
#: From the names of sets to the states with which a later pass over them begins.
Begin = Callable[[Sequence[str]], State]


class SetStates:
    """The states of sets by name. What is added waits, and is merged with the rest many rows at a time."""

    @torch.no_grad()
    def __init__(self, encoder: SetEncoder, chunks: str | None = AVERAGE) -> None:
        self.pool, self.one_chunk = encoder.pool, encoder.pool.refuse_chunks(chunks)
        self.row_bytes = encoder.empty(1).nbytes
        self.clear()

    def clear(self) -> None:
        """Forget all states."""
        self.names: list[str] = []  #: the sets that are merged
        self.state: State | None = None  #: a row for each of them
        self._waiting: list[tuple[Sequence[str], State]] = []
        self._rows = 0

    @property
    def nbytes(self) -> int:
        """The memory of the merged states; others do not take more."""
        return len(self.names) * self.row_bytes

    def add(self, names: Sequence[str], state: State) -> None:
        """Add a row for each of some names; a name may come more than once."""
        self._waiting.append((names, state))
        self._rows += len(names)
        if self._rows >= max(len(self.names), min(WAITING_ROWS, WAITING_BYTES // self.row_bytes)):
            self.merge()

    @torch.no_grad()
    def merge(self) -> None:
        """Merge what waits: `names` and `state` then hold everything."""
        if not self._waiting:
            return
        state = State.cat([one for _, one in self._waiting]).widened()
        names = [*self.names, *(name for some, _ in self._waiting for name in some)]
        rows = {name: row for row, name in enumerate(dict.fromkeys(names))}
        owner = [rows[name] for name in names]
        state = state if self.state is None else State.cat([self.state, state])
        if len(rows) < len(names):
            if self.one_chunk and bool((torch.bincount(torch.tensor(owner)[state.count.cpu() > 0]) > 1).any()):
                raise self.pool.inconsistent()
            state = merge_rows(state, owner)
        self.names, self.state, self._waiting, self._rows = list(rows), state, [], 0


def tile_name(name: str, tile: int) -> str:
    """The name of a tile of a set."""
    return f"{tile} {name}"


def split_name(name: str) -> tuple[int, str]:
    """The tile and the set of a `tile_name`."""
    tile, _, name = name.partition(" ")
    return int(tile), name


class PartialStates:
    """Adds blocks of elements to `states`; the encoder is in eval mode. `begin` is given in a later pass.

    With a `tile`, the names in `states` are those of tiles of sets (`tile_name`).
    `skip` is called with a set that cannot be read or encoded, and the reason; its entry in `states` is then invalid.
    """

    @torch.no_grad()
    def __init__(
        self,
        encoder: SetEncoder,
        chunk_size: int,
        skip: Skip,
        states: SetStates | None = None,
        begin: Begin | None = None,
        tile: float | None = None,
    ) -> None:
        self.encoder, self.chunk_size, self.skip, self.begin, self.tile = encoder, chunk_size, skip, begin, tile
        self.states = SetStates(encoder) if states is None else states
        self.device = encoder.device or torch.device("cpu")
        self._context = encoder.pool.prepare(encoder.empty(1))

    def add(self, block: Block) -> None:
        """Add the elements of a block; sets whose elements cannot be read or encoded go to `skip`."""
        ids, elements = block.ids, block.elements
        if isinstance(elements, DataError):
            for name in ids.names:
                self.skip(name, f"set {name!r}: {elements}")
            if not ids.names:
                self.skip(str(ids.place), f"{elements} (sets with rows there lack them)")
            return
        try:
            self.add_rows(ids, elements, block.times)
        except BAD:  # find the set: add one by one
            order, position = ids.order(), 0
            for name, length in zip(order.names, order.lengths, strict=True):
                rows = slice(position, position + length)
                some = rows if order.rows is None else torch.from_numpy(order.rows[rows])
                try:
                    self.add_rows(Ids.all(name, length), elements[some], None if block.times is None else block.times[some])
                except BAD as error:
                    place = ids.place if isinstance(ids.place, str) else ids.place[name]
                    self.skip(name, f"{place}, set {name!r}: {error}".removeprefix(", "))
                position += length

    @torch.no_grad()
    def add_rows(self, ids: Ids, elements: Tensor, times: Tensor | None = None) -> None:
        """Add elements (n, ...) of several sets, or none if it raises; small sets are encoded together."""
        if self.tile is not None and times is not None and len(ids):
            distinct, which = tile_numbers(times, self.tile, Packed(elements, [len(ids)])).unique(return_inverse=True)
            pairs, codes = np.unique(ids.codes * len(distinct) + which.numpy(), return_inverse=True)
            tiles = [divmod(pair, len(distinct)) for pair in pairs.tolist()]
            ids = Ids([tile_name(ids.names[code], int(distinct[number])) for code, number in tiles], codes)
        order, position = ids.order(), 0
        rows = None if order.rows is None else torch.from_numpy(order.rows)
        parts: list[tuple[list[str], State]] = []
        for run in runs(order.lengths, self.chunk_size):
            names, lengths, start = order.names[run], order.lengths[run], position
            position += sum(lengths)
            begun, context = self._begun(names)
            if position == start:
                parts.append((names, self.encoder.empty(len(names)) if self.begin is None else begun))
            elif position - start > self.chunk_size and self.states.one_chunk:
                raise self.encoder.pool.inconsistent()
            for low in range(start, position, self.chunk_size):  # more than one chunk only of a large set by itself
                high = min(low + self.chunk_size, position)
                chunk = elements[low:high] if rows is None else elements.index_select(0, rows[low:high])
                packed = Packed(chunk.to(self.device), lengths if len(lengths) > 1 else [high - low])
                parts.append((names, self.encoder.absorb(begun, context, packed)))
        for part in parts:
            self.states.add(*part)

    def _begun(self, names: list[str]) -> tuple[State, Context]:
        """The states without elements that some sets begin with, and the context of the pass."""
        if self.begin is not None:
            begun = self.begin(names)
            return begun, self.encoder.pool.prepare(begun)
        nothing = torch.zeros(len(names), dtype=torch.int64, device=self.device)
        return State({}, nothing, self.encoder.origin), self._context


class Encoded(NamedTuple):
    """The states of the sets that a share has elements of; and the sets that cannot be encoded, with the reason."""

    names: list[str]
    state: State | None
    problems: dict[str, str]


def encode_share(
    encoder: SetEncoder,
    data: SetCollection,
    share: Share,
    chunk_size: int,
    begin: Begin | None = None,
    tile: float | None = None,
) -> Encoded:
    """Encode one share."""
    problems: dict[str, str] = {}
    partial = PartialStates(
        encoder, chunk_size, lambda name, reason: problems.update({name: reason} | problems), begin=begin, tile=tile
    )
    for block in data.read_share(share, chunk_size, decoded_ahead(partial.device)):
        partial.add(block)
    partial.states.merge()
    names = partial.states.names
    good = [row for row, name in enumerate(names) if (name if tile is None else split_name(name)[1]) not in problems]
    state = partial.states.state[good] if partial.states.state is not None and good else None
    return Encoded([names[row] for row in good], state, problems)
