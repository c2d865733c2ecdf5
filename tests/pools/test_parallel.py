import pytest
import torch
from torch import nn

import setstream as ss
from setstream.errors import ConfigurationError


def test_parallel_is_its_members():
    torch.manual_seed(0)
    bag, most = ss.UMBC(8, 4, slots="gaussian"), ss.DeepSets("max")
    encoder = ss.SetEncoder(nn.Linear(3, 8), ss.Parallel(bag=bag, most=most)).eval()
    x, mask = torch.randn(2, 10, 3), torch.rand(2, 10) > 0.5
    z = encoder(x, mask)
    torch.testing.assert_close(z["bag"], ss.SetEncoder(encoder.phi, bag)(x, mask))
    torch.testing.assert_close(z["most"], ss.SetEncoder(encoder.phi, most)(x, mask))
    with pytest.raises(ss.errors.RemovalError):
        encoder.update(None, x) - encoder.update(None, x)
    assert encoder.pool.consistent
    assert not ss.Parallel(a=bag, b=ss.ChunkMean(nn.Identity())).consistent
    with pytest.raises(ConfigurationError, match="in_dim must agree"):
        ss.Parallel(a=ss.UMBC(8, 4), b=ss.UMBC(9, 4))
    with pytest.raises(ConfigurationError, match="at least one pool"):
        ss.Parallel()
    with pytest.raises(ConfigurationError, match="a is a Linear"):
        ss.Parallel(a=nn.Linear(2, 2))
    # Two pools with random slots draw for themselves, in training too.
    twice = ss.SetEncoder(nn.Linear(3, 8), ss.Parallel(a=bag, b=ss.UMBC(8, 2, slots="gaussian"))).train()
    state = twice.update(twice.update(None, x), x)
    assert {name for name in state.accumulators if name.endswith("draw")} == {"a/draw", "b/draw"}
