import pytest
import torch
from torch import nn
from torch.nn import functional as F

import setstream as ss
from setstream.errors import ConfigurationError
from setstream.pools.umbc import folding_pays


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"activation": "relu"}, "unknown activation 'relu': choose one of softmax, sigmoid"),
        ({"activation": F.softplus}, "a name or an ss.Activation; got builtin_function_or_method"),
        ({"slots": "random"}, "unknown slots 'random'"),
        ({"eval_slots": "median"}, "unknown eval_slots 'median'"),
        ({"heads": 3}, "heads must divide out_dim; got out_dim = 8 and heads = 3"),
        ({"num_slots": 0}, "num_slots must be at least 1; got 0"),
        ({"slot_dropout": 1.0}, "probability below 1; got 1.0"),
    ],
)
def test_bad_options_are_refused(options, message):
    with pytest.raises(ConfigurationError, match=message):
        ss.UMBC(**({"in_dim": 8, "num_slots": 4} | options))


@pytest.mark.parametrize(
    ("weigh", "log", "message"),
    [
        (lambda logits: logits, False, "strictly positive"),
        (torch.relu, False, "strictly positive"),
        (lambda logits: logits.log(), True, "finite"),
        (lambda logits: logits.exp() / logits.exp().sum(-1, keepdim=True), False, "mixes the elements"),
        (lambda logits: logits - logits.amax(), True, "mixes the elements"),
        (lambda logits: logits.sum(-1).exp(), False, "keep the shape"),
        (lambda logits: 3.0, False, "keep the shape .* gave float"),
    ],
)
def test_activations_that_break_consistency_are_refused(weigh, log, message):
    with pytest.raises(ConfigurationError, match=message):
        ss.Activation("mine", weigh, log=log)


def test_a_users_exp_is_the_softmax():
    mine = ss.UMBC(8, 4, activation=ss.Activation("exp", torch.exp), bias=False)
    softmax = ss.UMBC(8, 4, activation="softmax", bias=False)
    softmax.load_state_dict(mine.state_dict())
    x = torch.randn(2, 30, 8)
    torch.testing.assert_close(mine(x), softmax(x))


def test_gaussian_slots_are_drawn_once_a_set_and_pass_in_training_and_are_the_mean_in_eval():
    pool = ss.UMBC(8, 4, slots="gaussian")
    with torch.no_grad():
        pool.slots.raw_std.fill_(1.0)
    x = torch.randn(1, 20, 8).expand(3, -1, -1)
    z = pool.train()(x)
    assert not torch.allclose(z[0], z[1])  # one draw a set
    assert not torch.allclose(z, pool(x))  # one draw a pass
    z = pool.eval()(x)
    torch.testing.assert_close(z, pool(x))
    learned = ss.UMBC(8, 4, slots="learned").eval()
    learned.load_state_dict({name: value for name, value in pool.state_dict().items() if "raw_std" not in name})
    torch.testing.assert_close(learned(x), z)


@pytest.mark.parametrize("kind", ["gaussian", "shared-gaussian"])
def test_slot_draws_have_the_stated_mean_and_deviation(kind):
    """20,000 draws; |z| below 4.5 for each of 3 x 2 means, and the deviation within 5 standard errors."""
    slots = ss.UMBC(2, 3, slots=kind).slots.train()
    with torch.no_grad():
        slots.raw_std.uniform_(-1, 1)
    draws = slots(slots.draw(20_000, torch.device("cpu"), torch.Generator().manual_seed(0))).detach()
    std = F.softplus(slots.raw_std).expand(3, 2).detach()
    z = (draws.mean(0) - slots.mean.detach()) / (std / 20_000**0.5)
    assert z.abs().max() < 4.5
    assert ((draws.std(0) / std - 1).abs() < 5 / (2 * 20_000) ** 0.5).all()


