"""DSMIL: the critical element of each class, then attention to it, in any chunks."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import setstream as ss
from setstream.errors import ConfigurationError, ConsistencyError, NonFiniteError, RemovalError, StateFormatError
from setstream.gradients.encode import MODES
from setstream.models.weights import save_weights
from setstream.states.state import State
from setstream.tasks.mil.models import MODELS
from setstream.testing.gradients import default_loss, parameter_gradients
from tests.gradients.builders import check_unbiased
from tests.laws.strategies import pad


def whole_and_encoder(classes=2, dtype=torch.float64, phi=None):
    """The module that needs its whole bag, and an encoder with its weights."""
    module = ss.nn.DSMIL(6, num_classes=classes, hidden=5).to(dtype)
    pool = ss.DSMIL(6, num_classes=classes, hidden=5).to(dtype)
    pool.load_state_dict(module.state_dict())
    return module, ss.SetEncoder(phi or nn.Identity(), pool).to(dtype).eval()


def read(encoder, chunks):
    """The state after both passes over chunks, each (elements, mask) or (elements, None)."""
    state = encoder.empty(len(chunks[0][0]))
    for number in range(encoder.passes):
        state = encoder.next_pass(state) if number else state
        for chunk, mask in chunks:
            state = encoder.update(state, chunk, mask)
    return state


def logits(streams):
    return (streams["instance"] + streams["bag"]) / 2


@given(
    lengths=st.lists(st.integers(0, 30), min_size=1, max_size=3),
    classes=st.integers(1, 3),
    cuts=st.lists(st.integers(1, 32), max_size=5),
    dtype=st.sampled_from([torch.float32, torch.float64]),
    seed=st.integers(0, 2**20),
)
def test_any_partition_gives_the_logits_and_weights_of_the_whole_bag(lengths, classes, cuts, dtype, seed):
    """Against the whole-bag module in float64: ragged, empty and masked sets, chunks without elements."""
    torch.manual_seed(seed)
    module, encoder = whole_and_encoder(classes, dtype)
    x, mask = pad([torch.randn(length, 6, dtype=dtype) for length in lengths])
    instance, bag, weights = module.double().streams(x.nan_to_num().double(), mask)
    edges = sorted({0, *(cut for cut in cuts if cut < x.shape[1]), x.shape[1]})
    chunks = [(x[:, a:b], mask[:, a:b]) for a, b in pairwise(edges)]
    state = read(encoder, chunks)
    bound = {"rtol": 0, "atol": 1e-12 if dtype == torch.float64 else 1e-6, "check_dtype": False}
    streams = encoder.finalize(state)
    torch.testing.assert_close(streams["instance"], instance, **bound)
    torch.testing.assert_close(streams["bag"], bag, **bound)
    attention = torch.cat([encoder.attention(chunk.nan_to_num(), state, some) for chunk, some in chunks], -1)
    torch.testing.assert_close(attention[:, 0].mT, weights, **bound)
    torch.testing.assert_close(logits(encoder([row[some] for row, some in zip(x, mask, strict=True)])), logits(streams))


@given(
    rows=st.lists(st.lists(st.integers(-1, 1), min_size=6, max_size=6), min_size=2, max_size=8),
    size=st.integers(1, 8),
    seed=st.integers(0, 99),
)
def test_ties_depend_on_no_order_and_no_chunks(rows, size, seed):
    """Features of -1, 0 and 1 and scores that look at one of them, or at none: many elements have the same score."""
    torch.manual_seed(seed)
    _, encoder = whole_and_encoder()
    with torch.no_grad():
        encoder.pool.score.weight.copy_(torch.tensor([[1.0, 0, 0, 0, 0, 0], [0.0] * 6]))
        x = torch.tensor(rows, dtype=torch.float64)[None]
        expected = encoder(x)
        state = read(encoder, [(chunk, None) for chunk in x[:, torch.randperm(len(rows))].split(size, 1)])
        for name, stream in encoder.finalize(state).items():
            torch.testing.assert_close(stream, expected[name], rtol=0, atol=1e-12)


@pytest.mark.parametrize("size", [1, 7, 100])
def test_rounding_does_not_decide_between_equal_scores(size):
    """Elements whose scores are equal, but are sums in another order: the same one wins in all chunks."""
    pool = ss.DSMIL(64)
    with torch.no_grad():
        pool.score.weight.fill_(0.1)
        x = torch.randn(64)[torch.stack([torch.randperm(64) for _ in range(100)])][None]
        encoder = ss.SetEncoder(nn.Identity(), pool).eval()
        expected = logits(encoder(x))
        state = read(encoder, [(chunk, None) for chunk in x[:, torch.randperm(100)].split(size, 1)])
        torch.testing.assert_close(logits(encoder.finalize(state)), expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("classes", [1, 3])
def test_the_exact_gradient_is_that_of_the_whole_bag(classes):
    """Of all weights and of the elements; `importance` with all elements, too."""
    module, encoder = whole_and_encoder(classes, phi=nn.Linear(3, 6))
    sets = [torch.randn(size, 3, dtype=torch.float64, requires_grad=True) for size in (23, 9)]
    instance, bag = zip(*(module.streams(encoder.phi(x)[None])[:2] for x in sets), strict=True)
    wanted = {"phi.weight": encoder.phi.weight, "instance": module.instance.weight, "query": module.query[0].weight}
    wanted |= {"value": module.value.bias, "bag": module.bag, "x": sets[0], "y": sets[1]}
    loss = default_loss({"instance": torch.cat(instance), "bag": torch.cat(bag)})
    expected = dict(zip(wanted, torch.autograd.grad(loss, list(wanted.values())), strict=True))
    pool = encoder.pool
    names = {"instance": pool.score.weight, "query": pool.pools[1].query[0].weight, "value": pool.value.bias, "bag": pool.bag}
    for gradient, size in (("full", 5), ("exact", 5), ("importance", 23)):
        z = ss.encode(encoder, sets, chunk_size=size, gradient=gradient)
        gradients = torch.autograd.grad(default_loss(z), [(wanted | names)[name] for name in expected])
        for name, value in zip(expected, gradients, strict=True):
            torch.testing.assert_close(value, expected[name], rtol=1e-10, atol=1e-10, msg=f"{gradient}: {name}")


@pytest.mark.parametrize("gradient", ["unbiased", "importance"])
def test_sampled_gradients_are_unbiased(gradient):
    """4,000 draws."""
    torch.manual_seed(0)
    encoder = ss.SetEncoder(nn.Sequential(nn.Linear(3, 6), nn.Tanh()), ss.DSMIL(6, hidden=5))
    check_unbiased(encoder, [torch.randn(24, 3), torch.randn(9, 3)], chunk_size=4, gradient=gradient)


@pytest.mark.parametrize("gradient", MODES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_mode_runs(gradient, dtype):
    model = MODELS["ds-mil"](in_dim=3, widths=[8]).to(dtype).train()
    sets = [torch.randn(20, 3), torch.zeros(0, 3), torch.randn(1, 3)]
    with torch.autocast("cpu", enabled=dtype == torch.float32):
        output = model.head(ss.encode(model.encoder, sets, chunk_size=6, gradient=gradient))
    assert output.shape == (3, 2)
    assert bool(output.isfinite().all())
    if gradient != "none":
        output.square().sum().backward()
        assert all(bool(p.grad.isfinite().all()) for p in model.parameters())


def test_the_gradient_of_equal_elements_is_that_of_one():
    _, encoder = whole_and_encoder(1, phi=nn.Linear(3, 6))
    sets = [torch.randn(1, 3, dtype=torch.float64).expand(size, 3) for size in (6, 4)]
    expected = parameter_gradients(encoder, sets, default_loss, gradient="full")
    for name, value in parameter_gradients(encoder, sets, default_loss, gradient="exact", chunk_size=2).items():
        torch.testing.assert_close(value, expected[name], rtol=1e-10, atol=1e-10, msg=name)


def test_a_score_that_overflows_beats_an_empty_set():
    _, encoder = whole_and_encoder(1, torch.float32)
    with torch.no_grad():
        encoder.pool.score.weight.fill_(1e20)
    x = torch.full((1, 3, 6), -1e19)
    state = encoder.update(encoder.update(encoder.empty(1), x[:, :1]), x[:, 1:])
    assert torch.equal(encoder.pool.pools[0].finalize(state.select("pass1")), x[:, :1])


def test_nan_is_an_error_or_stays_visible():
    _, encoder = whole_and_encoder()
    x = torch.randn(1, 9, 6, dtype=torch.float64)
    x[0, 4, 2] = float("nan")
    with pytest.raises(NonFiniteError):
        encoder(x)
    encoder.check_finite = False
    for order in (torch.arange(9), torch.arange(8, -1, -1)):
        state = read(encoder, [(chunk, None) for chunk in x[:, order].split(2, 1)])
        assert bool(encoder.finalize(state)["bag"].isnan().all())


def test_states_are_saved_and_checked():
    _, encoder = whole_and_encoder()
    x = torch.randn(2, 20, 6, dtype=torch.float64)
    first = State.from_bytes(encoder.update(None, x[:, :9]).to_bytes())
    second = State.from_bytes(encoder.next_pass(encoder.update(first, x[:, 9:])).to_bytes())
    torch.testing.assert_close(logits(encoder.finalize(encoder.update(second, x))), logits(encoder(x)))
    with pytest.raises(ConsistencyError, match="pass 1 of 2"):
        encoder.finalize(first)
    with pytest.raises(RemovalError, match="maximum-by"):
        encoder.update(None, x) - first
    for name, value in (("score", float("nan")), ("score", float("-inf")), ("features", float("inf"))):
        tensors = first.accumulators["pass1/critical"].tensors
        edited = type(first.accumulators["pass1/critical"])(**(tensors | {name: torch.full_like(tensors[name], value)}))
        with pytest.raises(StateFormatError, match="not finite"):
            State.from_bytes(State({"pass1/critical": edited}, first.count, first.origin).to_bytes())


def test_a_saved_model_of_an_earlier_version_loads(tmp_path):
    model = MODELS["ds-mil"](in_dim=3, widths=[8]).eval()
    model.save_pretrained(tmp_path, builder=MODELS["ds-mil"], options={"in_dim": 3, "widths": [8]})
    x = torch.randn(2, 20, 3)
    torch.testing.assert_close(ss.SetModel.from_pretrained(tmp_path)(x), model(x))
    old = nn.Module()
    old.dsmil = ss.nn.DSMIL(8)
    phi = {f"encoder.phi.{name}": tensor for name, tensor in model.encoder.phi.state_dict().items()}
    weights = phi | {f"encoder.pool.module.{name}": tensor for name, tensor in old.state_dict().items()}
    path = next(tmp_path.glob("*.safetensors"))
    save_weights(Saved(weights), path)
    expected = torch.cat(old.dsmil.streams(model.encoder.phi(x))[:2], 1)
    torch.testing.assert_close(ss.SetModel.from_pretrained(tmp_path)(x), expected)


class Saved(nn.Module):
    """A module with these weights."""

    def __init__(self, weights):
        super().__init__()
        self.weights = weights

    def state_dict(self):
        return self.weights


def test_what_cannot_be_built():
    with pytest.raises(ConfigurationError, match="at least 1"):
        ss.DSMIL(6, num_classes=0)
    with pytest.raises(ConfigurationError, match="bag, a DSMIL, needs 2 passes"):
        ss.Parallel(bag=ss.DSMIL(6))
    with pytest.raises(ConfigurationError, match="DSMIL needs 2 passes"):
        ss.Projected(nn.Linear(3, 6), ss.DSMIL(6))
    for options in ({"in_dim": 6}, {"in_dim": 6, "outputs": 3}):
        with pytest.raises(ConfigurationError, match="reads it 2 times. Leave two_stream out: ds-mil has streams of its own"):
            MODELS["ds-mil"](two_stream=True, **options)
