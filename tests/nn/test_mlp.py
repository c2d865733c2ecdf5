"""Attention that begins near anchors: the logits it promises, and nothing that cannot learn."""

import pytest
import torch
from torch import nn

from setstream.errors import ConfigurationError
from setstream.nn.mlp import begin_near


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("more", [0, 6])
@pytest.mark.parametrize(("heads", "used", "beside"), [(1, 8, 0), (2, 3, 5), (4, 2, 0)])
def test_logits_begin_as_products_of_the_numbers_used(heads, used, beside, more, bias):
    generator = torch.Generator().manual_seed(0)
    query, key = nn.Linear(used + more, 8, bias=False).double(), nn.Linear(used + beside, 8, bias=bias).double()
    sizes = torch.rand(heads, generator=generator).double() + 0.1
    begin_near(query, key, sizes, used)
    anchors = torch.randn(5, used + more, generator=generator).double()
    elements = torch.randn(7, used + beside, generator=generator)
    q, k = (rows.unflatten(-1, (heads, -1)).transpose(0, 1) for rows in (query(anchors), key(elements.double())))
    logits = q @ k.mT / (8 // heads) ** 0.5
    torch.testing.assert_close(logits, sizes.view(-1, 1, 1) * (anchors[:, :used] @ elements[:, :used].double().T))
    logits.softmax(-1)[:, :, 0].sum().backward()
    assert (query.weight.grad.norm(dim=1) > 0).all(), "every row of the query can learn"


def test_what_does_not_fit_is_refused():
    with pytest.raises(ConfigurationError, match="a head of width 4 cannot hold the 5 numbers"):
        begin_near(nn.Linear(5, 8, bias=False), nn.Linear(5, 8, bias=False), torch.ones(2), 5)
    with pytest.raises(ConfigurationError, match="without a bias; got Linear"):
        begin_near(nn.Linear(4, 8), nn.Linear(4, 8), torch.ones(2), 4)
    with pytest.raises(ConfigurationError, match="anchors of 4 numbers"):
        begin_near(nn.Linear(3, 8, bias=False), nn.Linear(4, 8, bias=False), torch.ones(2), 4)
