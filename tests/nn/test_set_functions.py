import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributions import Categorical, Independent, MixtureSameFamily, Normal
from torch.nn import functional as F

import setstream as ss
from setstream.errors import ConfigurationError, MaskError, ShapeError
from tests.laws.strategies import pad

DIM = 8
INVARIANT = {
    "PMA": lambda: ss.nn.PMA(DIM, num_seeds=3, layer_norm=True),
    "SetTransformer": lambda: ss.nn.SetTransformer(DIM, num_seeds=2),
    "SetTransformer-ISAB": lambda: ss.nn.SetTransformer(DIM, num_inducing=4, num_seeds=3, layer_norm=True),
    "FSPool": lambda: ss.nn.FSPool(DIM),
    "DiffEM": lambda: ss.nn.DiffEM(DIM, heads=3, components=2),
    "DiffEM-all": lambda: ss.nn.DiffEM(DIM, heads=2, components=3, output="all"),
    "GatedAttention": lambda: ss.nn.GatedAttention(DIM),
    "DSMIL": lambda: ss.nn.DSMIL(DIM, num_classes=2),
}
EQUIVARIANT = {
    "MAB": lambda: ss.nn.MAB(DIM),
    "SAB": lambda: ss.nn.SAB(DIM, layer_norm=True),
    "ISAB": lambda: ss.nn.ISAB(DIM, num_inducing=3),
}


def build(name):
    torch.manual_seed(0)
    return {**INVARIANT, **EQUIVARIANT}[name]().double().eval()


lengths = st.lists(st.integers(0, 12), min_size=1, max_size=4)


@pytest.mark.parametrize("name", [*INVARIANT, *EQUIVARIANT])
@settings(max_examples=15)
@given(lengths, st.integers(0, 2**31))
def test_masked_sets_are_the_sets_without_padding(name, sizes, seed):
    """Whatever lies under the mask, NaN included, each set gets what it gets alone; outputs are never NaN."""
    torch.manual_seed(seed)
    module = build(name)
    sets = [torch.randn(n, DIM, dtype=torch.float64) for n in sizes]
    x, mask = pad(sets)
    if name == "MAB":  # its rows are queries, too, and those have no mask
        x = x.masked_fill(~mask.unsqueeze(-1), 0.0)
    out = module(x, mask=mask)
    assert torch.isfinite(out).all()
    for index, elements in enumerate(sets):
        mine = out[index] if name in INVARIANT else out[index][mask[index]]
        alone = module(x[index][mask[index]][None])[0]
        torch.testing.assert_close(mine, alone, rtol=1e-8, atol=1e-9)
        assert len(elements) == int(mask[index].sum())


