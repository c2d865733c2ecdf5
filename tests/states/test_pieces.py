"""Blocks of a batch of sets, merged together: the same as one merge after another."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import setstream as ss
from setstream.states.accumulators import pieces as module
from setstream.states.accumulators.pieces import Pieces

POOLS = {
    "umbc": lambda: ss.UMBC(4, 3, heads=2),
    "mean": lambda: ss.DeepSets("mean", in_dim=4),
    "max": lambda: ss.DeepSets("max", in_dim=4),
    "both": lambda: ss.Parallel(bag=ss.UMBC(4, 2), most=ss.DeepSets("max")),
}


@pytest.mark.parametrize("name", POOLS)
@pytest.mark.parametrize("most", [2**23, 1])  # merged at the end, or after every block
@given(data=st.data())
def test_blocks_merged_together_are_blocks_merged_one_by_one(name, most, data):
    torch.manual_seed(0)
    pool = POOLS[name]().double().eval()
    batch = data.draw(st.integers(1, 4))
    empty = pool.empty(batch, torch.device("cpu"), width=4)
    context = pool.prepare(empty)
    blocks = data.draw(st.lists(st.lists(st.sampled_from(range(batch)), min_size=1, max_size=4, unique=True), max_size=6))
    together, one_by_one = Pieces(batch), empty
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "MOST_NUMBERS", most)
        for sets in blocks:
            features = torch.randn(len(sets), 3, 4).double() * 10
            together.add(sets, pool.accumulate(context, features, None))
            for row, index in enumerate(sets):
                alone = pool.accumulate(context, features[row : row + 1], None)
                rows = [one_by_one[i] for i in range(batch)]
                rows[index] = rows[index] + ss.State(alone, torch.tensor([3]))
                one_by_one = ss.State.cat(rows)
        if idle := together.missing():
            together.add(idle, pool.empty_accumulators(len(idle), torch.device("cpu"), 4))
        merged = ss.State(together.merged(), one_by_one.count)
    found, expected = pool.finalize(merged), pool.finalize(one_by_one)
    for a, b in zip(*(z.values() if isinstance(z, dict) else [z] for z in (found, expected)), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
