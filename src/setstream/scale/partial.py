"""Partial states: what any engine computes from its share of the elements, and how shares are cut.

share  ->  {set id: state of the share's elements}          in any process, in any order
states of one id add up, whoever made them; finalized once
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from setstream.data.dataset import SetDataset
from setstream.data.parquet import Group, Ids, ParquetSets
from setstream.data.source import SetSource
from setstream.encoder import SetEncoder
from setstream.state import State

# Elements in a share of a set that lies in a file of its own.
SHARE = 2**18


@dataclass(frozen=True)
class Range:
    """Some elements of one set."""

    source: SetSource
    start: int
    stop: int


Share = Range | Group


def shares(data: SetDataset | ParquetSets, size: int = SHARE) -> list[Share]:
    """All elements, cut into shares: ranges of sets in files of their own, row groups of tables."""
    if isinstance(data, ParquetSets):
        return list(data.groups())
    found: list[Share] = []
    for source in data:
        starts = range(0, max(len(source), 1), size)
        found += [Range(source, start, min(start + size, len(source))) for start in starts]
    return found


@torch.no_grad()
def absorb(encoder: SetEncoder, share: Share, chunk_size: int, sets: ParquetSets | None = None) -> Iterator[tuple[str, State]]:
    """The states of the sets that a share touches."""
    if isinstance(share, Group):
        assert sets is not None
        ids, features = sets.read(share)
        yield from by_set(encoder, ids, features, chunk_size)
        return
    device = encoder.home() or torch.device("cpu")
    state = encoder.empty(1)
    for start in range(share.start, share.stop, chunk_size):
        chunk = share.source.read(start, min(start + chunk_size, share.stop))
        state = encoder.update(state, chunk.unsqueeze(0).to(device))
    yield share.source.id, state


@torch.no_grad()
def by_set(encoder: SetEncoder, ids: Ids, features: Tensor, chunk_size: int) -> Iterator[tuple[str, State]]:
    """The states of rows (n, D) that belong to several sets: sorted by set, encoded some sets at a time."""
    device = encoder.home() or torch.device("cpu")
    lengths = np.bincount(ids.codes, minlength=len(ids.names)).tolist()
    rows = features.to(device)
    if len(ids.names) > 1:
        rows = rows[torch.from_numpy(np.argsort(ids.codes, kind="stable")).to(device)]
    position = 0
    for first, last in _together(lengths, chunk_size):
        own = lengths[first:last]
        if len(own) == 1:  # a large set by itself, chunk by chunk
            state = encoder.empty(1)
            for chunk in rows[position : position + own[0]].split(chunk_size):
                state = encoder.update(state, chunk.unsqueeze(0))
        else:
            ptr = torch.tensor([0, *own]).cumsum(0)
            state = encoder.update(None, (rows[position : position + sum(own)], ptr))
        position += sum(own)
        for number, name in enumerate(ids.names[first:last]):
            yield name, state[number]


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
