import torch
from torch import nn

import setstream as ss


def test_chunk_mean_is_the_mean_of_its_chunks():
    head = ss.nn.SetTransformer(8)
    encoder = ss.SetEncoder(nn.Identity(), ss.ChunkMean(head))
    x = torch.randn(2, 12, 8)
    state = sum(encoder.update(None, chunk) for chunk in (x[:, :2], x[:, 2:5], x[:, 5:]))
    expected = (head(x[:, :2]) + head(x[:, 2:5]) + head(x[:, 5:])) / 3
    torch.testing.assert_close(encoder.finalize(state, chunks="average"), expected)
    # A chunk that has nothing of a set does not count for it.
    state = encoder.update(encoder.update(None, [x[0], x[1, :0]]), [x[0, :0], x[1]])
    torch.testing.assert_close(encoder.finalize(state), head(x))
