"""Stores that keep sums in float32: bytes, errors beside float64, exact counts, what is too large."""

import pytest
import torch
from torch import nn

import setstream as ss
from setstream.errors import ConfigurationError
from setstream.states.state import State

EPSILON = torch.finfo(torch.float32).eps
HOUR = 3600


def make(pool="umbc"):
    torch.manual_seed(0)
    pools = {
        "umbc": ss.UMBC(16, num_slots=4, heads=2),
        "mean": ss.DeepSets("mean"),
        "max": ss.DeepSets("max"),
        "moments": ss.Moments(),
    }
    encoder = ss.SetEncoder(nn.Linear(3, 16), pools[pool])
    return ss.SetModel(encoder, nn.Identity()).eval()


def size_of(store, id="a"):
    """Bytes of the tensors of a row."""
    return sum(t.nbytes for t in State.from_bytes(store.get_bytes(id)).tensors().values())


@pytest.mark.parametrize("pool", ["umbc", "mean", "max", "moments"])
def test_float32_is_as_accurate_as_its_roundings_and_counts_are_exact(tmp_path, pool):
    """Each of n updates rounds once: independent roundings give less than √n ε of the largest sum."""
    updates, x = 60, torch.randn(60, 5, 3) + 1.0
    with (
        ss.StateStore(tmp_path / "64.db", make(pool), tile=HOUR) as wide,
        ss.StateStore(tmp_path / "32.db", make(pool), tile=HOUR, dtype=torch.float32) as narrow,
    ):
        for number in range(updates):
            for store in (wide, narrow):
                assert store.update("a", x[number], time=number * 600) == 5 * (number + 1)
        for some in ({}, {"since": 3 * HOUR, "until": 8 * HOUR}, {"until": 4 * HOUR}):
            assert torch.equal(narrow.get("a", **some).count, wide.get("a", **some).count)
            exact = wide.predict("a", **some)
            error = (narrow.predict("a", **some) - exact).norm() / exact.norm()
            assert error <= updates**0.5 * EPSILON
        if pool in ("umbc", "mean"):
            sums, others = (store.get("a").accumulators["pooled"] for store in (narrow, wide))
            assert {tensor.dtype for tensor in sums.tensors.values()} == {torch.float64}
            rounding = (sums["numerator"] - others["numerator"]).norm(dim=-1)
            assert bool((rounding > 0).any())
            assert bool((rounding < 2 * sums["error"][..., 1]).all())  # which a removal compares with what it leaves
            torch.testing.assert_close(sums["normaliser"], others["normaliser"], rtol=1e-14, atol=0)
            first, of_first = x[:6].flatten(0, 1), torch.arange(6).repeat_interleave(5) * 600
            for store in (wide, narrow):
                store.remove("a", first, time=of_first)
            torch.testing.assert_close(narrow.predict("a"), wide.predict("a"), rtol=1e-4, atol=1e-5)


def test_float32_takes_about_half_the_bytes(tmp_path):
    sizes = {}
    for dtype in (torch.float32, torch.float64, None):
        with ss.StateStore(tmp_path / f"{dtype}.db", make(), dtype=dtype) as store:
            store.update("a", torch.randn(5, 3))
            sizes[dtype] = size_of(store)
    assert sizes[torch.float64] == sizes[None]
    assert sizes[torch.float32] < 0.7 * sizes[None]  # 8 features for each normaliser, shift and error


def test_the_store_remembers_the_type_until_another_is_given(tmp_path):
    x, path = torch.randn(4, 3), tmp_path / "s.db"
    sizes = []
    for dtype in (None, torch.float32, None, torch.float64, None):
        with ss.StateStore(path, make(), dtype=dtype) as store:
            store.update("a", x)
            sizes.append(size_of(store))
            store.merge("b", "a")
    assert sizes[0] == sizes[3] == sizes[4] > sizes[1] == sizes[2]
    with ss.StateStore(path, make()) as store:
        assert (store.count("a"), store.count("b")) == (20, 60)
        torch.testing.assert_close(store.predict("a"), make()(x.repeat(5, 1)[None]), rtol=1e-5, atol=1e-6)


def test_another_process_reads_what_was_written(tmp_path):
    """A prediction from the cache is that of the row."""
    with ss.StateStore(tmp_path / "s.db", make(), dtype=torch.float32) as store:
        for _ in range(3):
            store.update("a", torch.randn(5, 3))
        with ss.StateStore(tmp_path / "s.db", make()) as other:
            assert torch.equal(store.predict("a"), other.predict("a"))


def test_sums_that_float32_cannot_hold_stay_in_float64(tmp_path):
    with ss.StateStore(tmp_path / "s.db", make("mean"), dtype=torch.float32) as store:
        for value in (1e38, 1.0):
            for _ in range(5):
                store.update(f"of {value}", torch.full((10, 3), value))
        sizes = [size_of(store, id) for id in ("of 1.0", "of 1e+38")]
        assert sizes[0] < sizes[1]
        exact = make("mean")(torch.full((1, 50, 3), 1e38))
        torch.testing.assert_close(store.predict("of 1e+38"), exact, rtol=1e-5, atol=0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.int64, "float32", 32])
def test_other_types_are_refused(tmp_path, dtype):
    with pytest.raises(ConfigurationError, match=r"torch\.float32 or torch\.float64 .* got dtype="):
        ss.StateStore(tmp_path / "s.db", make(), dtype=dtype)
