"""exact: the gradient of full, for every pool, with dropout, hooks, shared and frozen parameters."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import setstream as ss
from setstream import testing
from setstream.testing.gradients import default_loss, parameter_gradients
from tests.gradients.builders import SETS, make
from tests.laws.strategies import encoders, ragged_sets


@given(encoders(dtypes=(torch.float32, torch.float64)), ragged_sets(), st.integers(1, 20))
def test_exact_equals_full_for_every_pool(encoder, sets, chunk_size):
    testing.check_exact_gradient(encoder, sets, chunk_size=chunk_size)


def test_the_callers_random_stream_is_not_replayed():
    encoder = make(phi=nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.5))).train()
    torch.manual_seed(0)
    z = ss.encode(encoder, SETS, gradient="exact")
    before = torch.rand(3)
    z.sum().backward()
    after = torch.rand(3)
    assert not torch.equal(before, after)


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
        return default_loss(ss.encode(outer, encoded, gradient=gradient, chunk_size=2))

    parameters = list(inner.parameters())
    for a, b in zip(torch.autograd.grad(loss("full"), parameters), torch.autograd.grad(loss("exact"), parameters), strict=True):
        torch.testing.assert_close(a, b)


class Patched(nn.Module):
    """Its forward reaches the parameters past `self`, as compiled and patched modules do."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 8)
        linear = self.linear
        self.forward = lambda x: linear(x).tanh()


class Recurrent(nn.Module):
    """An element is a sequence; torch keeps a second list of a GRU's parameters."""

    def __init__(self):
        super().__init__()
        self.gru = nn.GRU(1, 8, batch_first=True)

    def forward(self, x):
        return self.gru(x.unsqueeze(-1))[1][0]


@pytest.mark.parametrize("gradient", ["exact", "importance"])
@pytest.mark.parametrize(
    "phi",
    [
        Patched(),
        Recurrent(),
        nn.utils.parametrizations.weight_norm(nn.Linear(3, 8)),
        torch.jit.script(nn.Sequential(nn.Linear(3, 8), nn.Tanh())),
    ],
    ids=["patched", "recurrent", "parametrized", "scripted"],
)
def test_modules_that_hold_their_parameters_in_other_ways(phi, gradient):
    encoder, sets = make(phi=phi).double(), [x.double() for x in SETS]
    expected = parameter_gradients(encoder, sets, default_loss, gradient="full")
    found = parameter_gradients(encoder, sets, default_loss, gradient=gradient, chunk_size=7, grad_chunks=99)
    for name in expected:
        torch.testing.assert_close(found[name], expected[name])
