import copy
import pickle

import numpy as np
import pytest
import torch
from safetensors.torch import save as safetensors_save
from torch import nn

import setstream as ss
from setstream.errors import ConfigurationError, MismatchError, PrecisionError, RemovalError, ShapeError, StateFormatError


def make(pool=None, seed=0):
    torch.manual_seed(seed)
    return ss.SetEncoder(nn.Linear(3, 8), pool or ss.UMBC(8, 4, heads=2)).eval()


@pytest.fixture
def encoder():
    return make()


@pytest.fixture
def x():
    return torch.randn(3, 20, 3)


def close(a, b, tolerance=1e-5):
    return float((a - b).detach().abs().max()) <= tolerance * float(b.detach().abs().max())


def test_count_follows_merging_removal_and_forgetting(encoder, x):
    mask = torch.rand(3, 20) > 0.5
    state = encoder.update(None, x, mask)
    assert torch.equal(state.count, mask.sum(1))
    assert torch.equal((state + state).count, 2 * mask.sum(1))
    assert torch.equal((state + state - state).count, mask.sum(1))
    assert torch.equal((state * 0.5).count, mask.sum(1))


def test_forgetting_weighs_the_past(encoder, x):
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
def test_forgetting_refuses_what_makes_no_sense(encoder, x, factor):
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
    parts = [encoder.update(None, chunk) for chunk in x.split(6, dim=1)]
    assert close(encoder.finalize(sum(parts)), encoder(x))


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
    assert not any(t.requires_grad for part in detached.parts.values() for t in part.tensors.values())


def test_states_of_different_encoders_do_not_mix(encoder, x):
    other = make(seed=1)
    mine, theirs = encoder.update(None, x), other.update(None, x)
    for action in (lambda: mine + theirs, lambda: mine - theirs, lambda: ss.State.cat([mine, theirs])):
        with pytest.raises(MismatchError, match="different encoders: fingerprints 2:[0-9a-f]{32} and 2:[0-9a-f]{32}"):
            action()
    with pytest.raises(MismatchError, match="another encoder"):
        encoder.finalize(theirs)
    with pytest.raises(MismatchError, match="another encoder"):
        encoder.update(theirs, x)
    with pytest.raises(MismatchError, match="different pools"):
        mine + make(ss.DeepSets("max")).update(None, x)
    with pytest.raises(ShapeError, match="3 sets and one of 1"):
        mine + mine[0]
    with pytest.raises(MismatchError, match="a State and a int"):
        mine + 1


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


def test_forgetting_everything_alike_changes_nothing_however_often(encoder, x):
    state = encoder.update(None, x)
    z = encoder.finalize(state)
    for _ in range(5000):
        state = state * 0.3
    assert close(encoder.finalize(state), z, 1e-4)
    assert close(encoder.finalize(state + encoder.update(None, x[:, :1])), encoder(x[:, :1]), 1e-4)


def test_numpy_numbers_scale_and_index(encoder, x):
    state = encoder.update(None, x)
    for half in (np.float32(0.5), np.float64(0.5)):
        assert torch.equal((state * half).parts["pooled"]["normaliser"], (half * state).parts["pooled"]["normaliser"])
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


# -- removal ----------------------------------------------------------------------------------------------------------


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
def test_extremes_cannot_lose_or_forget(pool, x):
    encoder = make(ss.DeepSets(pool))
    state = encoder.update(None, x)
    with pytest.raises(RemovalError, match=f"{pool}imum cannot lose elements"):
        (state + state) - state
    with pytest.raises(ConfigurationError, match="cannot forget"):
        state * 0.9


# -- bytes ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "pool",
    [ss.UMBC(8, 4), ss.DeepSets("mean"), ss.DeepSets("max"), ss.Parallel(a=ss.UMBC(8, 4), b=ss.DeepSets("min"))],
    ids=["umbc", "mean", "max", "parallel"],
)
def test_bytes_and_files_round_trip(pool, x, tmp_path):
    encoder = make(pool)
    state = encoder.update(None, x)
    state.save(tmp_path / "state.safetensors")
    assert [p.name for p in tmp_path.iterdir()] == ["state.safetensors"]
    for again in (
        ss.State.from_bytes(state.to_bytes()),
        ss.State.load(tmp_path / "state.safetensors"),
        pickle.loads(pickle.dumps(state)),
    ):
        assert again.fingerprint == state.fingerprint
        assert torch.equal(again.count, state.count)
        for name, part in state.parts.items():
            for key, tensor in part.tensors.items():
                assert torch.equal(again.parts[name][key], tensor)
                assert again.parts[name][key].dtype == tensor.dtype


def test_a_state_of_a_training_pass_keeps_its_draw(x):
    encoder = make(ss.UMBC(8, 4, slots="gaussian")).train()
    state = encoder.update(None, x)
    again = ss.State.from_bytes(state.to_bytes())
    torch.testing.assert_close(encoder.finalize(again), encoder.finalize(state))


def test_truncated_bytes_are_refused(encoder, x):
    data = encoder.update(None, x).to_bytes()
    for length in [0, 1, 7, 8, 9, 100, len(data) // 2, len(data) - 1]:
        with pytest.raises(StateFormatError):
            ss.State.from_bytes(data[:length])


def test_edited_bytes_are_refused(encoder, x):
    """Any flipped bit, anywhere, is noticed."""
    data = encoder.update(None, x).to_bytes()
    for position in range(0, len(data), 37):
        edited = bytearray(data)
        edited[position] ^= 0x10
        with pytest.raises(StateFormatError):
            ss.State.from_bytes(bytes(edited))


def test_foreign_bytes_are_refused(tmp_path):
    with pytest.raises(StateFormatError, match="not a setstream state"):
        ss.State.from_bytes(b"PK\x03\x04 something else entirely")
    with pytest.raises(StateFormatError, match="not a setstream state"):
        ss.State.from_bytes(safetensors_save({"weight": torch.ones(3)}))
    with pytest.raises(StateFormatError, match="not a setstream state"):
        ss.State.from_bytes(safetensors_save({"weight": torch.ones(3)}, {"format": "pt"}))
    with pytest.raises(StateFormatError, match="format version 99"):
        ss.State.from_bytes(safetensors_save({"weight": torch.ones(3)}, {"setstream.state": '{"version": 99}'}))
    with pytest.raises(StateFormatError, match="checksum"):
        ss.State.from_bytes(safetensors_save({"weight": torch.ones(3)}, {"setstream.state": '{"version": 1}'}))
    path = tmp_path / "foreign.safetensors"
    path.write_bytes(b"nothing")
    with pytest.raises(StateFormatError, match="foreign.safetensors"):
        ss.State.load(path)
    with pytest.raises(FileNotFoundError):
        ss.State.load(tmp_path / "missing")
    with pytest.raises(StateFormatError, match="from bytes; got str"):
        ss.State.from_bytes("text")
    with pytest.raises(FileNotFoundError, match="there is no folder"):
        make().empty(1).save(tmp_path / "no" / "folder")


def test_repr_tells_what_is_inside(encoder, x):
    assert "3 sets, count=[20, 20, 20], pooled.numerator (3, 2, 4, 8)" in repr(encoder.update(None, x))
