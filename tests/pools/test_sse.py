import pytest
import torch
from torch import nn

import setstream as ss
from setstream.errors import ConfigurationError


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


def test_invalid_options_are_refused():
    with pytest.raises(ConfigurationError, match="unknown pool 'median' over the slots"):
        ss.SSE(8, 4, pool="median")
    with pytest.raises(ConfigurationError, match="one entry for each layer"):
        ss.HierarchicalSSE(8, ())
