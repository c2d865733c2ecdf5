"""MultiPass: the slots of one pass are the queries of the next, and any partition gives the same answer."""

import pytest
import torch
from torch import nn

import setstream as ss
from setstream import testing
from setstream.errors import ConfigurationError, ConsistencyError, MismatchError, ShapeError
from setstream.gradients.encode import MODES
from setstream.gradients.importance import FLOOR
from setstream.gradients.protocol import Options
from setstream.pools import ACTIVATIONS
from setstream.sets.layout import pack
from setstream.sets.partition import InMemory
from setstream.states.state import State
from setstream.testing.gradients import default_loss, parameter_gradients
from tests.gradients.builders import check_unbiased
from tests.laws.strategies import pad


def make(passes=2, activation="slot-softmax", slots="learned", residual=False, **options):
    first = ss.UMBC(8, 3, 6, 8, heads=2, slots=slots, slot_residual=True)
    later = [ss.UMBC(8, 3, 6, 8, heads=2, activation=activation, normalise=True, slots="given") for _ in range(passes - 1)]
    pool = ss.MultiPass([first, *later], [nn.Linear(8, 6) for _ in later], residual=residual, **options)
    return ss.SetEncoder(nn.Sequential(nn.Linear(3, 8), nn.Tanh()), pool)


def build(passes):
    """A model that can be saved."""
    return ss.SetModel(make(passes), nn.Flatten())


def read(encoder, chunks):
    """The state after all passes over the chunks."""
    state = None
    for number in range(encoder.passes):
        state = state if number == 0 else encoder.next_pass(state)
        for chunk in chunks:
            state = encoder.update(state, chunk)
    return state


def test_it_is_what_it_says():
    """z of two passes, written plainly."""
    encoder = make(activation="softmax").eval()
    x = torch.randn(2, 50, 3)
    first, second = encoder.pool.pools
    h = encoder.phi(x)
    slots = encoder.pool.between[0](first(h))
    q = second.query_norm(second.query(slots)).unflatten(-1, (2, -1)).transpose(1, 2)
    k, v = (layer(h).unflatten(-1, (2, -1)).transpose(1, 2) for layer in (second.key, second.value))
    z = ((q @ k.mT / 2).softmax(-1) @ v).transpose(1, 2).flatten(2)
    torch.testing.assert_close(encoder(x), z)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("passes", [2, 3])
def test_exact_is_full(passes, activation):
    encoder = make(passes, activation, slots="gaussian").double().eval()
    sets = [torch.randn(size, 3, dtype=torch.float64) for size in (30, 0, 17)]
    expected = parameter_gradients(encoder, sets, default_loss, gradient="full")
    for options in ({"gradient": "exact", "chunk_size": 4}, {"gradient": "importance", "chunk_size": 30}):
        for name, gradient in parameter_gradients(encoder, sets, default_loss, **options).items():
            torch.testing.assert_close(gradient, expected[name], rtol=1e-10, atol=1e-10, msg=name)


@pytest.mark.parametrize("passes", [2, 3])
@pytest.mark.parametrize("gradient", ["unbiased", "importance"])
def test_sampled_gradients_are_unbiased(gradient, passes):
    """4,000 draws."""
    sets = [torch.randn(24, 3), torch.randn(9, 3)]
    check_unbiased(make(passes), sets, chunk_size=4, gradient=gradient)


class OneDraw(InMemory):
    """Chunks that are drawn once for all passes: what must not be done."""

    drawn = None

    def draw(self, *options):
        self.drawn = self.drawn or super().draw(*options)
        return self.drawn


@pytest.mark.slow
def test_passes_that_share_their_draw_are_biased():
    sharp = make()
    with torch.no_grad():
        sharp.phi[0].weight.mul_(4.0)

    def shared(model, sets, generator):
        options = Options(4, 1, False, generator, None, "cache", FLOOR, False)
        batch = OneDraw(pack(sets), 4, "random", generator, False)
        result = MODES["unbiased"](model, batch, options)
        while isinstance(result, State):
            result = MODES["unbiased"](model, batch, Options(4, 1, False, generator, None, "cache", FLOOR, False, result))
        parameters = dict(model.named_parameters())
        gradients = torch.autograd.grad(default_loss(result), parameters.values(), allow_unused=True)
        return {n: torch.zeros_like(p) if g is None else g for (n, p), g in zip(parameters.items(), gradients, strict=True)}

    x = torch.randn(2, 12, 3)
    ss.testing.check_unbiased_gradient(sharp, x, chunk_size=4, draws=4000, gradient="unbiased")
    with pytest.raises(ss.errors.LawViolation):
        ss.testing.check_unbiased_gradient(sharp, x, chunk_size=4, draws=4000, estimate=shared)


