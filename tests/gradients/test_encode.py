"""encode(): what holds for several modes, and for invalid options."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from torch import nn

import setstream as ss
from setstream import testing
from setstream.errors import ConfigurationError, ShapeError
from setstream.testing.gradients import default_loss, parameter_gradients
from tests.gradients.builders import SETS, make, ragged_chunks
from tests.laws.strategies import encoders, pad, ragged_sets


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
        return default_loss(ss.encode(encoder, x, chunk_size=6, gradient=gradient, grad_chunks=99, partition="contiguous"))

    (gradient_,) = torch.autograd.grad(value(), weight)
    direction = torch.randn_like(weight)
    with torch.no_grad():
        weight.add_(1e-6 * direction)
    up = value().item()
    with torch.no_grad():
        weight.sub_(2e-6 * direction)
    down = value().item()
    assert abs((up - down) / 2e-6 - float((gradient_ * direction).sum())) < 1e-4 * abs(float((gradient_ * direction).sum()))


@pytest.mark.parametrize("gradient", ["exact", "unbiased", "importance"])
def test_elements_get_their_gradient(gradient):
    encoder = make().double().eval()
    x, mask = torch.randn(2, 20, 3, dtype=torch.float64), torch.rand(2, 20) > 0.3
    full = x.clone().requires_grad_()
    default_loss(encoder(full, mask)).backward()
    mine = x.clone().requires_grad_()
    default_loss(ss.encode(encoder, mine, mask, chunk_size=6, gradient=gradient, grad_chunks=99)).backward()
    torch.testing.assert_close(mine.grad, full.grad, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("gradient", ["exact", "unbiased", "importance"])
def test_autocast(gradient):
    encoder = make()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        z = ss.encode(encoder, SETS, chunk_size=8, gradient=gradient, grad_chunks=99)
        loss = default_loss(z)
    loss.backward()
    got = encoder.phi[0].weight.grad.clone()
    encoder.zero_grad()
    default_loss(encoder(SETS)).backward()
    torch.testing.assert_close(got, encoder.phi[0].weight.grad, rtol=0.2, atol=0.05 * float(got.abs().max()))


def test_a_generator_makes_it_reproducible():
    encoder = make()
    for gradient in ("unbiased", "importance", "subset"):
        found = [
            parameter_gradients(
                encoder, SETS, default_loss, gradient=gradient, chunk_size=4, generator=torch.Generator().manual_seed(7)
            )
            for _ in range(2)
        ]
        for name in found[0]:
            torch.testing.assert_close(found[0][name], found[1][name])


def test_a_source_gives_the_exact_gradient():
    encoder = make().double().eval()
    sets = [x.double() for x in SETS]
    full = parameter_gradients(encoder, sets, default_loss, gradient="full")
    for options in (
        {"gradient": "full"},
        {"gradient": "exact"},
        {"gradient": "unbiased", "grad_chunks": 99},
        {"gradient": "importance", "grad_chunks": 99},
    ):
        source = ss.Chunks(ragged_chunks(sets, 7))
        found = parameter_gradients(encoder, source, default_loss, **options)
        for name in full:
            torch.testing.assert_close(found[name], full[name], rtol=1e-8, atol=1e-10)


def test_bad_sources_and_options_are_refused():
    encoder = make()
    with pytest.raises(ConfigurationError, match="gives its chunks only once"):
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


def test_sources_and_tensors_in_one_list_are_refused():
    source = ss.data.ArraySource(SETS[0])
    with pytest.raises(ConfigurationError, match=r"not both: item 1 is a source \(ArraySource\), item 0 a Tensor"):
        ss.encode(make(), [SETS[0], source])


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