@pytest.mark.parametrize("name", [*INVARIANT, *EQUIVARIANT])
def test_permutation(name):
    module = build(name)
    x = torch.randn(2, 15, DIM, dtype=torch.float64)
    order = torch.randperm(15)
    out, permuted = module(x), module(x[:, order])
    torch.testing.assert_close(permuted, out if name in INVARIANT else out[:, order], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", [*INVARIANT, *EQUIVARIANT])
def test_every_parameter_learns(name):
    module = build(name).train()
    out = module(torch.randn(4, 15, DIM, dtype=torch.float64), mask=torch.rand(4, 15) > 0.2)
    (out * torch.randn_like(out)).sum().backward()
    for parameter, value in module.named_parameters():
        assert value.grad is not None, parameter
        assert torch.isfinite(value.grad).all(), parameter
        # A key bias moves all logits of a query alike, which a softmax does not see.
        if not parameter.endswith(("key.bias", "score.bias")):
            assert value.grad.abs().sum() > 0, parameter


@pytest.mark.parametrize("name", [*INVARIANT, *EQUIVARIANT])
def test_wrong_shapes_are_refused(name):
    module = build(name).float()
    with pytest.raises(ShapeError, match=r"\(B, N, 8\); got \(2, 5, 7\)"):
        module(torch.zeros(2, 5, 7))
    with pytest.raises(MaskError, match=r"\(2, 5\), True for real elements; got torch.bool \(2, 4\)"):
        module(torch.zeros(2, 5, DIM), mask=torch.ones(2, 4, dtype=torch.bool))
    with pytest.raises(MaskError, match="got torch.float32"):
        module(torch.zeros(2, 5, DIM), mask=torch.ones(2, 5))


def test_mab_is_its_formula():
    block = ss.nn.MAB(DIM, heads=2, layer_norm=True).double()
    x, y = torch.randn(2, 3, DIM).double(), torch.randn(2, 7, DIM).double()
    attention = block.attention
    heads = []
    for rows in (slice(0, 4), slice(4, 8)):
        logits = attention.query(x)[..., rows] @ attention.key(y)[..., rows].mT / math.sqrt(4)  # the head's width
        heads.append(logits.softmax(-1) @ attention.value(y)[..., rows])
    h = F.layer_norm(x + attention.out(torch.cat(heads, -1)), (DIM,))
    expected = F.layer_norm(h + torch.relu(block.feed_forward[0](h)), (DIM,))
    torch.testing.assert_close(block(x, y), expected)


def test_heads_must_divide_dim():
    with pytest.raises(ConfigurationError, match="heads must divide dim; got dim = 8 and heads = 3"):
        ss.nn.SAB(8, heads=3)
    with pytest.raises(ConfigurationError, match="at least one seed"):
        ss.nn.PMA(8, num_seeds=0)


def test_fspool_is_its_formula():
    pool = ss.nn.FSPool(2, pieces=4).double()
    x = torch.randn(1, 9, 2).double()
    expected = torch.zeros(2).double()
    for d in range(2):
        for rank, value in enumerate(sorted(x[0, :, d].tolist(), reverse=True)):
            position = rank / 8 * 4
            left = min(int(position), 3)
            heights = pool.heights[d]
            expected[d] = expected[d] + value * (heights[left] + (position - left) * (heights[left + 1] - heights[left]))
    torch.testing.assert_close(pool(x)[0], expected)
    assert pool(x[:, :1]).shape == (1, 2)
    with pytest.raises(ConfigurationError, match="at least one piece"):
        ss.nn.FSPool(2, pieces=0)


def test_diff_em_step_is_map_em():
    """One step from the prior's mode against torch.distributions and the update formulas, component by component."""
    pool = ss.nn.DiffEM(3, heads=2, components=2, steps=1, strength=0.3, output="all").double()
    x = torch.randn(1, 7, 3).double()
    weights, means, variances, likelihood = pool.fit(x)
    spread = F.softplus(pool.raw_variances)
    for head in range(2):
        parts = Independent(Normal(pool.means[head], spread[head].sqrt()), 1)
        q = (parts.log_prob(x[0][:, None]) + math.log(0.5)).softmax(-1)
        total = q.sum(0) + 0.3
        torch.testing.assert_close(weights[0, head], total / (7 + 2 * 0.3))
        mean = (q.T @ x[0] + 0.3 * pool.means[head]) / total[:, None]
        torch.testing.assert_close(means[0, head], mean)
        second = (q.T @ x[0].square() + 0.3 * (spread[head] + pool.means[head].square())) / total[:, None]
        torch.testing.assert_close(variances[0, head], second - mean.square())
        fitted = MixtureSameFamily(
            Categorical(weights[0, head]), Independent(Normal(means[0, head], variances[0, head].sqrt()), 1)
        )
        torch.testing.assert_close(likelihood[0, head], fitted.log_prob(x[0]).mean())


def test_diff_em_does_not_lower_the_posterior():
    """Without a prior to speak of, EM's likelihood rises with every step."""
    x = torch.cat([torch.randn(1, 50, 2) - 3, torch.randn(1, 50, 2) + 3], dim=1).double()
    torch.manual_seed(1)
    reference = ss.nn.DiffEM(2, heads=1, components=2, strength=1e-6).double()
    scores = []
    for steps in (1, 2, 4, 8, 16):
        reference.steps = steps
        scores.append(float(reference.fit(x)[3].detach()))
    assert scores == sorted(scores)


def test_diff_em_outputs():
    x = torch.randn(4, 10, 6)
    best = ss.nn.DiffEM(6, heads=3, components=2)
    out = best(x)
    assert out.shape == (4, best.out_dim) == (4, 3 + 2 + 2 * 2 * 6)
    assert torch.equal(out[:, :3].sum(1), torch.ones(4))
    assert torch.equal(out[:, :3].argmax(1), best.fit(x)[3].argmax(1))
    every = ss.nn.DiffEM(6, heads=3, components=2, output="all")
    assert every(x).shape == (4, every.out_dim) == (4, 3 * (2 + 24))
    with pytest.raises(ConfigurationError, match="unknown output"):
        ss.nn.DiffEM(6, output="worst")
    with pytest.raises(ConfigurationError, match="strength > 0"):
        ss.nn.DiffEM(6, strength=0.0)


def test_attention_of_mil_poolings_sums_to_one():
    x, mask = torch.randn(2, 9, DIM), torch.rand(2, 9) > 0.3
    _, weights = ss.nn.GatedAttention(DIM)(x, mask, return_attention=True)
    torch.testing.assert_close(weights.sum(1), torch.ones(2))
    assert (weights[~mask] == 0).all()
    _, weights = ss.nn.DSMIL(DIM, num_classes=3)(x, mask, return_attention=True)
    torch.testing.assert_close(weights.sum(1), torch.ones(2, 3))
