"""Steps of EM as later passes over the points."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import setstream as ss
from setstream import testing
from setstream.errors import ConfigurationError, ShapeError
from setstream.tasks.clustering import DiagonalMixture, em, pretrained, refined, sample
from setstream.tasks.clustering.em import STRENGTH, EMStep, FromRows
from setstream.tasks.clustering.models import MODELS
from setstream.tasks.registry import predict_in_chunks


def plain_em(x: torch.Tensor, mixture: DiagonalMixture, steps: int) -> DiagonalMixture:
    """The steps in float64, written with the density of each point under each component."""
    x = x.double()
    logits, means, scales = mixture.logits.double(), mixture.means.double(), mixture.scales.double()
    for _ in range(steps):
        densities = torch.distributions.Normal(means.unsqueeze(1), scales.unsqueeze(1)).log_prob(x.unsqueeze(2)).sum(-1)
        shares = (densities + logits.log_softmax(-1).unsqueeze(1)).softmax(-1)  # (B, N, K)
        weights = shares.sum(1).unsqueeze(-1) + STRENGTH
        centres = (shares.mT @ x + STRENGTH * means) / weights
        moved = (x.unsqueeze(2) - centres.unsqueeze(1)).square()
        spread = torch.einsum("bnk,bnkd->bkd", shares, moved) + STRENGTH * (scales.square() + (means - centres).square())
        logits = (weights.squeeze(-1) - STRENGTH + STRENGTH * logits.softmax(-1)).log()
        means, scales = centres, (spread / weights).clamp(min=1e-4).sqrt()
    return DiagonalMixture(logits, means, scales)


def small(name: str, **options: object) -> ss.SetModel:
    torch.manual_seed(0)
    return MODELS[name](**options).double().eval()


@pytest.mark.parametrize("name", ["deepsets", "umbc+set-transformer", "umbc+passes"])
@pytest.mark.parametrize("steps", [1, 3])
def test_passes_are_the_steps_of_em_written_plainly(name, steps):
    model, points = small(name), sample(3, 200, generator=torch.Generator().manual_seed(0)).points.double()
    expected = plain_em(points, model(points), steps).flat()
    better = refined(model, steps)
    assert better.encoder.passes == model.encoder.passes + steps
    torch.testing.assert_close(better(points).flat(), expected, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(predict_in_chunks(better, points.split(37, dim=1)).flat(), expected, rtol=1e-9, atol=1e-9)


@settings(max_examples=20)
@given(seed=st.integers(0, 10_000), steps=st.integers(1, 3), clusters=st.integers(1, 5), dim=st.integers(1, 3))
def test_the_laws_hold(seed, steps, clusters, dim):
    torch.manual_seed(seed)
    options = {"clusters": clusters, "dim": dim, "width": 8, "num_slots": 3, "frequencies": 2, "sabs": 1, "heads": 2}
    encoder = MODELS["umbc+em"](em_steps=steps, **options).encoder.eval()
    sets = [torch.randn(int(n), dim) for n in torch.randint(1, 40, (3,))]
    testing.check_mini_batch_consistency(encoder, sets, trials=2)
    testing.check_permutation_invariance(encoder, sets, trials=2)
    testing.check_merge(encoder, sets, trials=1)


def test_steps_lower_the_nll_of_every_set():
    """EM never lowers the likelihood; the points' worth of the start may cost a little, far below a step's gain."""
    model, drawn = pretrained("umbc+set-transformer"), sample(100, 512, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        nll = [
            refined(model, steps)(drawn.points).nll(drawn.points) if steps else model(drawn.points).nll(drawn.points)
            for steps in range(3)
        ]
    assert bool((nll[1] < nll[0] + 1e-3).all())
    assert bool((nll[2] < nll[1] + 1e-3).all())
    assert float((nll[0] - nll[2]).mean()) > 0.1


def test_a_component_without_points_stays_and_an_empty_set_keeps_its_mixture():
    model = small("umbc+set-transformer")
    better = refined(model, 2)
    empty = [torch.zeros(0, 2, dtype=torch.float64), torch.randn(5, 2, dtype=torch.float64)]
    torch.testing.assert_close(better(empty).named()["means"][0], model(empty).means[0])
    torch.testing.assert_close(better(empty).named()["weights"][0], model(empty).named()["weights"][0])
    far = torch.full((1, 50, 2), 1e3, dtype=torch.float64)
    assert bool(better(far).flat().isfinite().all())


def test_in_training_the_mixture_before_the_steps_is_returned_and_trained():
    model = small("umbc+fourier", width=16, frequencies=4)
    better = refined(model, 2)
    points = sample(2, 64, generator=torch.Generator().manual_seed(0)).points.double()
    gradients = []
    for one in (model.train(), better.train()):
        mixture = one.head(ss.encode(one.encoder, points, gradient="full"))
        gradients.append(torch.autograd.grad(mixture.nll(points).sum(), [*model.parameters()]))
    torch.testing.assert_close(*gradients)
    better.eval()
    torch.testing.assert_close(better(points).flat(), plain_em(points, model.eval()(points), 2).flat())


@pytest.mark.parametrize("gradient", ["exact", "importance"])
def test_gradients_go_through_the_steps_where_they_are_asked_for(gradient):
    model = refined(small("umbc+fourier", width=16, frequencies=4), 2)
    points = sample(2, 64, generator=torch.Generator().manual_seed(0)).points.double()
    found = []
    for options in ({"gradient": "full"}, {"gradient": gradient, "chunk_size": 16, "grad_chunks": 4}):
        loss = model.head(ss.encode(model.encoder, points, **options)).nll(points).sum()
        found.append(torch.autograd.grad(loss, [*model.parameters()]))
    for full, other in zip(*found, strict=True):
        torch.testing.assert_close(full, other, rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("gradient", ["full", "exact", "unbiased", "importance", "subset"])
def test_every_mode_trains_all_weights(gradient):
    better = refined(small("umbc+fourier", width=16, frequencies=4), 2).train()
    sets = [torch.randn(size, 2, dtype=torch.float64) for size in (30, 0, 1)]
    better.head(ss.encode(better.encoder, sets, chunk_size=8, gradient=gradient)).flat().square().sum().backward()
    assert all(p.grad is not None and bool(p.grad.isfinite().all()) for p in better.parameters())


class Begin(torch.nn.Module):
    """A head that answers every set with one mixture."""

    def __init__(self, mixture: DiagonalMixture) -> None:
        super().__init__()
        self.mixture = mixture

    def forward(self, z: torch.Tensor) -> DiagonalMixture:
        given = self.mixture
        return DiagonalMixture(*(one.expand(len(z), *one.shape[1:]) for one in (given.logits, given.means, given.scales)))


def begun_at(mixture: DiagonalMixture, steps: int) -> ss.SetModel:
    model = ss.SetModel(ss.SetEncoder(torch.nn.Linear(2, 4), ss.DeepSets("mean")), Begin(mixture))
    return refined(model.to(mixture.means.dtype).eval(), steps)


@pytest.mark.parametrize("shift", [0.0, 100.0, 1e4, 1e6])
@pytest.mark.parametrize("wide", [True, False])
def test_far_from_the_origin_the_steps_are_as_accurate(shift, wide, monkeypatch):
    """In float32, also with the sums of a device without float64: the squares of coordinates must not cancel."""
    if not wide:
        monkeypatch.setattr(em, "accumulator_dtype", lambda device: torch.float32)
    drawn = sample(1, 1000, generator=torch.Generator().manual_seed(1))
    start = DiagonalMixture(drawn.truth.logits, drawn.truth.means + shift + 0.1, drawn.truth.scales * 1.2)
    points = drawn.points + shift
    with torch.no_grad():
        found, expected = begun_at(start, 1)(points), plain_em(points, start, 1)
    torch.testing.assert_close(found.scales.double(), expected.scales, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(found.logits.double(), expected.logits, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(found.means.double(), expected.means, rtol=2e-7, atol=1e-5)  # one rounding to float32


DEGENERATE = {
    "one point": torch.tensor([[1.0, 2.0]]),
    "equal points": torch.full((50, 2), 3.0),
    "two places": torch.tensor([[0.0, 0.0], [1e3, -1e3]]).repeat(10, 1),
    "huge": torch.randn(30, 2, generator=torch.Generator().manual_seed(0)) * 1e15,
    "tiny": torch.randn(30, 2, generator=torch.Generator().manual_seed(0)) * 1e-30,
}


@pytest.mark.parametrize("points", DEGENERATE.values(), ids=DEGENERATE)
@pytest.mark.parametrize("name", ["deepsets", "umbc+set-transformer"])
def test_degenerate_sets_have_finite_mixtures(name, points):
    """Beside an empty set, in one piece and point by point. For far points `deepsets` gives components no weight at all."""
    better, sets = refined(pretrained(name), 3), [points, torch.zeros(0, 2), torch.randn(5, 2)]
    pieces = [[one[place : place + 1] for one in sets] for place in range(len(points))]
    with torch.no_grad():
        whole, parts = better([points, sets[1], sets[2][: len(points)]]), predict_in_chunks(better, pieces)
    assert bool(whole.flat().isfinite().all())
    assert bool((whole.scales > 0).all())
    torch.testing.assert_close(parts.flat(), whole.flat(), rtol=1e-4, atol=1e-5 + 1e-7 * float(points.abs().max()))


def test_steps_may_be_added_to_steps():
    model, points = small("umbc+set-transformer"), torch.randn(2, 40, 2, dtype=torch.float64)
    torch.testing.assert_close(refined(refined(model, 1), 2)(points).flat(), refined(model, 3)(points).flat())


def test_states_of_a_step_travel_and_show_responsibilities():
    """Saved and loaded between all chunks; the attention of a step is q_kn / w_k."""
    encoder = refined(small("umbc+set-transformer"), 2).encoder
    points = torch.randn(2, 30, 2, dtype=torch.float64)
    state = encoder.update(None, points)
    for _ in range(2):
        state = encoder.next_pass(state)
        for chunk in points.split(11, 1):
            state = ss.State.from_bytes(encoder.update(state, chunk).to_bytes())
    torch.testing.assert_close(encoder.finalize(state), encoder(points))
    given = FromRows()(state.accumulators["pass3/given"]["slots"])
    shares = given.component_distribution.log_prob(points.unsqueeze(2)) + given.logits.log_softmax(-1).unsqueeze(1)
    shares = shares.softmax(-1)  # (B, N, K)
    weights = encoder.attention(points, state)[:, 0]
    torch.testing.assert_close(weights, (shares / shares.sum(1, keepdim=True)).mT)


def better_deepsets(steps: int) -> ss.SetModel:
    """A builder of one's own."""
    return refined(MODELS["deepsets"](), steps)


