"""Merging, decay, indexing, devices: the state as a monoid that knows its encoder."""

import copy

import numpy as np
import pytest
import torch
from torch import nn

import setstream as ss
from setstream.errors import ConfigurationError, MismatchError, ShapeError
from setstream.sets.layout import pack
from setstream.states.accumulators import log_sums
from tests.states.builders import close, make


def test_count_follows_merging_removal_and_decay(encoder, x):
    mask = torch.rand(3, 20) > 0.5
    state = encoder.update(None, x, mask)
    assert torch.equal(state.count, mask.sum(1))
    assert torch.equal((state + state).count, 2 * mask.sum(1))
    assert torch.equal((state + state - state).count, mask.sum(1))
    assert torch.equal((state * 0.5).count, mask.sum(1))


def test_decay_weighs_the_past(encoder, x):
    """state(X)·γ + state(Y) is the weighted mean with weight γ for every element of X."""
    old, new = x[:, :10], x[:, 10:]
    pool = ss.DeepSets("mean")
    encoder = make(pool)
    z = encoder.finalize(encoder.update(None, old) * 0.5 + encoder.update(None, new))
    expected = (0.5 * encoder.phi(old).sum(1) + encoder.phi(new).sum(1)) / 15
    assert close(z, expected)
    # Two halves of everything are one whole.
    umbc = make()
    state = umbc.update(None, x)
    assert close(umbc.finalize(0.5 * state + state * 0.5), umbc.finalize(state))
    per_set = umbc.update(None, old) * torch.tensor([1.0, 0.5, 0.25]) + umbc.update(None, new)
    assert close(umbc.finalize(per_set)[1], umbc.finalize(umbc.update(None, old) * 0.5 + umbc.update(None, new))[1])


@pytest.mark.parametrize("factor", [0.0, -1.0, float("nan"), float("inf")])
def test_decay_refuses_what_makes_no_sense(encoder, x, factor):
    with pytest.raises(ConfigurationError, match="positive finite"):
        encoder.update(None, x) * factor
    with pytest.raises(ShapeError, match="3 sets"):
        encoder.update(None, x) * torch.ones(2)


def test_index_cat_and_iteration(encoder, x):
    state = encoder.update(None, x)
    z = encoder.finalize(state)
    torch.testing.assert_close(encoder.finalize(state[1]), z[1:2])
    torch.testing.assert_close(encoder.finalize(state[-1]), z[2:])
    torch.testing.assert_close(encoder.finalize(state[1:]), z[1:])
    torch.testing.assert_close(encoder.finalize(state[[2, 0]]), z[[2, 0]])
    torch.testing.assert_close(encoder.finalize(state[torch.tensor([True, False, True])]), z[[0, 2]])
    torch.testing.assert_close(encoder.finalize(ss.State.cat(list(state))), z)
    with pytest.raises(IndexError):
        state[3]
    with pytest.raises(ShapeError, match="at least one state"):
        ss.State.cat([])


def test_sum_of_states(encoder, x):
    states = [encoder.update(None, chunk) for chunk in x.split(6, dim=1)]
    assert close(encoder.finalize(sum(states)), encoder(x))


def test_dtype_and_device_moves(encoder, x):
    state = encoder.update(None, x)
    small = state.to(torch.float32)
    assert small.nbytes < state.nbytes
    assert close(encoder.finalize(small), encoder.finalize(state))
    assert close(encoder.finalize(small + state), encoder.finalize(state + state))
    assert state.to("cpu").device == torch.device("cpu")
    assert state.to(torch.device("meta")).device.type == "meta"
    with pytest.raises(ConfigurationError, match="floating-point"):
        state.to(torch.int64)


def test_detach_cuts_the_graph(encoder, x):
    state = encoder.update(None, x)
    assert encoder.finalize(state).requires_grad
    detached = state.detach()
    assert not any(t.requires_grad for part in detached.accumulators.values() for t in part.tensors.values())


