"""encode(): exact is exact, unbiased is unbiased, and what the paper writes for more than one chunk is not."""

import copy
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import setstream as ss
from setstream import testing
from setstream.errors import ConfigurationError, LawViolation, ShapeError
from setstream.testing import gradients as gradients_
from tests.laws.strategies import encoders, pad, ragged_sets

SETS = [torch.randn(n, 3, generator=torch.Generator().manual_seed(n)) for n in (40, 23, 9)]


def make(pool=None, phi=None, seed=0):
    torch.manual_seed(seed)
    phi = phi or nn.Sequential(nn.Linear(3, 8), nn.Tanh())
    return ss.SetEncoder(phi, pool or ss.UMBC(8, 3, heads=2, slot_residual=True, norm_after=True))


def model(pool=None, seed=0):
    encoder = make(pool, seed=seed)
    width = 8
    return ss.SetModel(encoder, nn.Sequential(ss.nn.SAB(width), nn.Linear(width, 2)))


# -- exact ------------------------------------------------------------------------------------------------------------


@given(encoders(dtypes=(torch.float32, torch.float64)), ragged_sets(), st.integers(1, 20))
def test_exact_equals_full_for_every_pool(encoder, sets, chunk_size):
    testing.check_exact_gradient(encoder, sets, chunk_size=chunk_size)


@pytest.mark.parametrize(
    "options", [{"gradient": "unbiased"}, {"gradient": "importance"}, {"gradient": "importance", "features": "recompute"}]
)
@settings(max_examples=25)
@given(encoders(dtypes=(torch.float64,)), ragged_sets(longest=25))
def test_all_chunks_drawn_is_the_full_gradient(options, encoder, sets):
    testing.check_exact_gradient(encoder, sets, chunk_size=7, grad_chunks=99, partition="random", **options)


@pytest.mark.parametrize("gradient", ["full", "exact", "unbiased", "importance", "none"])
def test_the_value_is_that_of_the_full_set(gradient):
    encoder = make().eval()
    expected = encoder(SETS).detach()
    x, mask = pad(SETS)
    ptr = torch.tensor([0, 40, 63, 72])
    for sets, own_mask in ((SETS, None), (x, mask), ((torch.cat(SETS), ptr), None)):
        z = ss.encode(encoder, sets, own_mask, chunk_size=7, gradient=gradient)
        torch.testing.assert_close(z.detach(), expected, rtol=1e-5, atol=1e-5)
        assert z.requires_grad == (gradient != "none")
    with torch.no_grad():
        assert not ss.encode(encoder, SETS, gradient=gradient).requires_grad


@pytest.mark.parametrize("gradient", ["exact", "unbiased"])
def test_dropout_in_phi_draws_the_same_masks_both_ways(gradient):
    """The gradient must be the derivative of the very value that came out, dropout masks and all."""
    encoder = make(phi=nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.5), nn.Linear(8, 8))).double().train()
    x = torch.randn(1, 20, 3, dtype=torch.float64)
    weight = encoder.phi[0].weight

    def value():
        torch.manual_seed(5)
        return gradients_._loss(ss.encode(encoder, x, chunk_size=6, gradient=gradient, grad_chunks=99, partition="contiguous"))

    (gradient_,) = torch.autograd.grad(value(), weight)
    direction = torch.randn_like(weight)
    with torch.no_grad():
        weight.add_(1e-6 * direction)
    up = value().item()
    with torch.no_grad():
        weight.sub_(2e-6 * direction)
    down = value().item()
    assert abs((up - down) / 2e-6 - float((gradient_ * direction).sum())) < 1e-4 * abs(float((gradient_ * direction).sum()))


def test_the_callers_random_stream_is_not_replayed():
    encoder = make(phi=nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.5))).train()
    torch.manual_seed(0)
    z = ss.encode(encoder, SETS, gradient="exact")
    before = torch.rand(3)
    z.sum().backward()
    after = torch.rand(3)
    assert not torch.equal(before, after)


@pytest.mark.parametrize("gradient", ["exact", "unbiased", "importance"])
def test_elements_get_their_gradient(gradient):
    encoder = make().double().eval()
    x, mask = torch.randn(2, 20, 3, dtype=torch.float64), torch.rand(2, 20) > 0.3
    full = x.clone().requires_grad_()
    gradients_._loss(encoder(full, mask)).backward()
    mine = x.clone().requires_grad_()
    gradients_._loss(ss.encode(encoder, mine, mask, chunk_size=6, gradient=gradient, grad_chunks=99)).backward()
    torch.testing.assert_close(mine.grad, full.grad, rtol=1e-8, atol=1e-10)


