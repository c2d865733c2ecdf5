import torch

import setstream as ss


def test_it_is_the_pool_of_what_the_module_gives():
    module, x = torch.nn.Linear(8, 2), torch.randn(3, 7, 8)
    pool = ss.Projected(module, ss.DeepSets("max"))
    torch.testing.assert_close(pool(x), module(x).amax(1))
    assert pool.in_dim == 8
    assert not ss.Projected(module, ss.ChunkMean(torch.nn.Identity())).consistent


def test_the_weights_are_those_of_the_inner_pool():
    layer, inner = torch.nn.Linear(4, 8), ss.UMBC(8, num_slots=3, heads=2)
    encoder = ss.SetEncoder(
        torch.nn.Identity(), ss.Parallel(a=ss.Projected(layer, inner), b=ss.Projected(layer, ss.DeepSets("max")))
    )
    x = torch.randn(2, 11, 4)
    found = encoder.eval().attention(x, encoder.update(None, x))
    alone = ss.SetEncoder(layer, inner).eval()
    assert found.keys() == {"a"}
    torch.testing.assert_close(found["a"], alone.attention(x, alone.update(None, x)))
