import pytest
import torch
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


@pytest.mark.parametrize("activation", ["softmax", "sigmoid", "slot-softmax", "slot-exp", "slot-sigmoid"])
@pytest.mark.parametrize("fold", [True, False])
def test_gradients_of_a_wholly_masked_set_are_finite(activation, fold):
    pool = ss.UMBC(8, 4, activation=activation, fold=fold)
    x, mask = torch.randn(2, 5, 8, requires_grad=True), torch.ones(2, 5, dtype=torch.bool)
    mask[0] = False
    (pool(x, mask) * 100).sum().backward()
    assert torch.isfinite(x.grad).all()
    assert all(torch.isfinite(p.grad).all() for p in pool.parameters() if p.grad is not None)
