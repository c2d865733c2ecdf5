"""Partial states: what each engine computes from some of the elements.

    blocks of a share  ->  {set id: state of the share's elements}          in any process, in any order

States of one set add up, wherever they were made; they are finalised once.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from setstream.data.collection import Block, Ids, SetCollection, Share, Skip
from setstream.errors import DataError, NonFiniteError, ShapeError
from setstream.models.encoder import SetEncoder
from setstream.pools.base import AVERAGE
from setstream.sets.layout import Packed
from setstream.sets.partition import runs
from setstream.states.state import State

MERGED_TOGETHER = 256  # sets whose states are merged in one step: states of this many are in memory twice
Earlier = Callable[[str], State | None]
Encoded = tuple[dict[str, State], dict[str, str]]
BAD = (DataError, NonFiniteError, ShapeError)  # errors of a single set


class PartialStates:
    """The states of sets, to which blocks of elements are added; `encoder` is in eval mode, `chunks` as in its `update`.

    `skip` is called with a set that cannot be read or encoded, and the reason; its entry in `states` is then invalid.
    `earlier` gives the state that a set has before its first elements here; None if there is none.
    """

    @torch.no_grad()
    def __init__(
        self, encoder: SetEncoder, chunk_size: int, skip: Skip, chunks: str | None = AVERAGE, earlier: Earlier | None = None
    ) -> None:
        self.encoder, self.chunk_size, self.skip, self.chunks, self.earlier = encoder, chunk_size, skip, chunks, earlier
        self.states: dict[str, State] = {}
        self.device = encoder.device or torch.device("cpu")
        self._blank = encoder.empty(1)
        self._context = encoder.pool.prepare(self._blank)

    def add(self, block: Block) -> None:
        """Add the elements of a block; sets whose elements cannot be read or encoded go to `skip`."""
        ids, elements = block.ids, block.elements
        if isinstance(elements, DataError):
            for name in ids.names:
                self.skip(name, f"set {name!r}: {elements}")
            if not ids.names:
                self.skip(ids.place, f"{elements} (sets with rows there lack them)")
            return
        try:
            self.add_rows(ids, elements)
        except BAD:  # find the set: add one by one
            order, position = ids.order(), 0
            place = f"{ids.place}, " if ids.place else ""
            for name, length in zip(order.names, order.lengths, strict=True):
                rows = slice(position, position + length)
                alone = elements[rows] if order.rows is None else elements[torch.from_numpy(order.rows[rows])]
                try:
                    self.add_rows(Ids.all(name, length), alone)
                except BAD as error:
                    self.skip(name, f"{place}set {name!r}: {error}")
                position += length

    @torch.no_grad()
    def add_rows(self, ids: Ids, elements: Tensor) -> None:
        """Add elements (n, ...) of several sets, or none if it raises; small sets are encoded and merged together."""
        encoder, order = self.encoder, ids.order()
        rows = None if order.rows is None else torch.from_numpy(order.rows)

        def absorb(start: int, lengths: list[int]) -> State:
            stop = start + sum(lengths)
            chunk = elements[start:stop] if rows is None else elements.index_select(0, rows[start:stop])
            return encoder.absorb(self._blank, self._context, Packed(chunk.to(self.device), lengths))

        position = merged = 0
        waiting: list[State] = []
        changed: dict[str, State] = {}
        for run in runs(order.lengths, self.chunk_size):
            lengths, last = order.lengths[run], run.stop
            if len(lengths) == 1:  # a large set by itself, chunk by chunk
                if lengths[0] > self.chunk_size and encoder.pool.refuse_chunks(self.chunks):
                    raise encoder.pool.inconsistent()
                starts = range(0, lengths[0], self.chunk_size)
                parts = (absorb(position + start, [min(self.chunk_size, lengths[0] - start)]) for start in starts)
                waiting.append(sum(parts, self._blank))
            else:
                waiting.append(absorb(position, lengths))
            position += sum(lengths)
            if last - merged >= MERGED_TOGETHER or last == len(order.names):
                names, merged = order.names[merged:last], last
                before = State.cat([self._before(name) for name in names])
                changed.update(zip(names, encoder.merge(before, State.cat(waiting), chunks=self.chunks), strict=True))
                waiting = []
        self.states.update(changed)

    def _before(self, name: str) -> State:
        if name in self.states:
            return self.states[name]
        state = None if self.earlier is None else self.earlier(name)
        return self._blank if state is None else state.to(self.device)


def encode_share(encoder: SetEncoder, data: SetCollection, share: Share, chunk_size: int) -> Encoded:
    """The states of the sets that a share has elements of; and the sets that cannot be encoded, with the reason."""
    problems: dict[str, str] = {}
    partial = PartialStates(encoder, chunk_size, lambda name, reason: problems.update({name: problems.get(name, reason)}))
    for block in data.read_share(share, chunk_size):
        partial.add(block)
    return {name: state for name, state in partial.states.items() if name not in problems}, problems