def test_phi_is_sampled_once_for_all_passes():
    encoder, seen = make(3), []
    encoder.phi.register_forward_hook(lambda module, inputs, out: seen.append(len(out)) if out.requires_grad else None)
    z = ss.encode(encoder, torch.randn(2, 60, 3), chunk_size=5, gradient="importance")
    z.square().sum().backward()
    assert seen == [10]  # one graph, of 5 elements of each set


def test_a_later_state_knows_its_first_pass():
    encoder = make().eval()
    x, y = torch.randn(2, 1, 20, 3)
    a, b = (encoder.next_pass(encoder.update(None, part)) for part in (x, y))
    torch.testing.assert_close(encoder.finalize(encoder.update(a, x[:, :5]) + encoder.update(a, x[:, 5:])), encoder(x))
    with pytest.raises(MismatchError, match="different first passes"):
        encoder.update(a, x) + encoder.update(b, x)
    with pytest.raises(MismatchError):
        encoder.update(None, x) + encoder.update(a, x)


def test_states_of_later_passes_are_saved_and_checked():
    encoder = make().eval()
    x = torch.randn(2, 20, 3)
    begun = State.from_bytes(encoder.next_pass(encoder.update(None, x)).to_bytes())
    torch.testing.assert_close(encoder.finalize(encoder.update(begun, x)), encoder(x))
    with pytest.raises(MismatchError):
        make().eval().update(begun, x)
    for name in ("pass7", "pass", "passable", "other"):
        accumulators = {f"{name}/{key.partition('/')[2]}": part for key, part in begun.accumulators.items()}
        edited = State.from_bytes(State(accumulators, begun.count, begun.origin).to_bytes())
        with pytest.raises(MismatchError, match="of pass 1 to 2"):
            encoder.update(edited, x)


def test_a_prediction_before_the_last_pass_is_an_error():
    model = ss.SetModel(make(), nn.Flatten()).eval()
    x = torch.randn(1, 30, 3)
    stream = model.stream()
    stream.update(x[:, :10])
    stream.update(x[:, 10:])
    with pytest.raises(ConsistencyError, match="pass 1 of 2"):
        stream.predict()
    stream.next_pass()
    stream.update(x)
    torch.testing.assert_close(stream.predict(), model(x))


def test_attention_of_each_pass():
    encoder = make(activation="softmax").eval()
    x = torch.randn(2, 30, 3)
    state = encoder.update(None, x)
    for after in (state, encoder.update(encoder.next_pass(state), x)):
        pieces = [encoder.attention(chunk, after) for chunk in x.split(7, 1)]
        weights = torch.cat(pieces, -1)
        assert weights.shape == (2, 2, 3, 30)
        torch.testing.assert_close(weights.sum(-1), torch.ones(2, 2, 3))


class Counted(ss.data.ArraySource):
    """A source that counts how often its end is read. (The first chunk is looked at once more, for its shape.)"""

    times = 0

    def read(self, start, stop):
        self.times += stop == len(self)
        return super().read(start, stop)


@pytest.mark.parametrize("passes", [2, 3])
def test_sources_are_read_once_per_pass(passes):
    encoder = make(passes).eval()
    sets = [torch.randn(size, 3) for size in (40, 31)]
    sources = [Counted(x) for x in sets]
    with torch.no_grad():
        z = ss.encode(encoder, sources, chunk_size=6, gradient="exact")
    torch.testing.assert_close(z, encoder(sets).detach())
    assert [source.times for source in sources] == [passes, passes]