def test_a_run_is_opened_without_trust(tmp_path):
    """By name: its modules are first built without memory."""
    MODELS["umbc+em"](width=16).save_pretrained(tmp_path, builder=MODELS["umbc+em"], options={"width": 16})
    assert ss.SetModel.from_pretrained(tmp_path).encoder.passes == 3


@pytest.mark.parametrize(
    ("build", "options"), [(MODELS["umbc+em"], {"em_steps": 3, "width": 16}), (better_deepsets, {"steps": 1})]
)
def test_it_is_saved_with_its_builder(build, options, tmp_path):
    model = build(**options).eval()
    with pytest.raises(ConfigurationError, match="the builder of this model is not known"):
        model.save_pretrained(tmp_path)
    model.save_pretrained(tmp_path, builder=build, options=options)
    again = ss.SetModel.from_pretrained(tmp_path, trust=[f"{__name__}:better_deepsets"])
    points = torch.randn(2, 30, 2)
    assert again.encoder.passes == model.encoder.passes
    torch.testing.assert_close(again(points).flat(), model(points).flat())


def test_what_cannot_be_refined_is_refused():
    with pytest.raises(ConfigurationError, match="at least one step"):
        refined(small("deepsets"), 0)
    slots = ss.SetModel(ss.SetEncoder(torch.nn.Linear(2, 8), ss.SlotAttention(8, 4, passes=2)), torch.nn.Identity())
    with pytest.raises(ConfigurationError, match="a pool of one pass"):
        refined(slots, 1)
    with pytest.raises(ConfigurationError, match="cannot be the first pass"):
        EMStep(2, 4, 2)(torch.randn(1, 10, 2))
    three = MODELS["deepsets"](clusters=3).eval()
    with pytest.raises(ShapeError, match=r"mixtures of 4 components .* got \(1, 3, 5\).*numbers of clusters"):
        refined(three, 1)(torch.randn(1, 10, 2))
    with pytest.raises(ShapeError, match="elements of width 2"):
        refined(three, 1, clusters=3, dim=3)