def test_shared_parameters_accumulation_hooks_and_frozen_parts():
    shared = nn.Linear(8, 8)
    encoder = make(phi=nn.Sequential(nn.Linear(3, 8), nn.Tanh(), shared)).double()
    shared.double()
    sets = [x.double() for x in SETS]
    seen = []
    shared.weight.register_hook(lambda gradient: seen.append(gradient.clone()))

    def loss(gradient):
        return shared(ss.encode(encoder, sets, gradient=gradient, chunk_size=5)).square().sum()

    loss("full").backward()
    full = shared.weight.grad.clone()
    encoder.zero_grad()
    loss("exact").backward()
    torch.testing.assert_close(shared.weight.grad, full)
    assert len(seen) == 2  # a hook sees one gradient a backward, whatever the number of chunks
    torch.testing.assert_close(seen[0], seen[1])
    loss("exact").backward()
    torch.testing.assert_close(shared.weight.grad, 2 * full)
    # Frozen parameters get nothing, and cost no graph.
    encoder.zero_grad()
    encoder.phi.requires_grad_(False)
    for gradient in ("exact", "unbiased", "importance"):
        ss.encode(encoder, sets, gradient=gradient, chunk_size=5).square().sum().backward()
    assert all(p.grad is None for p in encoder.phi.parameters())
    assert encoder.pool.key.weight.grad is not None
    encoder.requires_grad_(False)
    assert not ss.encode(encoder, sets, gradient="exact").requires_grad


