import copy
import pickle

import numpy as np
import pytest
import torch
from safetensors.torch import save as safetensors_save
from torch import nn

import setstream as ss
from setstream.errors import ConfigurationError, MismatchError, PrecisionError, RemovalError, ShapeError, StateFormatError
from setstream.pools.base import named_tensors
from setstream.states import accumulators as parts


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
    assert not any(t.requires_grad for part in detached.accumulators.values() for t in part.tensors.values())


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


# -- states from outside ----------------------------------------------------------------------------------------------


def edited(encoder, x, change):
    """A state with a right checksum and fingerprint that was changed by hand."""
    state = encoder.update(None, x[:1]).detach()
    assert state.fingerprint
    change(state)
    return ss.State.from_bytes(state.to_bytes())


def put(name, make_tensor, part="pooled"):
    def change(state):
        tensors = state.accumulators[part].tensors
        tensors[name] = make_tensor(tensors[name])

    return change


def count(value):
    def change(state):
        state.count = torch.tensor([value])

    return change


EDITS = {
    "shift nan": (None, put("shift", lambda t: t * float("nan"))),
    "shift inf": (None, put("shift", lambda t: t + float("inf"))),
    "normaliser negative": (None, put("normaliser", lambda t: -t)),
    "normaliser zero": (None, put("normaliser", torch.zeros_like)),
    "one normaliser zero": (None, put("normaliser", lambda t: t * torch.tensor([0.0, 1.0, 1.0, 1.0]).double())),
    "numerator nan": (None, put("numerator", lambda t: t * float("nan"))),
    "error negative": (None, put("error", lambda t: -t - 1)),
    "error nan": (None, put("error", lambda t: t * float("nan"))),
    "sums of nothing": (None, count(0)),
    "count negative": (None, count(-1)),
    "count too large": (None, count(2**60)),
    "wider": (None, put("numerator", lambda t: torch.cat([t, t], -1))),
    "narrower": (None, put("numerator", lambda t: t[..., :1])),
    "more slots": (
        None,
        lambda state: [put(n, lambda t: torch.cat([t, t], 2))(state) for n in state.accumulators["pooled"].tensors],
    ),
    "broadcasts": (None, put("numerator", lambda t: torch.zeros(1, 50000, 1, 1, 1))),
    "whole numbers": (None, put("normaliser", lambda t: t.long())),
    "complex": (None, put("numerator", lambda t: t.to(torch.complex64))),
    "name missing": (None, lambda state: state.accumulators["pooled"].tensors.pop("shift")),
    "name too many": (None, lambda state: state.accumulators["pooled"].tensors.update(more=torch.zeros(1))),
    "part missing": (None, lambda state: state.accumulators.pop("pooled")),
    "part too many": (None, lambda state: state.accumulators.update(more=parts.Sums(total=torch.zeros(1)))),
    "other kind": (None, lambda state: state.accumulators.update(pooled=parts.Sums(**state.accumulators["pooled"].tensors))),
    "a draw": (None, lambda state: state.accumulators.update(draw=parts.Shared(noise=torch.zeros(1, 4, 8)))),
    "mean: mass infinite": ("mean", put("normaliser", lambda t: t * float("inf"))),
    "mean: other width": ("mean", put("numerator", lambda t: t[..., :1].repeat(1, 5))),
    "sum: width one": ("sum", put("numerator", lambda t: t[..., :1])),
    "max: nan": ("max", put("value", lambda t: t * float("nan"))),
    "max: nothing, of elements": ("max", put("value", lambda t: t * 0 - float("inf"))),
    "max: wrong infinity": ("max", put("value", lambda t: t * 0 + float("inf"))),
    "min: of no elements": ("min", count(0)),
    "min: other width": ("min", put("value", lambda t: t[..., :3])),
}


@pytest.mark.parametrize("name", EDITS)
def test_edited_states_are_refused_everywhere(name, x, tmp_path):
    pool, change = EDITS[name]
    model = ss.SetModel(make(pool and ss.DeepSets(pool)), nn.Identity())
    encoder = model.encoder
    store, stream = ss.StateStore(tmp_path / "s.db", model), model.stream()
    store.update("a", x[1])
    stream.update(x[1:2])
    live = encoder.update(None, x[:1])
    uses = {
        "finalize": lambda state: encoder.finalize(state),
        "update": lambda state: encoder.update(state, x[:1]),
        "merge": lambda state: encoder.finalize(live + state),
        "cat": lambda state: encoder.finalize(ss.State.cat([live, state])),
        "stream": lambda state: stream.merge(state),
        "store": lambda state: store.merge("a", state),
        "new": lambda state: store.merge("new", state),
        "fill": lambda state: store.fill([("b", state)]),
    }
    for use, run in uses.items():
        try:
            state = edited(encoder, x, change)
        except StateFormatError:
            continue  # noticed when it was read
        with pytest.raises((MismatchError, StateFormatError, ShapeError)):
            run(state)
            pytest.fail(f"{use} took it")
    assert store.ids() == ["a"]
    assert store.count("a") == 20
    assert stream.state.count.tolist() == [20]