@pytest.mark.parametrize("gradient", [name for name in MODES if name != "subset"])
def test_every_mode_and_layout_has_the_value_of_all_passes(gradient):
    encoder = make(3).double().train()
    sets = [torch.randn(size, 3, dtype=torch.float64) for size in (13, 0, 5)]
    x, mask = pad(sets)
    packed = torch.cat(sets), torch.tensor([0, 13, 13, 18])
    expected = encoder(sets)
    for layout, rest in ((sets, None), (packed, None), (x, mask), ([ss.data.ArraySource(one) for one in sets], None)):
        z = ss.encode(encoder, layout, rest, chunk_size=4, gradient=gradient)
        torch.testing.assert_close(z, expected, rtol=1e-10, atol=1e-10)


def test_it_is_saved_with_its_model(tmp_path):
    model = build(3).eval()
    model.save_pretrained(tmp_path, builder=build, options={"passes": 3})
    x = torch.randn(2, 9, 3)
    torch.testing.assert_close(ss.SetModel.from_pretrained(tmp_path, builder=build)(x), model(x))


def test_slot_attention():
    """Against its algorithm, written plainly."""
    pool = ss.SlotAttention(8, num_slots=4, passes=3).eval()
    x = torch.randn(2, 25, 8)
    umbc, update = pool.pools[0].pool, pool.between[0]
    inputs = pool.pools[0].module(x)
    slots = umbc.slots(None).expand(2, -1, -1)
    for _ in range(3):
        weights = (umbc.query_norm(umbc.query(slots)) @ umbc.key(inputs).mT / 8**0.5).softmax(1)
        slots = update((weights / weights.sum(-1, keepdim=True)) @ umbc.value(inputs), slots)
    torch.testing.assert_close(pool(x), slots)
    encoder = ss.SetEncoder(nn.Identity(), pool).eval()
    torch.testing.assert_close(encoder.finalize(read(encoder, x.split(4, 1))), slots, rtol=1e-4, atol=1e-5)


def test_the_laws_hold_where_the_passes_share_their_pool():
    """The random encoders of tests/laws have a pool for each pass."""
    encoder = ss.SetEncoder(nn.Linear(3, 8), ss.SlotAttention(8, num_slots=4, passes=3)).eval()
    sets = [torch.randn(size, 3) for size in (30, 0, 1, 17)]
    testing.check_mini_batch_consistency(encoder, sets)
    testing.check_permutation_invariance(encoder, sets)
    testing.check_merge(encoder, sets)
    testing.check_exact_gradient(encoder, sets, chunk_size=4)
    testing.check_exact_gradient(encoder, sets, chunk_size=30, gradient="importance")


def test_residual_slots():
    encoder = make(residual=True).eval()
    x = torch.randn(2, 20, 3)
    first = encoder.pool.pools[0]
    given = encoder.next_pass(encoder.update(None, x)).accumulators["pass2/given"]["slots"]
    torch.testing.assert_close(given, first.slots(None) + encoder.pool.between[0](first(encoder.phi(x))))


def test_a_store_of_states_cannot_read_sets_twice(tmp_path):
    with pytest.raises(ConfigurationError, match="reads its sets 2 times"):
        ss.StateStore(tmp_path / "states.db", build(2).eval())
    with pytest.raises(ConfigurationError, match="reads its sets 2 times"):
        build(2).eval().window(count=10, tile=2)


def test_what_cannot_be_built():
    pool, layer = ss.UMBC(8, 3), nn.Linear(8, 8)
    with pytest.raises(ConfigurationError, match="module after each"):
        ss.MultiPass([pool, pool, pool], [layer])
    with pytest.raises(ConfigurationError, match="only be the first pass"):
        ss.MultiPass([pool, ss.DeepSets("mean")], [layer])
    with pytest.raises(ConfigurationError, match="in_dim must agree"):
        ss.MultiPass([pool, ss.UMBC(4, 3)], [layer])
    with pytest.raises(ConfigurationError, match="number of passes"):
        ss.MultiPass(pool, layer, shared=True)
    with pytest.raises(ConfigurationError, match="later pass"):
        ss.UMBC(8, 3, slots="given")(torch.randn(1, 4, 8))
    with pytest.raises(ShapeError, match=r"must be \(B, 3, 8\)"):
        ss.MultiPass([ss.UMBC(8, 5), pool], [layer])(torch.randn(1, 4, 8))
    with pytest.raises(ConfigurationError, match="reads its sets 2 times"):
        ss.pure.empty(make(), 1, torch.zeros(1, 3))
