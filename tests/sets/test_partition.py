"""Which elements of sets in memory carry the gradient."""

import pytest
import torch

from setstream.sets.partition import distinct, drawn_elements


@pytest.mark.parametrize(("below", "wanted"), [(6, 2), (50, 2), (5, 5), (1, 1)])
def test_different_numbers_are_drawn_all_equally_often(below, wanted):
    rows = 20_000
    draw = distinct(rows, below, wanted, torch.Generator().manual_seed(0))
    assert draw.shape == (rows, wanted)
    assert not bool((draw.sort(1).values.diff(dim=1) == 0).any())
    share = wanted / below
    counts = draw.flatten().bincount(minlength=below)
    assert float((counts - rows * share).abs().max()) <= 4.5 * (rows * share * (1 - share)) ** 0.5


def test_as_many_elements_are_drawn_as_random_chunks_hold():
    lengths, generator, draws = [23, 0, 8, 23, 3], torch.Generator().manual_seed(0), 4000
    hits = torch.zeros(sum(lengths))
    for _ in range(draws):
        piece, factors = drawn_elements(lengths, 5, 2, generator)
        assert len(piece.positions) == sum(piece.lengths) == len(piece.positions.unique())
        assert factors == [2.5, 1.0, 1.0, 2.5, 1.0]
        assert piece.lengths[1:3] == [0, 8]
        assert {piece.lengths[0], piece.lengths[3]} <= {10, 8}  # without and with the last chunk, of three elements
        hits[piece.positions] += 1
    share = torch.tensor([2 / 5] * 23 + [1.0] * 8 + [2 / 5] * 23 + [1.0] * 3)
    assert bool(((hits / draws - share).abs() <= 4.5 * (share * (1 - share) / draws).sqrt() + 1e-6).all())