def test_the_mean_of_a_shared_gaussian_makes_equal_slots_and_a_fixed_draw_does_not():
    x = torch.randn(1, 20, 8)
    mean = ss.UMBC(8, 4, slots="shared-gaussian").eval()(x)
    assert torch.allclose(mean[:, 0], mean[:, 1])
    fixed = ss.UMBC(8, 4, slots="shared-gaussian", eval_slots="fixed").eval()
    with torch.no_grad():
        fixed.slots.raw_std.fill_(1.0)
    assert not torch.allclose(fixed(x)[:, 0], fixed(x)[:, 1])
    again = ss.UMBC(8, 4, slots="shared-gaussian", eval_slots="fixed").eval()
    again.load_state_dict(fixed.state_dict())
    torch.testing.assert_close(again(x), fixed(x))


def test_all_slot_parameters_learn():
    for kind in ("learned", "gaussian", "shared-gaussian"):
        pool = ss.UMBC(8, 4, slots=kind, activation="sigmoid", slot_residual=True, norm_after=True)
        (pool(torch.randn(2, 10, 8)) * torch.randn(2, 4, 8)).sum().backward()
        assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in pool.parameters()), kind


def test_slot_residual_and_layer_norm():
    plain = ss.UMBC(8, 4)
    x = torch.randn(2, 10, 8)
    queries = plain.query_norm(plain.query(plain.slots.mean))
    options = {"slot_residual": True, "norm_after": True}
    full = ss.UMBC(8, 4, **options)
    full.load_state_dict(plain.state_dict(), strict=False)
    torch.testing.assert_close(full(x), F.layer_norm(plain(x) + queries, (8,)))


def test_slot_dropout_drops_whole_slots_and_keeps_the_mean():
    """2,000 sets of 4 slots at p = 0.25: the share of dropped slots within 5 standard errors."""
    pool = ss.UMBC(8, 4, slot_dropout=0.25)
    x = torch.randn(1, 10, 8).expand(2000, -1, -1)
    z = pool.train()(x)
    expected = pool.eval()(x[:1])
    dropped = (z == 0).all(-1)
    assert ((z == 0).any(-1) == dropped).all()
    assert abs(float(dropped.float().mean()) - 0.25) < 5 * (0.25 * 0.75 / 8000) ** 0.5
    torch.testing.assert_close(z[~dropped], (expected / 0.75).expand_as(z)[~dropped])


def test_the_cheaper_form_is_chosen():
    assert folding_pays(128, 4, 128, 4)
    assert not folding_pays(128, 64, 128, 4)
    assert ss.UMBC(128, 4, heads=4).folded
    assert not ss.UMBC(128, 64, heads=4).folded
    assert ss.UMBC(128, 64, heads=4, fold=True).folded


@pytest.mark.parametrize("size", [255, 5000])
@pytest.mark.parametrize("fold", [True, False])
def test_blocks_are_chunks(monkeypatch, size, fold):
    """However the kernel cuts its work, over elements and over sets, the answer is the same."""
    from setstream.pools.kernels import weighted_sums

    pool = ss.UMBC(8, 4, heads=2, fold=fold, slots="gaussian", activation="slot-exp").double().train()
    x = torch.randn(5, size, 8).double()
    mask = torch.rand(5, size) > 0.2
    torch.manual_seed(1)
    whole = pool(x, mask)
    monkeypatch.setattr(weighted_sums, "CPU_BLOCK", 64)
    torch.manual_seed(1)
    torch.testing.assert_close(pool(x, mask), whole, rtol=1e-9, atol=1e-12)


