"""Standardise: one pass over sets in memory or in files, the numbers of all elements together."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import setstream as ss
from setstream.errors import NonFiniteError, ShapeError


@given(
    sizes=st.lists(st.integers(0, 40), min_size=1, max_size=6).filter(any), chunk=st.integers(1, 50), seed=st.integers(0, 99)
)
def test_mean_and_deviation_are_those_of_all_elements_in_any_chunks(sizes, chunk, seed):
    rng = np.random.default_rng(seed)
    sets = [rng.normal([1e4, -3.0, 0.0], [2.0, 1e-3, 50.0], (size, 3)) for size in sizes]
    rows = np.concatenate(sets)
    layer = ss.nn.Standardise(3).fit(sets, chunk)
    deviation = rows.std(0)
    np.testing.assert_allclose(layer.mean, rows.mean(0), rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(layer.scale, np.where(deviation > 0, deviation, 1.0), rtol=1e-5)


def test_arrays_tensors_and_files_may_stand_side_by_side(tmp_path):
    x = torch.randn(30, 2, requires_grad=True)
    np.save(tmp_path / "a.npy", x.detach().numpy()[10:20])
    layer = ss.nn.Standardise(2).fit([x[:10], *ss.data.open(tmp_path / "a.npy"), x.detach().numpy()[20:]], 7)
    torch.testing.assert_close(layer.mean, x.detach().mean(0))
    assert not layer.mean.requires_grad
    encoder = ss.SetEncoder(torch.nn.Sequential(layer, torch.nn.Linear(2, 4)), ss.DeepSets("mean", 4))
    assert encoder.width() == 2
    torch.testing.assert_close(encoder.phi[0](x).mean(0).detach(), torch.zeros(2), atol=1e-5, rtol=0)


def test_features_that_hardly_vary_are_left_as_they_are():
    sets = [np.stack([np.full(9, 0.1), np.linspace(0, 1e-50, 9)], 1)]
    assert ss.nn.Standardise(2).fit(sets).scale.tolist() == [1.0, 1.0]


def test_what_is_wrong_is_said():
    with pytest.raises(ShapeError, match=r"takes elements of width 3; those of set 1 have shape \(2,\)"):
        ss.nn.Standardise(3).fit([np.ones((4, 3)), np.ones((4, 2))])
    for nothing in ([], [np.zeros((0, 3))]):
        with pytest.raises(ShapeError, match="mean and scale need elements"):
            ss.nn.Standardise(3).fit(nothing)
    with pytest.raises(NonFiniteError, match="NaN or infinity"):
        ss.nn.Standardise(1).fit([np.array([[1.0], [np.nan]])])
