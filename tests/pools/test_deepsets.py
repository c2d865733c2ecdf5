import pytest
import torch

import setstream as ss
from setstream.errors import ConfigurationError


def test_an_unknown_pooling_is_refused():
    with pytest.raises(ConfigurationError, match="unknown pool 'median'"):
        ss.DeepSets("median")


@pytest.mark.parametrize("pool", ["mean", "sum", "max", "min"])
def test_it_is_torchs_own_pooling(pool):
    x, mask = torch.randn(3, 7, 4), torch.rand(3, 7) > 0.4
    expected = [
        getattr(row[real], "a" + pool if pool in ("max", "min") else pool)(0) for row, real in zip(x, mask, strict=True)
    ]
    torch.testing.assert_close(ss.DeepSets(pool)(x, mask), torch.stack(expected))
    assert torch.equal(ss.DeepSets(pool)(x[:, :0]), torch.zeros(3, 4))