def test_states_of_different_encoders_do_not_mix(encoder, x):
    other = make(seed=1)
    state, foreign = encoder.update(None, x), other.update(None, x)
    for action in (lambda: state + foreign, lambda: state - foreign, lambda: ss.State.cat([state, foreign])):
        with pytest.raises(MismatchError, match="different encoders: fingerprints 2:[0-9a-f]{32} and 2:[0-9a-f]{32}"):
            action()
    with pytest.raises(MismatchError, match="another encoder"):
        encoder.finalize(foreign)
    with pytest.raises(MismatchError, match="another encoder"):
        encoder.update(foreign, x)
    with pytest.raises(MismatchError, match="different pools"):
        state + make(ss.DeepSets("max")).update(None, x)
    with pytest.raises(ShapeError, match="3 sets and one of 1"):
        state + state[0]
    with pytest.raises(MismatchError, match="a State and a int"):
        state + 1


def test_the_same_weights_elsewhere_are_the_same_encoder(encoder, x):
    twin = make()
    assert close(twin.finalize(encoder.update(None, x) + twin.update(None, x)), encoder(x))
    # The same weights under another activation are another encoder.
    sigmoid = make(ss.UMBC(8, 4, heads=2, activation="slot-exp"))
    sigmoid.load_state_dict(encoder.state_dict(), strict=False)
    with pytest.raises(MismatchError):
        sigmoid.finalize(encoder.update(None, x))


def test_a_state_does_not_outlive_its_weights(encoder, x):
    state = encoder.update(None, x)
    with torch.no_grad():
        encoder.phi.weight.add_(1.0)
    with pytest.raises(MismatchError, match="weights of the encoder changed"):
        encoder.finalize(state)
    with pytest.raises(MismatchError, match="weights of the encoder changed"):
        state.to_bytes()


@pytest.mark.parametrize("change", ["fused", "data", "round trip", "module", "option"])
def test_changes_behind_the_version_counters_are_noticed(encoder, x, change):
    encoder.phi = nn.Sequential(encoder.phi, nn.LeakyReLU(0.1))
    with torch.no_grad():
        state = encoder.update(None, x)
    saved = state.to_bytes()
    if change == "fused":
        optimizer = torch.optim.Adam(encoder.parameters(), fused=True)
        encoder(x).square().sum().backward()
        optimizer.step()
    elif change == "data":
        encoder.phi[0].bias.data.add_(1.0)
    elif change == "round trip":
        encoder.bfloat16().float()
    elif change == "module":
        encoder.phi[1] = nn.Tanh()
    else:
        encoder.phi[1].negative_slope = 0.5
    other = copy.deepcopy(encoder)  # as a checkpoint would be loaded elsewhere
    with pytest.raises(MismatchError):
        other.finalize(ss.State.from_bytes(saved))
    if change in ("fused", "module"):  # noticed at once; the others when a fingerprint is made
        with pytest.raises(MismatchError):
            encoder.finalize(state)
        fresh = encoder.update(None, x)
        other.finalize(ss.State.from_bytes(fresh.to_bytes()))


def test_training_the_head_leaves_states_of_a_frozen_encoder_valid(encoder, x):
    head = nn.Linear(8, 2)
    optimizer = torch.optim.Adam(head.parameters())
    state = encoder.update(None, x).detach()
    head(encoder.finalize(state)).sum().backward()
    optimizer.step()
    encoder.finalize(encoder.update(state, x))


def test_decay_everything_alike_changes_nothing_however_often(encoder, x):
    state = encoder.update(None, x)
    z = encoder.finalize(state)
    for _ in range(5000):
        state = state * 0.3
    assert close(encoder.finalize(state), z, 1e-4)
    assert close(encoder.finalize(state + encoder.update(None, x[:, :1])), encoder(x[:, :1]), 1e-4)


def test_numpy_numbers_scale_and_index(encoder, x):
    state = encoder.update(None, x)
    for half in (np.float32(0.5), np.float64(0.5)):
        assert torch.equal(
            (state * half).accumulators["pooled"]["normaliser"], (half * state).accumulators["pooled"]["normaliser"]
        )
    assert len(state[np.int64(1)]) == len(state[torch.tensor(1)]) == 1
    assert len(state[[]]) == 0
    with pytest.raises(TypeError):
        x + state


def test_draws_do_not_mix(x):
    encoder = make(ss.UMBC(8, 4, slots="gaussian")).train()
    with pytest.raises(MismatchError, match="different random draws"):
        encoder.update(None, x) + encoder.update(None, x)
    drawn = encoder.update(None, x)
    with pytest.raises(MismatchError, match="training mode"):
        drawn + encoder.eval().update(None, x)


