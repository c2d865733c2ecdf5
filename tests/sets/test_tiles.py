"""Tiles: every element once, in order, and dense blocks that give it back."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from setstream.sets.layout import tiles

LENGTHS = st.lists(st.integers(0, 40), min_size=1, max_size=12)


@given(LENGTHS, st.integers(1, 50), st.integers(0, 3))
def test_tiles_hold_every_element_once_and_in_order(lengths, size, first):
    owner = [first + index for index, length in enumerate(lengths) for _ in range(length)]
    seen, end = [], 0
    for tile in tiles(lengths, size, first):
        assert tile.start == end
        assert 0 < tile.stop - tile.start <= (size if sum(lengths) > 2 * size else 2 * size)
        end = tile.stop
        seen += [tile.first + index for index, length in enumerate(tile.lengths) for _ in range(length)]
    assert seen == owner


@given(LENGTHS, st.integers(1, 50))
def test_a_set_that_fits_a_tile_is_not_cut_and_others_are_cut_evenly(lengths, size):
    parts = {index: [] for index in range(len(lengths))}
    for tile in tiles(lengths, size):
        for index, length in enumerate(tile.lengths):
            if length:
                parts[tile.first + index].append(length)
    for index, length in enumerate(lengths):
        assert len(parts[index]) == (-(-length // size) if sum(lengths) > 2 * size else length > 0)
        assert max(parts[index], default=0) - min(parts[index], default=0) <= 1


@given(LENGTHS, st.integers(1, 50))
def test_groups_are_the_features_of_their_sets(lengths, size):
    total = sum(lengths)
    features = torch.arange(float(total)).unsqueeze(1)
    starts = [sum(lengths[:index]) for index in range(len(lengths))]
    seen = torch.full((total,), -1.0)
    for tile in tiles(lengths, size):
        here = features[tile.start : tile.stop]
        for sets, where, block, mask in tile.groups(here):
            assert len(sets) == len(block)
            real = block.flatten(0, 1) if mask is None else block[mask]
            assert torch.equal(here[where], real)  # `where` says where the real elements came from
            seen[tile.start : tile.stop][where] = real.squeeze(1)
            for row, index in enumerate(sets):
                own = block[row] if mask is None else block[row][mask[row]]
                assert bool(((own >= starts[index]) & (own < starts[index] + lengths[index])).all())
    assert torch.equal(seen, features.squeeze(1))
