"""States as bytes and files, and states from outside that were edited."""

import json
import pickle

import pytest
import torch
from safetensors.torch import save as safetensors_save
from torch import nn

import setstream as ss
from setstream.errors import MismatchError, ShapeError, StateFormatError
from setstream.pools.base import named_tensors
from setstream.states.accumulators import LogSums, Shared, Sums
from tests.states.builders import close, make


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


@pytest.mark.parametrize("pool", [ss.UMBC(8, 4), ss.DeepSets("max"), ss.Parallel(a=ss.UMBC(8, 4), b=ss.DeepSets("min"))])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_the_bytes_are_those_of_safetensors(pool, dtype, x):
    """For the first state of an encoder and for later ones, which are written and read without safetensors."""
    encoder = make(pool)
    for chunk in (x, x + 1, x * 2):
        state = encoder.update(None, chunk).detach().to(dtype)
        data = state.to_bytes()
        header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
        tensors = {name: tensor.clone() for name, tensor in (state.tensors() | {"count": state.count}).items()}
        assert data == safetensors_save(tensors, header["__metadata__"])
        again = ss.State.from_bytes(data)
        assert again.to_bytes() == data
        for name, tensor in again.tensors().items():
            assert torch.equal(tensor, tensors[name])


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
    "accumulator missing": (None, lambda state: state.accumulators.pop("pooled")),
    "accumulator too many": (None, lambda state: state.accumulators.update(more=Sums(total=torch.zeros(1)))),
    "other kind": (None, lambda state: state.accumulators.update(pooled=Sums(**state.accumulators["pooled"].tensors))),
    "a draw": (None, lambda state: state.accumulators.update(draw=Shared(noise=torch.zeros(1, 4, 8)))),
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
        return {"own": LogSums(numerator=torch.zeros(batch, 1, width or 8), normaliser=zeros, shift=shift)}

    def accumulate(self, context, features, mask):
        logits = features[..., :1].mT  # (B, 1, n)
        logits = logits if mask is None else logits.masked_fill(~mask.unsqueeze(1), -torch.inf)
        shift = logits.amax(-1)
        weights = (logits - shift.unsqueeze(-1)).exp().nan_to_num(0.0)
        return {"own": LogSums(numerator=weights @ features, normaliser=weights.sum(-1), shift=shift)}

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
