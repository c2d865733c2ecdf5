"""Moments against numpy in float64, and what can be removed."""

import numpy as np
import pytest
import torch

import setstream as ss
from setstream.errors import RemovalError


def reference(rows, extrema):
    rows = rows.double().numpy()
    if not len(rows):
        return np.zeros((4 if extrema else 2) * rows.shape[1] + 1)
    parts = [rows.mean(0), rows.std(0), *([rows.min(0), rows.max(0)] if extrema else [])]
    return np.concatenate([*parts, [np.log1p(len(rows))]])


@pytest.mark.parametrize("extrema", [True, False])
def test_it_is_numpys_statistics_also_beside_a_large_mean(extrema):
    torch.manual_seed(0)
    x, mask = torch.randn(5, 9, 3) * torch.tensor([1.0, 1e-2, 100.0]) + torch.tensor([0.0, 1e3, -5.0]), torch.rand(5, 9) > 0.4
    mask[2] = False
    found = ss.Moments(extrema=extrema)(x, mask)
    wanted = np.stack([reference(row[real], extrema) for row, real in zip(x, mask, strict=True)])
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-6)
    assert found.shape[1] == ss.Moments(extrema=extrema).out_dim(3)
    assert ss.Moments(extrema=extrema)(x[:, :0]).shape == found.shape


def test_sums_can_be_removed_and_decay_and_extrema_cannot():
    x = torch.randn(2, 30, 3)
    encoder = ss.SetEncoder(torch.nn.Identity(), ss.Moments(extrema=False))
    state, part = encoder.update(None, x), encoder.update(None, x[:, :10])
    torch.testing.assert_close(encoder.finalize(state - part), ss.Moments(extrema=False)(x[:, 10:]))
    faded = encoder.finalize(state * 0.5)
    torch.testing.assert_close(faded[:, :-1], encoder.finalize(state)[:, :-1])  # half of the weight is half of the size
    torch.testing.assert_close(faded[:, -1].expm1(), torch.full((2,), 15.0))
    whole = ss.SetEncoder(torch.nn.Identity(), ss.Moments())
    with pytest.raises(RemovalError, match="cannot be removed from a m"):
        whole.update(None, x) - whole.update(None, x[:, :10])


def test_a_feature_that_does_not_vary_has_a_finite_gradient():
    x = torch.full((1, 4, 2), 0.1, requires_grad=True)
    ss.Moments()(x).sum().backward()
    assert torch.isfinite(x.grad).all()
