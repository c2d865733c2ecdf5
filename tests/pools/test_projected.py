import torch

import setstream as ss


def test_it_is_the_pool_of_what_the_module_gives():
    module, x = torch.nn.Linear(8, 2), torch.randn(3, 7, 8)
    pool = ss.Projected(module, ss.DeepSets("max"))
    torch.testing.assert_close(pool(x), module(x).amax(1))
    assert pool.in_dim == 8
    assert not ss.Projected(module, ss.ChunkMean(torch.nn.Identity())).consistent
