"""The hand-written way back of the folded sums, against finite differences and autograd."""

import pytest
import torch

import setstream as ss
from setstream.pools.activations import ACTIVATIONS
from setstream.pools.kernels import weighted_sums as blocks
from setstream.pools.kernels.shared_rows import pull_back, shared_rows
from setstream.pools.kernels.weighted_sums import weighted_sums

SLOTS = (2, 3)  # heads, slots per head
SOFTPLUS = ss.Activation("softplus", torch.nn.functional.softplus)


def inputs(offset, masked):
    torch.manual_seed(0)
    queries, rows = torch.randn(2, 1, 6, 4).double().requires_grad_(), torch.randn(2, 5, 4).double().requires_grad_()
    own = torch.randn(offset, 2, 3).double().requires_grad_() if offset else None
    return queries, rows, own, torch.tensor([[1, 1, 0, 1, 1], [0, 1, 1, 0, 0]]).bool() if masked else None


def differentiable(activation, mask, own_way):
    """The sums at their own scale, so that the shift, which has no gradient, is no matter."""

    def sums(queries, rows, offset):
        if own_way:
            found = shared_rows(queries, rows, offset, activation, SLOTS, mask)
        else:
            found = weighted_sums(queries, rows, None, offset, activation, SLOTS, mask)
        numerator, normaliser, shift = (found[name] for name in ("numerator", "normaliser", "shift"))
        return numerator / normaliser.unsqueeze(-1), normaliser.log() + shift

    return sums


@pytest.fixture(autouse=True)
def own_derivative(monkeypatch):
    """Also for few numbers, which autograd would differentiate otherwise."""
    monkeypatch.setattr("setstream.pools.kernels.shared_rows.FEW", 0)


@pytest.fixture(params=["one block", "blocks of one element"])
def cut(request, monkeypatch):
    """The kernel cuts its work in both directions: once not at all, once as small as it can."""
    if request.param != "one block":
        monkeypatch.setattr(blocks, "LEAST", 1)
        monkeypatch.setattr(blocks, "CPU_BLOCK", 1)


@pytest.mark.usefixtures("cut")
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("offset", [0, 1, 2])
@pytest.mark.parametrize("activation", [*ACTIVATIONS.values(), SOFTPLUS], ids=lambda a: a.name)
def test_gradients_are_those_of_autograd_once_and_twice(activation, offset, masked):
    *given, mask = inputs(offset, masked)
    leaves = [tensor for tensor in given if tensor is not None]
    found = []
    for own_way in (True, False):
        out = differentiable(activation, mask, own_way)(*given)
        cotangents = [torch.linspace(-1, 1, tensor.numel()).double().view_as(tensor) for tensor in out]
        once = torch.autograd.grad(out, leaves, cotangents, retain_graph=True)
        with_graph = torch.autograd.grad(out, leaves, cotangents, create_graph=True)
        twice = torch.autograd.grad(sum(g.square().sum() for g in with_graph), leaves)
        found.append([*once, *with_graph, *twice])
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)


def test_finite_differences():
    *given, mask = inputs(offset=2, masked=True)
    assert torch.autograd.gradcheck(differentiable(ACTIVATIONS["slot-softmax"], mask, True), given)


@pytest.mark.parametrize("which", [0, 1, 2])
def test_only_what_is_asked_for_is_computed(which):
    given = [tensor.detach().requires_grad_(index == which) for index, tensor in enumerate(inputs(2, True)[:3])]
    sum(t.sum() for t in differentiable(ACTIVATIONS["softmax"], None, True)(*given)).backward()
    assert [tensor.grad is not None for tensor in given] == [index == which for index in range(3)]


@pytest.mark.parametrize("slots", [1, 6])
@pytest.mark.parametrize("activation", [*ACTIVATIONS.values(), SOFTPLUS], ids=lambda a: a.name)
def test_norms_are_those_of_the_gradients(activation, slots):
    """From the Gram matrix where it is the smaller one (one slot), from the gradients otherwise."""
    torch.manual_seed(0)
    queries, rows, offset = torch.randn(2, slots, 4), torch.randn(2, 5, 4), torch.randn(2, 1, slots)
    shift, numerator, normaliser = torch.randn(2, 1, slots) + 3, torch.randn(2, slots, 4), torch.randn(2, 1, slots)
    mask = torch.tensor([[1, 1, 0, 1, 1], [0, 1, 1, 0, 0]]).bool()
    given = [t.double() for t in (queries, rows, offset)], mask, [t.double() for t in (shift, numerator, normaliser)]
    rows_bar, norms = (pull_back(*given[0], activation, mask, *given[2], want=want).rows for want in ("rows", "norms"))
    torch.testing.assert_close(norms, rows_bar.norm(dim=-1), rtol=1e-9, atol=1e-12)
    alone = pull_back(*given[0], activation, mask, *given[2], want="rows only")
    assert alone.queries is None
    assert alone.offset is None
    assert torch.equal(alone.rows, rows_bar)
    assert bool((norms[~mask] == 0).all())
    assert bool((norms[mask] > 0).all())