def weight(encoder, state):
    """The logarithm of the weight that a state's elements have, in each slot."""
    part = state.detach().accumulators["pooled"]
    return part["normaliser"].log() + part["shift"].double()


@pytest.mark.parametrize("pool", ["mean", "umbc"])
def test_decay_keeps_its_exponent(pool, x):
    """However often and however small: old and new elements keep their proportion, and nothing underflows."""
    encoder = make(ss.DeepSets("mean") if pool == "mean" else None)
    old, new = encoder.update(None, x[:, :10]), encoder.update(None, x[:, 10:])
    both = encoder.finalize(old + new)
    a, b = old, new
    for step in range(1075):
        a, b = a * 0.5, b * 0.5
        if step % 200 == 74:
            assert close(encoder.finalize(a), encoder.finalize(old), 1e-6)
            assert close(encoder.finalize(a + b), both, 1e-6)
    for _ in range(16):
        a, b = a * 1e-30, b * 1e-30
    torch.testing.assert_close(weight(encoder, a) - weight(encoder, old), torch.full_like(weight(encoder, a), -1850.3741))
    assert close(encoder.finalize(a + b), both, 1e-6)
    assert close(encoder.finalize(a + new), encoder.finalize(new), 1e-6)
    for _ in range(16):
        a, b = a * 1e300, b * 1e300
    assert close(encoder.finalize(a + b), both, 1e-6)


@pytest.mark.parametrize("pool", ["mean", "umbc"])
def test_decay_factors_are_not_rounded(pool, x):
    encoder = make(ss.DeepSets("mean") if pool == "mean" else None)
    state = encoder.update(None, x)
    faded = state * (1 - 1e-8)
    assert torch.allclose(weight(encoder, faded) - weight(encoder, state), torch.tensor(-1e-8).double(), rtol=1e-5, atol=0)
    for _ in range(2000):  # 10^5 of them, in steps of fifty
        faded = faded * (0.9999999**50)
    expected = torch.tensor(2000 * 50 * np.log(0.9999999) - 1e-8)
    assert torch.allclose(weight(encoder, faded) - weight(encoder, state), expected, rtol=1e-9, atol=0)
    per_set = weight(encoder, state * torch.tensor([1 - 1e-8, 0.5, 1.0], dtype=torch.float64)) - weight(encoder, state)
    assert bool((per_set[0] < 0).all())
    assert bool((per_set[2] == 0).all())


def test_plain_sums_decay_to_zero_where_floats_end(x):
    """A sum that weighs less than any float is zero, and comes back when it is scaled up."""
    encoder = make(ss.DeepSets("sum"))
    state = encoder.update(None, x)
    z, faded = encoder.finalize(state), state
    for _ in range(1200):
        faded = faded * 0.5
    assert torch.equal(encoder.finalize(faded), torch.zeros_like(z))
    for _ in range(1200):
        faded = faded * 2.0
    assert close(encoder.finalize(faded), z, 1e-6)


def test_repr_tells_what_is_inside(encoder, x):
    assert "3 sets, count=[20, 20, 20], pooled.numerator (3, 2, 4, 8)" in repr(encoder.update(None, x))


@pytest.mark.parametrize("activation", ["softmax", "slot-softmax"])
@pytest.mark.parametrize("size", [1, 7])
def test_few_numbers_are_merged_like_many(activation, size, monkeypatch):
    """By NumPy and by torch: sums, shift and error."""
    pool = ss.UMBC(4, num_slots=3, heads=2, activation=activation)
    encoder = ss.SetEncoder(nn.Linear(2, 4), pool).eval()
    with torch.no_grad():
        state, context = encoder.update(None, torch.randn(2, 9, 2)), pool.prepare(encoder.empty(2))
        chunk = encoder.absorb(state, context, pack(10 * torch.randn(2, size, 2)))
        pairs = [(state, chunk), (state, chunk.widened()), (encoder.empty(2), chunk)]
        few = [a + b for a, b in pairs]
        monkeypatch.setattr(log_sums, "FEW", 0)
        for (a, b), merged in zip(pairs, few, strict=True):
            for name, tensor in (a + b).tensors().items():
                torch.testing.assert_close(merged.tensors()[name], tensor, rtol=1e-12, atol=1e-14)