def test_shapes_are_compared_before_anything_is_computed(encoder, x):
    """A state whose numerator broadcasts would take gigabytes: refused, and nothing of that size is made."""
    bad = edited(encoder, x, put("numerator", lambda t: torch.zeros(1, 50000, 1, 1, 1)))
    made = []

    class Watch(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            result = function(*args, **(kwargs or {}))
            made.append(result.numel() if isinstance(result, torch.Tensor) else 0)
            return result

    with Watch():
        for run in (
            encoder.finalize,
            lambda state: encoder.update(state, x[:1]),
            lambda state: encoder.update(None, x[:1]) + state,
        ):
            with pytest.raises(MismatchError, match="numerator"):
                run(bad)
    assert max(made) < 100_000


def test_states_from_elsewhere_are_taken(x):
    """What was not edited is read: empty sets, decayed, in float32, after removal, of a width that only phi knows."""
    for pool in (None, ss.DeepSets("mean"), ss.DeepSets("max"), ss.Parallel(a=ss.UMBC(8, 4), b=ss.DeepSets("min"))):
        encoder = make(pool)
        state = encoder.update(None, [x[0], x[1, :0]])
        states = [state, state[1], encoder.empty(2), state.to(torch.float32)]
        if pool is None or getattr(pool, "pool", None) == "mean":
            states += [state * 1e-300 * 1e-300, state - state, (state + state) - state]
        for own in states:
            again = ss.State.from_bytes(own.to_bytes())
            torch.testing.assert_close(*(dict(named_tensors(encoder.finalize(s))) for s in (again, own)))


def steep_softplus(logits):
    return nn.functional.softplus(50 * logits)


def test_a_weight_that_underflows_is_no_damage(x):
    """A user's own weights, not as logarithms, may all be zero in float32: such a state is read again."""
    softplus = ss.Activation("softplus", steep_softplus)
    encoder = make(ss.UMBC(8, 4, activation=softplus))
    state = encoder.update(None, x[:, :1] * 30)
    assert (state.accumulators["pooled"]["normaliser"] == 0).any()
    torch.testing.assert_close(encoder.finalize(ss.State.from_bytes(state.to_bytes())), encoder.finalize(state))


class OwnPool(ss.Pool):
    """concepts.md's sums as a pool of one's own: the state of no elements is (0, 0, -inf)."""

    def empty_accumulators(self, batch, device, width=None):
        zeros, shift = torch.zeros(batch, 1), torch.full((batch, 1), -torch.inf)
        return {"own": parts.LogSums(numerator=torch.zeros(batch, 1, width or 8), normaliser=zeros, shift=shift)}

    def accumulate(self, context, features, mask):
        logits = features[..., :1].mT  # (B, 1, n)
        logits = logits if mask is None else logits.masked_fill(~mask.unsqueeze(1), -torch.inf)
        shift = logits.amax(-1)
        weights = (logits - shift.unsqueeze(-1)).exp().nan_to_num(0.0)
        return {"own": parts.LogSums(numerator=weights @ features, normaliser=weights.sum(-1), shift=shift)}

    def finalize(self, state):
        return state.accumulators["own"].mean()[:, 0]


def test_minus_infinity_stands_for_nothing_in_a_pool_of_ones_own(x):
    encoder = make(OwnPool())
    empty = encoder.empty(3)
    assert torch.equal(encoder.finalize(empty + empty), torch.zeros(3, 8))
    features = encoder.phi(x)
    expected = (features[..., 0].softmax(1).unsqueeze(-1) * features).sum(1)
    for state in (empty + encoder.update(None, x), encoder.update(None, x) + empty, encoder.update(empty, x)):
        assert close(encoder.finalize(state), expected)
        assert close(encoder.finalize(ss.State.from_bytes(state.to_bytes())), expected)
        assert close(encoder.finalize(state * 0.5 - empty), expected)
        assert torch.equal(encoder.finalize(state - encoder.update(None, x)), torch.zeros(3, 8))
    ss.State.from_bytes((empty + empty).to_bytes())


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
        RemovalError, match="^elements: a maximum cannot lose elements.*elements_stream=False in a SetClassifier"
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
def test_extremes_cannot_lose_or_forget(pool, x):
    encoder = make(ss.DeepSets(pool))
    state = encoder.update(None, x)
    with pytest.raises(RemovalError, match=f"{pool}imum cannot lose elements"):
        (state + state) - state
    with pytest.raises(ConfigurationError, match="cannot decay"):
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
        for name, part in state.accumulators.items():
            for key, tensor in part.tensors.items():
                assert torch.equal(again.accumulators[name][key], tensor)
                assert again.accumulators[name][key].dtype == tensor.dtype


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
