"""Windows equal a recomputation from their elements, for every pool, late elements, merges and lengths."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import setstream as ss
from setstream.errors import ConfigurationError, ConsistencyError, LateError, MismatchError, ShapeError, StateFormatError
from setstream.models.sliding_sum import SlidingSum
from setstream.models.window import FORMAT, _checksum
from setstream.pools.base import named_tensors
from tests.laws.strategies import ELEMENT, encoders, one_pass


class AsIs(nn.Module):
    """A head that returns what the pool made: a tensor, or several by name."""

    def forward(self, z):
        return z


class Recomputed:
    """A window that keeps all elements of one set, with the tile of each, and encodes them anew."""

    def __init__(self, model, length, tile):
        self.model, self.length, self.tile = model, length, tile
        self.elements, self.tiles, self.head, self.dropped = [], [], None, 0

    def add(self, x, tiles):
        before = self.head
        self.head = max([*tiles, *([] if before is None else [before])], default=None)
        for element, tile in zip(x, tiles, strict=True):
            if before is not None and tile <= before - self.length:
                self.dropped += 1
            else:
                self.elements.append(element)
                self.tiles.append(tile)

    def inside(self, length):
        kept = [x for x, tile in zip(self.elements, self.tiles, strict=True) if tile > (self.head or 0) - length]
        return torch.stack(kept) if kept else torch.zeros(0, ELEMENT)


def assert_equal(window, reference, length, tolerance=1e-4):
    x = reference.inside(length)
    state = window.last(length * reference.tile)
    assert state.count.tolist() == [len(x)]
    if not len(x):
        return  # pools do not know the width of a set without elements
    with torch.no_grad():
        exact = dict(named_tensors(window.model.encoder(x[None])))
    for name, z in named_tensors(window.predict(length * reference.tile)):
        scale = max(float(exact[name].abs().max()), 1.0)
        torch.testing.assert_close(z, exact[name], rtol=tolerance, atol=tolerance * scale)


steps = st.lists(
    st.tuples(
        st.sampled_from(["add", "add", "add", "late", "jump", "advance", "merge", "reload"]),
        st.integers(0, 4),
        st.integers(0, 2**31),
    ),
    max_size=25,
)


@given(encoders(pools=one_pass, dtypes=(torch.float32, torch.float64)), st.integers(1, 9), steps, st.data())
def test_a_window_is_a_recomputation_for_every_pool(encoder, length, steps, data):
    model = ss.SetModel(encoder, AsIs())
    window, reference, now = model.window(span=10.0 * length, tile=10.0), Recomputed(model, length, 10.0), 0.0
    for kind, size, seed in steps:
        generator = torch.Generator().manual_seed(seed)
        x, shift = torch.randn(size, ELEMENT, generator=generator), torch.rand(size, generator=generator, dtype=torch.float64)
        now += {"add": 6.0, "jump": 10.0 * length, "advance": 15.0}.get(kind, 0.0)
        times = now - shift * {"late": 15.0 * length}.get(kind, 12.0)
        tiles = [math.floor(time / 10.0) for time in times.tolist()]
        if kind == "advance":
            window.advance(now)
            reference.head = max(math.floor(now / 10.0), reference.head if reference.head is not None else -(10**9))
        elif kind == "merge":
            other = model.window(span=10.0 * length, tile=10.0)
            other.update(x[None], times)
            window.merge(other)
            newest = max([*tiles, *([] if reference.head is None else [reference.head])], default=None)
            inside = [row for row, tile in enumerate(tiles) if tile > newest - length]  # what is older is not late
            reference.head = newest
            reference.add([x[row] for row in inside], [tiles[row] for row in inside])
        elif kind == "reload":
            window = ss.Window.from_bytes(window.to_bytes(), model)
        else:
            window.update(x[None], times)
            reference.add(list(x), tiles)
        if data.draw(st.booleans()):
            for part in {length, max(1, length // 2), 1}:
                assert_equal(window, reference, part)
    assert_equal(window, reference, length)
    assert window.dropped == reference.dropped


def small(pool="max"):
    torch.manual_seed(0)
    return ss.SetModel(ss.SetEncoder(nn.Linear(ELEMENT, 4), ss.DeepSets(pool)), AsIs()).eval()


@pytest.mark.parametrize("operations", [600, pytest.param(100_000, marks=pytest.mark.slow)])
def test_random_operations_with_late_elements(operations):
    """A maximum and a mean beside attention: one wrong tile in 10^5 operations would be seen by the maximum."""
    torch.manual_seed(0)
    pool = ss.Parallel(most=ss.DeepSets("max"), mean=ss.DeepSets("mean"), slots=ss.UMBC(4, num_slots=2))
    model = ss.SetModel(ss.SetEncoder(nn.Linear(ELEMENT, 4), pool), AsIs()).eval()
    rng, length = np.random.default_rng(0), 24
    window, reference, now = model.window(span=length, tile=1), Recomputed(model, length, 1), 0.0
    for number in range(operations):
        now += rng.exponential(0.3)
        time = now - rng.exponential(4.0) * (rng.random() < 0.3)
        x = torch.randn(1, ELEMENT)
        window.update(x[None], time=time)
        reference.add(list(x), [math.floor(time)])
        if number % 50 == 0:
            outside = sum(tile <= reference.head - length for tile in reference.tiles)
            if outside > 1000:
                kept = [row for row, tile in enumerate(reference.tiles) if tile > reference.head - length]
                reference.elements = [reference.elements[row] for row in kept]
                reference.tiles = [reference.tiles[row] for row in kept]
            for part in (length, 6, 1):
                assert_equal(window, reference, part)
    assert window.dropped == reference.dropped > 0


@pytest.fixture
def merges(monkeypatch):
    """Counts the merges of two states."""
    count, add = [0], ss.State.__add__

    def counted(a, b):
        count[0] += 1
        return add(a, b)

    monkeypatch.setattr(ss.State, "__add__", counted)
    return count


@pytest.mark.parametrize("length", [1, 2, 10, 168, pytest.param(10_000, marks=pytest.mark.slow)])
def test_at_most_three_merges_per_tile_with_a_state_per_tile(merges, length):
    window = small().window(span=length, tile=1)
    tiles = 3 * length + 100
    for time in range(tiles):
        window.update(torch.randn(1, 1, ELEMENT), time=time)
        assert int(window.state.count) == min(time + 1, length)
    assert merges[0] <= 3 * tiles
    print(f"{length} tiles: {merges[0] / tiles:.2f} merges per tile")


class Unlisted(dict):
    """Tiles that are not gone through."""

    def __iter__(self):
        raise AssertionError("an update went through all tiles")


def test_an_update_costs_the_same_for_any_length():
    window = small().window(span=50, tile=1)
    for number in range(120):
        window.update(torch.randn(1, 1, ELEMENT), time=number)
        window._tiles = Unlisted(window._tiles.items())
    assert sorted(window._tiles.keys()) == list(range(70, 120))
    window.update(torch.randn(1, 1, ELEMENT), time=80)
    assert len(window._tiles) == 50


@pytest.mark.parametrize("length", [16, 1024])
def test_late_elements_cost_a_logarithm(merges, length):
    window = small().window(span=length, tile=1)
    window.update(torch.randn(1, length, ELEMENT), time=torch.arange(length))
    assert int(window.state.count) == length
    rng, merges[0] = np.random.default_rng(0), 0
    for number in range(200):
        window.update(torch.randn(1, 1, ELEMENT), time=int(rng.integers(0, length)))
        assert int(window.state.count) == length + number + 1
    assert merges[0] / 200 <= 2 * math.log2(length) + 4
    print(f"{length} tiles: {merges[0] / 200:.1f} merges per late element and state")


def test_a_window_by_count_has_the_last_elements_of_every_set():
    model, x = small("mean"), torch.randn(3, 1000, ELEMENT)
    window, seen = model.window(count=100, tile=10), 0
    assert window.predict().shape == (1, 4)  # of no elements
    for size in (1, 7, 30, 2, 500, 60, 400):
        window.update(x[:, seen : seen + size])
        seen += size
        first = max(0, (seen - 1) // 10 * 10 - 90)  # the newest tile may not be full yet
        assert window.state.count.tolist() == [seen - first] * 3
        torch.testing.assert_close(window.predict(), model(x[:, first:seen]), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(window.predict(20), model(x[:, 980:1000]), rtol=1e-4, atol=1e-5)
    assert window.dropped == 0


def test_layouts_and_times_of_elements():
    model, x = small("mean"), torch.randn(2, 6, ELEMENT)
    times = torch.tensor([[0, 1, 2, 3, 4, 5], [5, 4, 3, 2, 1, 0]])
    mask = torch.tensor([[True] * 6, [True] * 3 + [False] * 3])
    dense, ragged, packed = (model.window(span=4, tile=1) for _ in range(3))
    dense.update(x.masked_fill(~mask[..., None], math.nan), times, mask)
    ragged.update([x[0], x[1, :3]], [times[0], times[1, :3].double()])
    ptr = torch.tensor([0, 6, 9])
    packed.update((torch.cat([x[0], x[1, :3]]), ptr), (torch.cat([times[0], times[1, :3]]), ptr))
    expected = model([x[0, 2:], x[1, :3]])
    for window in (dense, ragged, packed):
        assert window.state.count.tolist() == [4, 3]
        torch.testing.assert_close(window.predict(), expected, rtol=1e-4, atol=1e-5)
    with pytest.raises(ConfigurationError, match="float64 or integers"):
        dense.update(x, times.float())
    with pytest.raises(ConfigurationError, match="finite"):
        dense.update(x, float("nan"))
    with pytest.raises(ShapeError, match="one time for each of 12"):
        dense.update(x, times[:, :3])
    with pytest.raises(ShapeError, match="holds 2 sets"):
        dense.update(x[:1], 3)
    assert dense.state.count.tolist() == [4, 3]


def test_without_a_time_elements_are_of_now(monkeypatch):
    window = small().window(span=60, tile=10)
    monkeypatch.setattr("time.time", lambda: 1000.0)
    window.update(torch.randn(1, 2, ELEMENT))
    window.update(torch.randn(1, 1, ELEMENT), time=1020)
    monkeypatch.setattr("time.time", lambda: 1055.0)
    window.update(torch.randn(1, 4, ELEMENT))
    assert window.state.count.tolist() == [7]
    window.advance(1060)
    assert window.state.count.tolist() == [5]
    window.advance(1000)  # never back
    assert window.state.count.tolist() == [5]
    window.advance(10_000)
    assert window.state.count.tolist() == [0]


def test_late_elements_are_counted_or_refused():
    x = torch.randn(1, 3, ELEMENT)
    dropping, raising = (small().window(span=10, tile=1, late=late) for late in ("drop", "raise"))
    for window in (dropping, raising):
        window.update(x, torch.tensor([0, 50, 100]))  # of one chunk: the first two have left already
        assert (window.dropped, window.state.count.tolist()) == (0, [1])
    dropping.update(x, torch.tensor([90, 91, 80]))
    assert (dropping.dropped, dropping.state.count.tolist()) == (2, [2])
    with pytest.raises(LateError, match="2 of 3 elements are older than the window, which begins at 91"):
        raising.update(x, torch.tensor([90, 91, 80]))
    assert (raising.dropped, raising.state.count.tolist()) == (0, [1])


def test_an_error_of_the_encoder_changes_nothing():
    window = small().window(span=10, tile=1)
    window.update(torch.randn(1, 3, ELEMENT), 5)
    before = window.to_bytes()
    with pytest.raises(ss.errors.NonFiniteError):
        window.update(torch.full((1, 1, ELEMENT), math.nan), 9)
    assert window.to_bytes() == before


def test_windows_of_two_machines_merge(tmp_path):
    model, x = small(), torch.randn(1, 40, ELEMENT)
    times = torch.arange(40)
    here, there, all_of_it = (model.window(span=24, tile=4) for _ in range(3))
    here.update(x[:, ::2], times[::2])
    there.update(x[:, 1::2], times[1::2])
    there.update(x[:, :2], 0)
    all_of_it.update(x, times)
    there.save(tmp_path / "window")
    here.merge(ss.Window.load(tmp_path / "window", model))
    torch.testing.assert_close(here.predict(), all_of_it.predict())
    torch.testing.assert_close(here.predict(8), all_of_it.predict(8))
    assert here.dropped == 2
    with pytest.raises(MismatchError, match="into itself"):
        here.merge(here)
    with pytest.raises(MismatchError, match="one tile"):
        here.merge(model.window(span=24, tile=2))
    with pytest.raises(ConfigurationError, match="by count cannot be merged"):
        here.merge(model.window(count=24, tile=4))
    torch.manual_seed(1)
    other = ss.SetModel(ss.SetEncoder(nn.Linear(ELEMENT, 4), ss.DeepSets("max")), AsIs()).eval().window(span=24, tile=4)
    other.update(x[:, :1], 39)
    with pytest.raises(MismatchError, match="another encoder"):
        here.merge(other)
    torch.testing.assert_close(here.predict(), all_of_it.predict())


@pytest.mark.parametrize("options", [{"count": 20, "tile": 5}, {"span": 20.0, "tile": 2.5, "late": "raise"}])
@pytest.mark.parametrize("filled", [False, True])
def test_a_loaded_window_goes_on_where_the_saved_one_stopped(options, filled):
    model, x = small(), torch.randn(2, 30, ELEMENT)
    window = model.window(**options)
    if filled:
        window.update(x[:, :17])
    again = ss.Window.from_bytes(window.to_bytes(), model)
    assert repr(again) == repr(window)
    for each in (window, again):
        each.update(x[:, 17:])
    assert torch.equal(window.predict(), again.predict())
    assert again.to_bytes() == ss.Window.from_bytes(again.to_bytes(), model).to_bytes()


def test_damaged_windows_and_those_of_other_models_are_refused():
    window = small().window(count=20, tile=5)
    window.update(torch.randn(1, 17, ELEMENT))
    data = window.to_bytes()
    for place in range(0, len(data), 7):
        damaged = bytearray(data)
        damaged[place] ^= 1
        with pytest.raises(StateFormatError):
            ss.Window.from_bytes(bytes(damaged), small())
    for end in range(0, len(data), 97):
        with pytest.raises(StateFormatError):
            ss.Window.from_bytes(data[:end], small())
    with pytest.raises(MismatchError):
        ss.Window.from_bytes(data, small("mean"))
    _, header, state = data.removeprefix(FORMAT).split(b"\n", 2)
    for forged in (b"{}", b"[]", b"nonsense", header.replace(b'"tile": 5', b'"tile": 0')):
        with pytest.raises(StateFormatError, match="edited"):
            ss.Window.from_bytes(b"\n".join([FORMAT + _checksum(forged, state), forged, state]), small())


def test_invalid_options_say_what_is_expected():
    model = small()
    for options in ({"tile": 1}, {"count": 10, "span": 10, "tile": 1}):
        with pytest.raises(ConfigurationError, match="a count or a span"):
            model.window(**options)
    for options in ({"count": 10, "tile": 3}, {"count": 10, "tile": 2.5}, {"span": 10, "tile": 0}, {"span": -1, "tile": 1}):
        with pytest.raises(ConfigurationError, match="a multiple of the tile"):
            model.window(**options)
    with pytest.raises(ConfigurationError, match="late is one of"):
        model.window(count=10, tile=1, late="keep")
    window = model.window(count=10, tile=1)
    with pytest.raises(ConfigurationError, match="more than it keeps"):
        window.last(11)
    with pytest.raises(ConfigurationError, match="without a time"):
        window.update(torch.randn(1, 1, ELEMENT), 3.0)
    with pytest.raises(ConfigurationError, match="no time to advance"):
        window.advance(3.0)
    with pytest.raises(ShapeError, match="as many elements for each"):
        window.update([torch.randn(1, ELEMENT), torch.randn(2, ELEMENT)])


def test_a_model_that_is_not_consistent_needs_to_be_told():
    model = ss.SetModel(ss.SetEncoder(nn.Linear(ELEMENT, 4), ss.ChunkMean(ss.nn.SetTransformer(4))), AsIs())
    with pytest.raises(ConsistencyError):
        model.window(count=10, tile=1)
    window = model.window(count=10, tile=5, chunks="average")
    window.update(torch.randn(1, 8, ELEMENT))
    assert window.predict().shape == (1, 1, 4)


def test_a_sliding_sum_without_tiles_is_nothing():
    assert SlidingSum(5).total({}, 3) is None
