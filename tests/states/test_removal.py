"""Removal: exact, or an error."""

import pytest
import torch
from torch import nn

import setstream as ss
from setstream.errors import ConfigurationError, PrecisionError, RemovalError
from tests.states.builders import close, make


def test_removal_to_nothing_is_exactly_empty(encoder, x):
    state = encoder.update(None, x)
    empty = state - state
    assert torch.equal(empty.count, torch.zeros(3, dtype=torch.int64))
    assert torch.equal(encoder.finalize(empty), torch.zeros(3, 4, 8))
    assert close(encoder.finalize(empty + state), encoder(x))


def test_removal_detects_loss_of_precision():
    """A slot that hung on one heavy element has nothing left to say when that element goes."""
    encoder = ss.SetEncoder(nn.Identity(), ss.UMBC(2, 1, out_dim=2)).eval()
    with torch.no_grad():
        encoder.pool.key.weight.copy_(torch.eye(2) * 40)
    q = encoder.pool.query_norm(encoder.pool.query(encoder.pool.slots.mean))[0]
    heavy, light = q.detach()[None, None], -q.detach()[None, None].repeat(1, 5, 1)
    state = encoder.update(encoder.update(None, light), heavy)
    with pytest.raises(PrecisionError, match="Encode the remaining elements anew"):
        state - encoder.update(None, heavy)
    assert state.count.tolist() == [6]  # nothing was lost
    assert close(encoder.finalize(state - encoder.update(None, light)), encoder(heavy))


def test_removal_detects_precision_lost_bit_by_bit():
    """Many removals, each harmless, that together leave only rounding error."""
    encoder = ss.SetEncoder(nn.Identity(), ss.UMBC(2, 1, out_dim=2)).eval()
    with torch.no_grad():
        encoder.pool.key.weight.copy_(torch.eye(2) * 20)
    q = encoder.pool.query_norm(encoder.pool.query(encoder.pool.slots.mean)).detach()[0]
    steps = [(q * s)[None, None] for s in torch.linspace(1, -1, 30)]
    state = encoder.update(None, torch.cat(steps, dim=1))
    with pytest.raises(PrecisionError):
        for step in steps[:-1]:
            state = state - encoder.update(None, step)


@pytest.mark.parametrize("pool", ["mean", "sum", "umbc"])
def test_removal_of_a_large_value_is_refused_where_it_leaves_rounding_error(pool):
    """An outlier with an ordinary logit: its weight is that of the others, and its features are not."""
    torch.manual_seed(0)
    encoder = ss.SetEncoder(nn.Linear(3, 4), ss.UMBC(4, 2, out_dim=4) if pool == "umbc" else ss.DeepSets(pool)).eval()
    with torch.no_grad():
        encoder.phi.weight[-1, :-1] = encoder.phi.weight[:-1, -1] = 0.0
        if pool == "umbc":
            encoder.pool.key.weight[:, -1] = 0.0
    x, outlier = torch.randn(1, 50, 3), torch.tensor([[[0.3, -0.2, 1e7]]])
    state = encoder.update(encoder.update(None, x), outlier)
    with pytest.raises(PrecisionError, match="Encode the remaining elements anew") as caught:
        state - encoder.update(None, outlier)
    assert caught.value.sets == [0]
    rest = state.remove(encoder.update(None, outlier), tolerance=0.5)  # as good as it gets
    assert torch.isfinite(encoder.finalize(rest)).all()
    ordinary = encoder.update(encoder.update(None, x), x[:, :5] * 3)
    assert close(encoder.finalize(ordinary - encoder.update(None, x[:, :5] * 3)), encoder(x), 1e-3)


def test_removal_errors_name_the_member_that_cannot(x):
    encoder = make(ss.Parallel(slots=ss.UMBC(8, 4), elements=ss.DeepSets("max")))
    state = encoder.update(None, x)
    with pytest.raises(
        RemovalError, match="^elements: elements cannot be removed from a maximum.*elements_stream=False in a SetClassifier"
    ):
        (state + state) - state


def test_a_sliding_window_stays_accurate(encoder):
    x = torch.randn(1, 4000, 3)
    state = encoder.update(None, x[:, :50])
    for start in range(0, 3950, 10):
        state = state - encoder.update(None, x[:, start : start + 10])
        state = encoder.update(state, x[:, start + 50 : start + 60])
    assert close(encoder.finalize(state), encoder(x[:, -50:]), 1e-5)


def test_removal_refuses_more_than_there_is(encoder, x):
    with pytest.raises(RemovalError, match="only what was merged"):
        encoder.update(None, x[:, :5]) - encoder.update(None, x)


@pytest.mark.parametrize("pool", ["max", "min"])
def test_extremes_cannot_lose_or_decay(pool, x):
    encoder = make(ss.DeepSets(pool))
    state = encoder.update(None, x)
    with pytest.raises(RemovalError, match=f"cannot be removed from a {pool}imum"):
        (state + state) - state
    with pytest.raises(ConfigurationError, match="cannot decay"):
        state * 0.9