def test_nested_sets_of_sets():
    """An encoding of encodings: the inner elements are themselves learned."""
    inner, outer = make().double(), ss.SetEncoder(nn.Flatten(), ss.UMBC(24, 2)).double()
    bags = [[torch.randn(n, 3).double() for n in (5, 9, 4)], [torch.randn(7, 3).double()]]

    def loss(gradient):
        encoded = [ss.encode(inner, bag, gradient=gradient, chunk_size=3) for bag in bags]
        return gradients_._loss(ss.encode(outer, encoded, gradient=gradient, chunk_size=2))

    parameters = list(inner.parameters())
    for a, b in zip(torch.autograd.grad(loss("full"), parameters), torch.autograd.grad(loss("exact"), parameters), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("gradient", ["exact", "unbiased", "importance"])
def test_autocast(gradient):
    encoder = make()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        z = ss.encode(encoder, SETS, chunk_size=8, gradient=gradient, grad_chunks=99)
        loss = gradients_._loss(z)
    loss.backward()
    got = encoder.phi[0].weight.grad.clone()
    encoder.zero_grad()
    gradients_._loss(encoder(SETS)).backward()
    torch.testing.assert_close(got, encoder.phi[0].weight.grad, rtol=0.2, atol=0.05 * float(got.abs().max()))


# -- unbiased ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("grad_chunks", [1, 2, 3])
@pytest.mark.parametrize("replacement", [False, True])
def test_unbiased(grad_chunks, replacement):
    """Sets of 40, 23 and 9 in chunks of 8: different numbers of chunks, and unequal ones; residual and layer norm on."""
    testing.check_unbiased_gradient(model(), SETS, chunk_size=8, grad_chunks=grad_chunks, replacement=replacement)


@pytest.mark.parametrize(
    "pool", [ss.DeepSets("max"), ss.Parallel(a=ss.UMBC(8, 2), b=ss.DeepSets("min"))], ids=["max", "parallel"]
)
@pytest.mark.parametrize("grad_chunks", [1, 2])
def test_unbiased_for_extremes(pool, grad_chunks):
    testing.check_unbiased_gradient(make(pool), SETS, chunk_size=8, grad_chunks=grad_chunks)


def test_unbiased_with_a_given_partition():
    partition = [[list(range(30)), list(range(30, 40))], [[*range(0, 23, 2)], [*range(1, 23, 2)]], [[*range(9)]]]
    testing.check_unbiased_gradient(model(), SETS, draws=500, partition=partition)


@pytest.mark.parametrize(
    "pool", [None, ss.UMBC(8, 3, activation="slot-sigmoid"), ss.DeepSets("mean")], ids=["umbc", "sum", "mean"]
)
@pytest.mark.parametrize("wanted", [1, 2])
def test_importance_is_unbiased(pool, wanted):
    testing.check_unbiased_gradient(make(pool), SETS, gradient="importance", chunk_size=3, grad_chunks=wanted)


def test_importance_is_exact_for_the_pool_and_for_a_maximum():
    encoder = make().double().eval()
    sets = [x.double() for x in SETS]
    full = gradients_._gradients(encoder, sets, gradients_._loss, gradient="full")
    one = gradients_._gradients(encoder, sets, gradients_._loss, gradient="importance", chunk_size=2)
    for name in full:
        if name.startswith("pool."):
            torch.testing.assert_close(one[name], full[name], rtol=1e-9, atol=1e-11)
    # Eight features have at most eight elements that matter: ten draws hold them all.
    testing.check_exact_gradient(make(ss.DeepSets("max")), SETS, gradient="importance", chunk_size=10)


@pytest.mark.parametrize("features", ["cache", "recompute", "folder"])
@pytest.mark.parametrize("pool", [None, ss.DeepSets("mean"), ss.DeepSets("sum"), ss.DeepSets("max"), ss.SSE(8, 3)])
def test_importance_gives_the_same_however_features_are_kept(features, pool, tmp_path):
    encoder = make(pool).eval()
    where = tmp_path if features == "folder" else features
    found = []
    for keep in ("cache", where):
        generator = torch.Generator().manual_seed(3)
        found.append(
            gradients_._gradients(
                encoder, SETS, gradients_._loss, gradient="importance", chunk_size=4, features=keep, generator=generator
            )
        )
    for name in found[0]:
        torch.testing.assert_close(found[0][name], found[1][name], rtol=1e-4, atol=1e-5)
    assert not list(tmp_path.iterdir())  # nothing is left behind


def reference_estimate(scale_output, decoder_weight):
    """The estimator as the paper's equations have it, for any number of sampled chunks, written plainly."""

    def estimate(subject, sets, generator):
        encoder, wanted, chunk_size = subject.encoder, 2, 8
        zs, weights = [], []
        for x in sets:
            chunks = x[torch.randperm(len(x), generator=generator)].split(chunk_size)
            taken = set(torch.randperm(len(chunks), generator=generator)[:wanted].tolist())
            state = encoder.empty(1)
            for index, chunk in enumerate(chunks):
                part = encoder.update(None, chunk[None])
                state = state + (part if index in taken else part.detach())
            zs.append(encoder.finalize(state))
            weights.append(max(len(chunks) / wanted, 1.0))
        z = torch.cat(zs)
        if scale_output:  # the factor on the encoder's output instead of on the state
            factor = torch.tensor(weights)[:, None, None]
            z = z * factor + (z * (1 - factor)).detach()
        value = gradients_._loss(subject.head(z))
        learned = dict(subject.named_parameters())
        found = torch.autograd.grad(value, list(learned.values()), allow_unused=True)
        scaled = {}
        for (name, p), g in zip(learned.items(), found, strict=True):
            g = torch.zeros_like(p) if g is None else g
            scaled[name] = g * decoder_weight if name.startswith("head") else g
        return scaled

    return estimate


def test_the_papers_decoder_weight_is_biased_for_two_chunks():
    with pytest.raises(LawViolation, match="the mean for head"):
        subject = model()
        for p in subject.encoder.parameters():
            p.requires_grad_(False)
        frozen = reference_estimate(scale_output=False, decoder_weight=0.5)
        testing.check_unbiased_gradient(subject_with_grad(subject), SETS, draws=300, estimate=only_head(frozen))


def subject_with_grad(subject):
    subject.head.requires_grad_(True)
    return subject


def only_head(estimate):
    def run(subject, sets, generator):
        subject.encoder.requires_grad_(True)
        found = estimate(subject, sets, generator)
        subject.encoder.requires_grad_(False)
        return {name: g for name, g in found.items() if name.startswith("head")}

    return run


def test_scaling_the_output_is_biased_with_a_slot_residual():
    with pytest.raises(LawViolation, match="the mean for encoder"):
        testing.check_unbiased_gradient(
            model(), SETS, draws=1000, estimate=reference_estimate(scale_output=True, decoder_weight=1.0)
        )


def test_subset_is_biased():
    with pytest.raises(LawViolation):
        testing.check_unbiased_gradient(model(), SETS, draws=500, gradient="subset", chunk_size=8)


def test_with_replacement_extremes_are_refused():
    with pytest.raises(ConfigurationError, match="biased for a maximum or minimum"):
        ss.encode(make(ss.DeepSets("max")), SETS, replacement=True)


def test_a_generator_makes_it_reproducible():
    encoder = make()
    for gradient in ("unbiased", "importance", "subset"):
        found = [
            gradients_._gradients(
                encoder, SETS, gradients_._loss, gradient=gradient, chunk_size=4, generator=torch.Generator().manual_seed(7)
            )
            for _ in range(2)
        ]
        for name in found[0]:
            torch.testing.assert_close(found[0][name], found[1][name])


def test_gaussian_slots_in_training_are_unbiased_around_their_draw():
    """With a fixed draw, chunk sampling is the only noise; its mean is the gradient at that draw."""
    encoder = make(ss.UMBC(8, 3, slots="gaussian")).double().train()
    sets = [x.double() for x in SETS]

    def gradient(mode, generator=None, **options):
        torch.manual_seed(11)  # the slots' draw
        z = ss.encode(encoder, sets, gradient=mode, chunk_size=8, generator=generator, **options)
        return torch.autograd.grad(gradients_._loss(z), [encoder.pool.slots.raw_std, encoder.phi[0].weight])

    full = gradient("exact")
    again = gradient("unbiased", grad_chunks=99)
    for a, b in zip(full, again, strict=True):
        torch.testing.assert_close(a, b)


# -- sources ----------------------------------------------------------------------------------------------------------


class Counted:
    """Chunks that can be read again and again, and say how often they were."""

    def __init__(self, chunks):
        self.chunks, self.passes = chunks, 0

    def __iter__(self):
        self.passes += 1
        return iter(self.chunks)


def ragged_chunks(sets, size):
    longest = max(len(x) for x in sets)
    return [[x[i : i + size] for x in sets] for i in range(0, longest, size)]


def test_a_source_gives_the_exact_gradient():
    encoder = make().double().eval()
    sets = [x.double() for x in SETS]
    full = gradients_._gradients(encoder, sets, gradients_._loss, gradient="full")
    for options in (
        {"gradient": "full"},
        {"gradient": "exact"},
        {"gradient": "unbiased", "grad_chunks": 99},
        {"gradient": "importance", "grad_chunks": 99},
    ):
        source = ss.Chunks(ragged_chunks(sets, 7))
        found = gradients_._gradients(encoder, source, gradients_._loss, **options)
        for name in full:
            torch.testing.assert_close(found[name], full[name], rtol=1e-8, atol=1e-10)


def test_a_source_is_unbiased():
    encoder = make().eval()
    chunks = ragged_chunks([x.double() for x in SETS], 8)

    def estimate(subject, sets, generator):
        return gradients_._gradients(subject, ss.Chunks(chunks), gradients_._loss, generator=generator, grad_chunks=2)

    testing.check_unbiased_gradient(encoder, SETS, draws=1500, estimate=estimate)


def test_bad_sources_and_options_are_refused():
    encoder = make()
    with pytest.raises(ConfigurationError, match="only gives its chunks once"):
        ss.Chunks(x for x in [torch.zeros(1, 2, 3)])
    with pytest.raises(ShapeError, match="source of chunks is empty"):
        ss.encode(encoder, ss.Chunks([]))
    with pytest.raises(ShapeError, match="first had 1, this one has 2"):
        ss.encode(encoder, ss.Chunks([torch.zeros(1, 2, 3), torch.zeros(2, 2, 3)]))
    with pytest.raises(ConfigurationError, match="chunk_size must be at least 1; got 0"):
        ss.encode(encoder, SETS, chunk_size=0)
    with pytest.raises(ConfigurationError, match="grad_chunks must be at least 1"):
        ss.encode(encoder, SETS, grad_chunks=0)
    with pytest.raises(ConfigurationError, match="unknown gradient 'fast'"):
        ss.encode(encoder, SETS, gradient="fast")
    with pytest.raises(ConfigurationError, match="unknown partition 'sorted'"):
        ss.encode(encoder, SETS, partition="sorted")
    with pytest.raises(ShapeError, match="partition of set 0 must name each of its 40 elements exactly once"):
        ss.encode(encoder, SETS, partition=[[[0, 1]], [list(range(23))], [list(range(9))]])
    for sets in (SETS, [torch.zeros(0, 3)]):  # also a rank whose part of the sets is empty: all ranks refuse, or one would wait
        with pytest.raises(ConfigurationError, match="dropout in training mode"):
            ss.encode(make(phi=nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.5))), sets, gradient="importance")
    with pytest.raises(ConfigurationError, match="floor must be positive"):
        ss.encode(encoder, SETS, gradient="importance", floor=0.0)