def test_parallel_is_its_members():
    torch.manual_seed(0)
    bag, most = ss.UMBC(8, 4, slots="gaussian"), ss.DeepSets("max")
    encoder = ss.SetEncoder(nn.Linear(3, 8), ss.Parallel(bag=bag, most=most)).eval()
    x, mask = torch.randn(2, 10, 3), torch.rand(2, 10) > 0.5
    z = encoder(x, mask)
    torch.testing.assert_close(z["bag"], ss.SetEncoder(encoder.phi, bag)(x, mask))
    torch.testing.assert_close(z["most"], ss.SetEncoder(encoder.phi, most)(x, mask))
    with pytest.raises(ss.errors.RemovalError):
        encoder.update(None, x) - encoder.update(None, x)
    assert encoder.pool.consistent
    assert not ss.Parallel(a=bag, b=ss.ChunkMean(nn.Identity())).consistent
    with pytest.raises(ConfigurationError, match="in_dim must agree"):
        ss.Parallel(a=ss.UMBC(8, 4), b=ss.UMBC(9, 4))
    with pytest.raises(ConfigurationError, match="at least one pool"):
        ss.Parallel()
    with pytest.raises(ConfigurationError, match="a is a Linear"):
        ss.Parallel(a=nn.Linear(2, 2))
    # Two pools with random slots draw for themselves, in training too.
    twice = ss.SetEncoder(nn.Linear(3, 8), ss.Parallel(a=bag, b=ss.UMBC(8, 2, slots="gaussian"))).train()
    state = twice.update(twice.update(None, x), x)
    assert {name for name in state.accumulators if name.endswith("draw")} == {"a/draw", "b/draw"}


def test_chunk_mean_is_the_mean_of_its_chunks():
    head = ss.nn.SetTransformer(8)
    encoder = ss.SetEncoder(nn.Identity(), ss.ChunkMean(head))
    x = torch.randn(2, 12, 8)
    state = sum(encoder.update(None, chunk) for chunk in (x[:, :2], x[:, 2:5], x[:, 5:]))
    expected = (head(x[:, :2]) + head(x[:, 2:5]) + head(x[:, 5:])) / 3
    torch.testing.assert_close(encoder.finalize(state, chunks="average"), expected)
    # A chunk that has nothing of a set does not count for it.
    state = encoder.update(encoder.update(None, [x[0], x[1, :0]]), [x[0, :0], x[1]])
    torch.testing.assert_close(encoder.finalize(state), head(x))


def test_unknown_poolings():
    with pytest.raises(ConfigurationError, match="unknown pool 'median'"):
        ss.DeepSets("median")
    with pytest.raises(ConfigurationError, match="unknown pool 'median' over the slots"):
        ss.SSE(8, 4, pool="median")
    with pytest.raises(ConfigurationError, match="one entry for each layer"):
        ss.HierarchicalSSE(8, ())


def test_a_hierarchy_draws_once_a_pass_and_keeps_empty_sets_empty():
    encoder = ss.SetEncoder(nn.Identity(), ss.HierarchicalSSE(8, (4, 2)))
    with torch.no_grad():
        for layer in encoder.pool.layers:
            layer.slots.raw_std.fill_(1.0)
    x = torch.randn(2, 6, 8)
    state = encoder.train().update(None, x)
    torch.testing.assert_close(encoder.finalize(state), encoder.finalize(state))
    starts = [encoder.empty(2, generator=torch.Generator().manual_seed(1)) for _ in range(2)]
    torch.testing.assert_close(*(encoder.finalize(encoder.update(start, x)) for start in starts))
    assert torch.equal(encoder.eval()([x[0, :0], x[1]])[0], torch.zeros(2, 8))
    ss.testing.check_slot_equivariance(ss.SetEncoder(nn.Identity(), ss.SSE(8, 4, pool="max")), x)


@pytest.mark.parametrize("activation", ["softmax", "sigmoid", "slot-softmax", "slot-exp", "slot-sigmoid"])
@pytest.mark.parametrize("fold", [True, False])
def test_gradients_of_a_wholly_masked_set_are_finite(activation, fold):
    pool = ss.UMBC(8, 4, activation=activation, fold=fold)
    x, mask = torch.randn(2, 5, 8, requires_grad=True), torch.ones(2, 5, dtype=torch.bool)
    mask[0] = False
    (pool(x, mask) * 100).sum().backward()
    assert torch.isfinite(x.grad).all()
    assert all(torch.isfinite(p.grad).all() for p in pool.parameters() if p.grad is not None)
