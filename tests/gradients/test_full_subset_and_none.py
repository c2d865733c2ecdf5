"""full, subset and none."""

import pytest
import torch
from torch import nn

import setstream as ss
from setstream import testing
from setstream.errors import LawViolation
from tests.gradients.builders import SETS, model


def test_subset_is_biased():
    with pytest.raises(LawViolation):
        testing.check_unbiased_gradient(model(), SETS, draws=500, gradient="subset", chunk_size=8)


def test_a_pool_that_does_not_know_its_width_gets_pieces_that_suit_phi():
    seen = []
    phi = nn.Sequential(nn.Linear(2, 4096), nn.ReLU())
    phi.register_forward_hook(lambda module, inputs, output: seen.append(len(output)))
    ss.encode(ss.SetEncoder(phi, ss.DeepSets("mean")).eval(), torch.randn(1, 3000, 2), chunk_size=100, gradient="none")
    assert max(seen) <= 2**22 // (4 * 4096)