# -- losses over the elements -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_streamed_loss_is_the_loss(reduction):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh()).double()

    class Fit(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = net

        def forward(self, centre, chunk, mask):
            return (self.net(chunk) - centre[:, None]).square().sum(-1)

    centre = torch.randn(3, 4).double().requires_grad_()
    sets = [x.double() for x in SETS]
    weights = torch.tensor([1.0, -2.0, 0.5]).double()
    plain = torch.stack([getattr((net(x) - c).square().sum(-1), reduction)() for x, c in zip(sets, centre, strict=True)])
    targets = [centre, *net.parameters()]
    expected = torch.autograd.grad((plain * weights).sum(), targets)
    x, mask = pad(sets)
    for layout, own_mask in ((sets, None), (x, mask)):
        loss = ss.streamed_loss(Fit(), layout, [centre], own_mask, chunk_size=7, reduction=reduction)
        torch.testing.assert_close(loss, plain)
        for a, b in zip(torch.autograd.grad((loss * weights).sum(), targets), expected, strict=True):
            torch.testing.assert_close(a, b)


def test_streamed_loss_refuses_what_it_cannot():
    with pytest.raises(ShapeError, match="one number for each element"):
        ss.streamed_loss(lambda chunk, mask: chunk, SETS)
    with pytest.raises(ConfigurationError, match="unknown reduction"):
        ss.streamed_loss(lambda chunk, mask: chunk.sum(-1), SETS, reduction="max")
    with pytest.raises(ConfigurationError, match="no gradient to the elements"):
        ss.streamed_loss(lambda chunk, mask: chunk.sum(-1), [copy.copy(SETS[0]).requires_grad_()])


@pytest.mark.parametrize("partition", ["contiguous", "given"])
@pytest.mark.parametrize(
    "options",
    [{"gradient": g} for g in ("none", "exact", "unbiased", "importance")]
    + [{"gradient": "unbiased", "grad_chunks": n} for n in (2, 3)],
)
def test_a_pool_that_depends_on_its_chunks_gets_the_chunks_that_were_asked_for(options, partition):
    torch.manual_seed(0)
    module, x = ss.nn.SetTransformer(4), torch.randn(3, 20, 4)
    encoder = ss.SetEncoder(nn.Identity(), ss.ChunkMean(module)).eval()
    cuts = [[0, 5, 10, 15, 20], [0, 2, 9, 20]][partition == "given"]
    given = [[list(range(a, b)) for a, b in pairwise(cuts)]] * 3
    expected = torch.stack([module(x[:, chunk]) for chunk in given[0]]).mean(0)
    asked = given if partition == "given" else "contiguous"
    torch.testing.assert_close(ss.encode(encoder, x, chunk_size=5, partition=asked, chunks="average", **options), expected)


@pytest.mark.parametrize("pool", ["max", "min"])
def test_a_maximum_over_a_source_whose_chunks_lack_some_sets(pool):
    encoder = make(ss.DeepSets(pool))
    long, short = torch.randn(50, 3), torch.randn(9, 3)
    pieces = [[long[i : i + 10], short[i : i + 10]] for i in range(0, 50, 10)]
    for _ in range(6):
        z = ss.encode(encoder, ss.Chunks(pieces), gradient="unbiased")
        torch.testing.assert_close(z, encoder([long, short]))
        z.sum().backward()
        assert all(torch.isfinite(p.grad).all() for p in encoder.phi.parameters())


def test_randomness_that_no_class_name_tells_is_noticed(tmp_path):
    class Noisy(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(3, 8)

        def forward(self, x):
            return nn.functional.dropout(self.linear(x), 0.5, self.training)

    encoder = ss.SetEncoder(Noisy(), ss.UMBC(8, 2)).train()
    for sets in (torch.randn(1, 20, 3), ss.Chunks(torch.randn(1, 20, 3).split(5, 1))):
        with pytest.raises(ss.errors.ConfigurationError, match="draws random numbers"):
            ss.encode(encoder, sets, gradient="importance")
    with pytest.raises(ss.errors.ConfigurationError, match="a folder that exists"):
        ss.encode(encoder.eval(), torch.randn(1, 20, 3), gradient="importance", features="cach")


def test_a_pool_that_does_not_know_its_width_gets_pieces_that_suit_phi():
    seen = []
    phi = nn.Sequential(nn.Linear(2, 4096), nn.ReLU())
    phi.register_forward_hook(lambda module, inputs, output: seen.append(len(output)))
    ss.encode(ss.SetEncoder(phi, ss.DeepSets("mean")).eval(), torch.randn(1, 3000, 2), chunk_size=100, gradient="none")
    assert max(seen) <= 2**22 // (4 * 4096)
