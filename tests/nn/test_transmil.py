"""TransMIL: its attention, its convolutions, masks, and that order matters."""

import pytest
import torch
from torch.nn import functional as F

import setstream as ss
from setstream.errors import ConfigurationError, MaskError, ShapeError
from setstream.nn.transmil import pseudo_inverse
from tests.laws.strategies import pad


def build(dim=8, **options):
    torch.manual_seed(0)
    return ss.nn.TransMIL(dim, **({"heads": 2} | options)).double().eval()


def test_short_sequences_have_exact_attention_and_long_ones_the_approximation():
    layer = build(landmarks=5).layers[0]
    query, key, value = torch.randn(3, 1, 2, 5, 4, dtype=torch.float64)
    torch.testing.assert_close(layer.attend(query, key, value), F.scaled_dot_product_attention(query, key, value, scale=1.0))
    query, key, value = torch.randn(3, 1, 2, 40, 4, dtype=torch.float64)
    few_queries, few_keys = (rows.unflatten(2, (5, 8)).mean(3) for rows in (query, key))
    kernels = [(a @ b.mT).softmax(-1) for a, b in ((query, few_keys), (few_queries, few_keys), (few_queries, key))]
    expected = kernels[0] @ pseudo_inverse(kernels[1]) @ kernels[2] @ value
    torch.testing.assert_close(layer.attend(query, key, value), expected)


def test_the_pseudo_inverse_converges():
    matrix = (3 * torch.eye(6, dtype=torch.float64) + torch.randn(4, 6, 6, dtype=torch.float64)).softmax(-1)
    error = (matrix @ pseudo_inverse(matrix) @ matrix - matrix).abs().amax()
    assert float(error) < 1e-3


def test_the_whole_is_its_formula():
    """Five instances become nine, the first four again, in rows of three, with the class token before them."""
    module = build(landmarks=100)
    x = torch.randn(1, 5, 8, dtype=torch.float64)
    tokens = torch.cat([module.token, x, x[:, :4]], 1)
    tokens = tokens + module.layers[0](module.norms[0](tokens))
    square = tokens[0, 1:].T.reshape(8, 3, 3)
    mixed = square + sum(
        F.conv2d(square, place.weight, place.bias, padding=place.weight.shape[-1] // 2, groups=8) for place in module.places
    )
    tokens = torch.cat([tokens[:, :1], mixed.reshape(8, 9).T[None]], 1)
    tokens = tokens + module.layers[1](module.norms[1](tokens))
    torch.testing.assert_close(module(x), module.norms[2](tokens)[:, 0])


def test_masked_sets_are_the_sets_without_padding():
    module, sets = build(), [torch.randn(size, 8, dtype=torch.float64) for size in (7, 0, 30)]
    x, mask = pad(sets)
    out = module(x, mask)
    assert torch.isfinite(out).all()
    for row, elements in zip(out, sets, strict=True):
        torch.testing.assert_close(row, module(elements[None])[0])


def test_the_order_of_instances_matters():
    module, x = build(), torch.randn(1, 30, 8, dtype=torch.float64)
    assert not torch.allclose(module(x), module(x.flip(1)), atol=1e-4)


def test_every_parameter_learns():
    module = build().train()
    module(torch.randn(2, 30, 8, dtype=torch.float64)).square().sum().backward()
    for name, parameter in module.named_parameters():
        assert parameter.grad.abs().sum() > 0, name


def test_errors_say_what_came():
    with pytest.raises(ConfigurationError, match="heads must divide dim; got dim = 8 and heads = 3"):
        build(heads=3)
    with pytest.raises(ConfigurationError, match="landmarks must be at least 1; got 0"):
        build(landmarks=0)
    with pytest.raises(ShapeError, match=r"TransMIL takes sets of shape \(B, N, 8\); got \(2, 5, 7\)"):
        build()(torch.zeros(2, 5, 7))
    with pytest.raises(MaskError, match=r"\(2, 5\), True for real elements"):
        build()(torch.zeros(2, 5, 8), torch.ones(2, 4, dtype=torch.bool))
