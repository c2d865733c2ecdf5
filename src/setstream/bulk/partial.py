"""Partial states: what any engine computes from its share of the elements, and how shares are cut.

share  ->  {set id: state of the share's elements}          in any process, in any order
states of one id add up, whoever made them; finalized once
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from setstream.data.dataset import SetDataset
from setstream.data.parquet import Group, ParquetSets
from setstream.data.tables import Ids
from setstream.errors import DataError, NonFiniteError, ShapeError
from setstream.models.encoder import SetEncoder
from setstream.pools.base import AVERAGE
from setstream.sets.layout import Packed
from setstream.sets.source import SetSource
from setstream.states.state import State

# Elements in a share of a set that lies in a file of its own.
SHARE = 2**18
# Sets whose states are merged in one step: states of this many are in memory twice.
MERGED_TOGETHER = 256


@dataclass(frozen=True)
class Range:
    """Some elements of one set."""

    source: SetSource
    start: int
    stop: int


@dataclass(frozen=True)
class Problem:
    """Why a set is left out."""

    text: str


# What can be wrong with a set itself.
BAD = (DataError, NonFiniteError, ShapeError)
# Called with a set that cannot be encoded and what is wrong with it; raises unless such sets may be left out.
Skip = Callable[[str, str], None]
Share = Range | Group
Progress = Callable[[int, int], None]  # elements so far; sets so far, of a table rows


def shares(
    data: SetDataset | ParquetSets, size: int = SHARE, skip: Skip | None = None, files: Callable[[str], None] | None = None
) -> list[Share]:
    """All elements, cut into shares: ranges of sets in files of their own, row groups of tables."""
    if isinstance(data, ParquetSets):
        return list(data.groups(files))
    found: list[Share] = []
    for source in data:
        try:
            length = len(source)
        except DataError as error:
            if skip is None:
                raise
            skip(source.id, str(error))
            continue
        starts = range(0, max(length, 1), size)
        found += [Range(source, start, min(start + size, length)) for start in starts]
    return found


@torch.no_grad()
def absorb(
    encoder: SetEncoder, share: Share, chunk_size: int, sets: ParquetSets | None = None
) -> Iterator[tuple[str, State | Problem]]:
    """The states of the sets that a share touches, or what is wrong with them."""
    if isinstance(share, Group):
        assert sets is not None
        totals: dict[str, State] = {}
        problems: dict[str, Problem] = {}
        for ids, features in sets.read([share], lenient=True):
            add_good_rows(encoder, ids, features, chunk_size, totals, lambda name, text: problems.update({name: Problem(text)}))
        yield from (totals | problems).items()
        return
    device = encoder.device or torch.device("cpu")
    state = encoder.empty(1)
    try:
        for start in range(share.start, share.stop, chunk_size):
            chunk = share.source.read(start, min(start + chunk_size, share.stop))
            state = encoder.update(state, chunk.unsqueeze(0).to(device), chunks=AVERAGE)
        yield share.source.id, state
    except BAD as error:
        yield share.source.id, Problem(described(share.source, error))


def described(source: SetSource, error: Exception) -> str:
    """What is wrong with a set, with its name."""
    return str(error) if isinstance(error, DataError) else f"{getattr(source, 'path', source.id)}: {error}"


def add_good_rows(
    encoder: SetEncoder,
    ids: Ids,
    features: Tensor | DataError,
    chunk_size: int,
    totals: dict[str, State],
    skip: Skip,
    earlier: Callable[[str], State | None] = lambda _: None,
    chunks: str | None = AVERAGE,
) -> None:
    """As `add_rows`; sets whose rows cannot be read or encoded go to `skip`, and what `totals` holds of them means nothing."""
    if isinstance(features, DataError):
        for name in ids.names or [ids.place]:
            skip(name, f"set {name!r}: {features}" if ids.names else f"{features} (sets with rows there lack them)")
        return
    try:
        add_rows(encoder, ids, features, chunk_size, totals, earlier, chunks)
    except BAD:  # of which set? one by one
        order, position = ids.order(), 0
        for name, length in zip(order.names, order.lengths, strict=True):
            rows = slice(position, position + length)
            own = features[rows] if order.rows is None else features[torch.from_numpy(order.rows[rows])]
            try:
                add_rows(encoder, Ids.all(name, length), own, chunk_size, totals, earlier, chunks)
            except BAD as error:
                skip(name, f"{ids.place}, set {name!r}: {error}")
            position += length


@torch.no_grad()
def add_rows(
    encoder: SetEncoder,
    ids: Ids,
    features: Tensor,
    chunk_size: int,
    totals: dict[str, State],
    earlier: Callable[[str], State | None] = lambda _: None,
    chunks: str | None = AVERAGE,
) -> None:
    """Add rows (n, D) of several sets to the sets' states in `totals`; a set that is new there begins with its `earlier` state.

    chunks: as `SetEncoder.update` has it.

    All rows, or none if it raises. Set by set: sets that fit a chunk together are encoded in one step; some hundred sets are
    added to what they were in one.
    """
    device = encoder.device or torch.device("cpu")
    order = ids.order()
    rows = None if order.rows is None else torch.from_numpy(order.rows)
    blank = encoder.empty(1)
    context = encoder.pool.prepare(blank)

    def absorb(start: int, lengths: list[int]) -> State:
        stop = start + sum(lengths)
        own = features[start:stop] if rows is None else features.index_select(0, rows[start:stop])
        packed = Packed(own.to(device), lengths)
        return encoder.absorb(blank, context, packed, encoder.features(packed.elements))

    position = merged = 0
    waiting: list[State] = []
    changed: dict[str, State] = {}
    for first, last in _together(order.lengths, chunk_size):
        lengths = order.lengths[first:last]
        if len(lengths) == 1:  # a large set by itself, chunk by chunk
            if lengths[0] > chunk_size and encoder.pool.refuse_chunks(chunks):
                raise encoder.pool.inconsistent()
            pieces = [min(chunk_size, lengths[0] - start) for start in range(0, lengths[0], chunk_size)]
            waiting.append(sum((absorb(position + number * chunk_size, [n]) for number, n in enumerate(pieces)), blank))
        else:
            waiting.append(absorb(position, lengths))
        position += sum(lengths)
        if last - merged >= MERGED_TOGETHER or last == len(order.names):
            names, merged = order.names[merged:last], last
            before = State.cat([_before(encoder, name, totals, earlier) for name in names])
            changed.update(zip(names, encoder.merge(before, State.cat(waiting), chunks=chunks), strict=True))
            waiting = []
    totals.update(changed)


def _before(encoder: SetEncoder, name: str, totals: dict[str, State], earlier: Callable[[str], State | None]) -> State:
    """What is known of a set."""
    if name in totals:
        return totals[name]
    found = earlier(name)
    return encoder.empty(1) if found is None else found.to(encoder.device or "cpu")


def _together(lengths: list[int], size: int) -> Iterator[tuple[int, int]]:
    """Runs of sets with at most `size` elements together; larger sets alone."""
    first, total = 0, 0
    for number, length in enumerate(lengths):
        if number > first and total + length > size:
            yield first, number
            first, total = number, 0
        total += length
    if lengths:
        yield first, len(lengths)
