"""Sums by torch's fused attention: sets of 32 elements and more, softmax, no graph."""

import math

import pytest
import torch

import setstream as ss
from setstream.errors import NonFiniteError
from setstream.pools.activations import ACTIVATIONS
from setstream.pools.kernels.block_sums import fused_sums, fuses

SOFTMAX = ACTIVATIONS["softmax"]


def reference(queries, rows):
    """Means and log-sums of exponentials, in float64."""
    logits = queries.double() @ rows.double().mT
    return logits.softmax(-1) @ rows.double(), logits.logsumexp(-1)


@pytest.mark.parametrize("size", [32, 33, 1000, 5000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("scale", [0.0, 1.0, 1e4])
def test_sums_are_those_of_float64(size, dtype, scale):
    queries, wide = scale * torch.randn(3, 1, 4, 8, dtype=dtype), torch.randn(3, size, 11, dtype=dtype)
    rows = wide[..., :8]  # with strides
    sums = fused_sums(queries, rows, (3, 2, 2))
    means, shift = reference(queries[:, 0], rows)
    share = 64 * torch.finfo(dtype).eps * (1 + shift.abs().max())  # the logits' own rounding, relative to the weights
    torch.testing.assert_close(sums["numerator"].flatten(1, 2).double(), means, rtol=0, atol=float(share))
    torch.testing.assert_close(sums["shift"].flatten(1).double(), shift, rtol=32 * torch.finfo(dtype).eps, atol=float(share))
    assert (sums["reach"] >= sums["shift"].abs()).all()
    assert (sums["normaliser"] == 1).all()


def test_the_reach_covers_the_largest_logit():
    """All logits at -log n: their weights sum to one, and the shift is zero, but the logits are not."""
    rows = torch.full((1, 1000, 1), -math.log(1000))
    sums = fused_sums(torch.ones(1, 1, 1, 1), rows, (1, 1, 1))
    assert abs(float(sums["shift"])) < 1e-5
    assert float(sums["reach"]) >= math.log(1000)


@torch.no_grad()
def test_what_it_cannot_do_is_done_in_blocks(monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    rows = torch.randn(2, 64, 8)
    assert fuses(rows, 4, None, SOFTMAX, None)
    assert not fuses(rows[:1], 4, None, SOFTMAX, None)  # one of two threads would be idle
    assert not fuses(rows[:, :31], 4, None, SOFTMAX, None)
    assert not fuses(rows, 4, torch.zeros(1, 1, 4), SOFTMAX, None)
    assert not fuses(rows, 4, None, ACTIVATIONS["sigmoid"], None)
    assert not fuses(rows, 4, None, SOFTMAX, torch.ones(2, 64, dtype=torch.bool))
    assert not fuses(rows.mT.contiguous().mT, 4, None, SOFTMAX, None)
    with torch.enable_grad():
        assert not fuses(rows, 4, None, SOFTMAX, None)


class Doubled(ss.UMBC):
    """A user's pool with a result of its own."""

    def finalize(self, state):
        return 2.0 * super().finalize(state)


@torch.no_grad()
@pytest.mark.parametrize("kind", [ss.UMBC, Doubled])
@pytest.mark.parametrize("slots", ["learned", "gaussian"])
def test_whole_sets_need_no_state(kind, slots):
    """The fused forward pass is `finalize` of the state, also with a residual, several heads and a batch of one."""
    pool = kind(8, 4, 8, 12, 2, slots=slots, slot_residual=True, norm_after=True).eval()
    x = torch.randn(3, 100, 8)
    for sets in (x, x[:1]):
        expected = pool.finalize(pool.absorb_whole(sets.double(), None)).float()
        torch.testing.assert_close(pool(sets), expected, atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_partition_and_removal():
    encoder = ss.SetEncoder(torch.nn.Linear(3, 8), ss.UMBC(8, 4, 8, 8, 2)).eval()
    x = torch.randn(2, 700, 3)
    parts = [encoder.update(None, part) for part in x.split([500, 33, 31, 1, 135], 1)]
    whole = encoder.update(None, x)
    torch.testing.assert_close(encoder.finalize(sum(parts)), encoder(x), atol=1e-6, rtol=1e-5)
    rest = encoder.finalize(whole - parts[0] - parts[1])
    torch.testing.assert_close(rest, encoder(x[:, 533:]), atol=1e-5, rtol=1e-4)
    assert (whole.count == 700).all()


@torch.no_grad()
@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e30])
def test_numbers_beyond_all_floats_are_refused(value):
    encoder = ss.SetEncoder(torch.nn.Linear(3, 8), ss.UMBC(8, 4)).eval()
    encoder.phi.weight.fill_(1e10 if value == 1e30 else 1.0)
    x = torch.randn(1, 100, 3)
    x[0, 7] = value
    with pytest.raises(NonFiniteError):
        encoder.update(None, x)
