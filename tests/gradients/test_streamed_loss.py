"""Losses over the elements of a set, chunk by chunk."""

import copy

import pytest
import torch
from torch import nn

import setstream as ss
from setstream.errors import ConfigurationError, ShapeError
from tests.gradients.builders import SETS
from tests.laws.strategies import pad


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
    with pytest.raises(ShapeError, match="one number per element"):
        ss.streamed_loss(lambda chunk, mask: chunk, SETS)
    with pytest.raises(ConfigurationError, match="unknown reduction"):
        ss.streamed_loss(lambda chunk, mask: chunk.sum(-1), SETS, reduction="max")
    with pytest.raises(ConfigurationError, match="no gradient to the elements"):
        ss.streamed_loss(lambda chunk, mask: chunk.sum(-1), [copy.copy(SETS[0]).requires_grad_()])
