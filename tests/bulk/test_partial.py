"""Partial states: any cut of the elements sums to the same states."""

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from setstream.bulk.partial import PartialStates, SetStates, encode_share
from setstream.data import ParquetSets
from setstream.data.collection import Block, Ids
from setstream.data.formats import table as table_format
from tests.bulk.builders import SIZES, arrays, files, make, write_table


def skip_none(name, reason):
    raise AssertionError(f"{name}: {reason}")


def by_name(states):
    states.merge()
    return dict(zip(states.names, states.state, strict=True))


def test_any_cut_into_shares_sums_to_the_same(tmp_path):
    encoder = make().encoder
    for data in (files(), write_table(tmp_path / "table")):
        states = SetStates(encoder)
        for share in data.shares(19, skip_none):
            encoded = encode_share(encoder, data, share, 7)
            assert set(encoded.names) == set(data.share_ids(share))
            states.add(encoded.names, encoded.state)
        for name, state in by_name(states).items():
            assert int(state.count) == SIZES[name]
            torch.testing.assert_close(encoder.finalize(state), encoder([arrays()[name]]), rtol=1e-4, atol=1e-5)


def test_rows_of_many_sets_become_their_states():
    encoder = make().encoder
    ids = Ids(["a", "b"], np.array([1, 0, 1, 0, 0]))
    x = torch.randn(5, 4)
    for chunk in (1, 2, 100):
        partial = PartialStates(encoder, chunk, skip_none)
        partial.add(Block(ids, x))
        states = by_name(partial.states)
        for name, rows in (("a", [1, 3, 4]), ("b", [0, 2])):
            torch.testing.assert_close(encoder.finalize(states[name]), encoder(x[None, rows]), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("together", [True, False])
def test_a_table_read_in_small_batches_is_the_same_table(tmp_path, monkeypatch, together):
    """Sets in runs need no sorting, others one sort; batches may cut sets and row groups anywhere."""
    monkeypatch.setattr(table_format, "BATCH_BYTES", 1)  # the smallest batch: 1,024 rows
    rng = np.random.default_rng(0)
    names = np.repeat([f"s{n}" for n in range(7)], 800)
    if not together:
        rng.shuffle(names)
    x = rng.standard_normal((len(names), 4)).astype(np.float32)
    pq.write_table(
        pa.table({"set_id": names, "features": pa.FixedSizeListArray.from_arrays(pa.array(x.ravel()), 4)}),
        tmp_path / "t.parquet",
    )
    data = ParquetSets(tmp_path / "t.parquet")
    for position, expected in ((0, [1024] * 5 + [480]), (1500, [548] + [1024] * 3 + [480])):
        assert [len(block.ids) for block in data.blocks(position, 1000, 2, skip_none)] == expected
    encoder = make().encoder
    partial = PartialStates(encoder, 1000, skip_none)
    for block in data.blocks(0, 1000, 2, skip_none):
        partial.add(block)
    states = by_name(partial.states)
    assert len(states) == 7
    for name, state in states.items():
        own = torch.from_numpy(x[names == name])
        assert torch.equal(data.source(name).tensor(), own)
        assert torch.equal(data.source(name).read(300, 301), own[300:301])
        assert int(state.count) == 800
        torch.testing.assert_close(encoder.finalize(state), encoder([own]), rtol=1e-4, atol=1e-5)
