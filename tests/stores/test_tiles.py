"""Stores with tiles: any range equals a recomputation, on SQLite (PostgreSQL: test_postgres), for sums and for maxima."""

import math
import random
import sqlite3
import threading

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import setstream as ss
from setstream.errors import ConfigurationError, LateError, RemovalError, StoreError, UnknownSetError
from setstream.stores.store import Change
from setstream.stores.tiling import FIRST, LAST, Kept, Tiling

HOUR, DAY = 3600, 86_400


def make(seed=0):
    """Attention beside a maximum, which cannot subtract."""
    torch.manual_seed(seed)
    pool = ss.Parallel(slots=ss.UMBC(4, num_slots=2), most=ss.DeepSets("max"))
    return ss.SetModel(ss.SetEncoder(nn.Linear(3, 4), pool), Joined()).eval()


class Joined(nn.Module):
    def forward(self, z):
        return torch.cat([z["slots"].flatten(1), z["most"]], dim=1)


class Expected:
    """All elements of all sets with their times."""

    def __init__(self, model):
        self.model, self.sets = model, {}

    def add(self, id, x, times):
        self.sets.setdefault(id, []).extend(zip(x, times, strict=True))

    def keep(self, id, keep):
        self.sets[id] = [(x, time) for x, time in self.sets[id] if keep(time)]

    def check(self, store, id, since=None, until=None, tile=HOUR):
        low = -math.inf if since is None else since // tile * tile
        high = math.inf if until is None else -(-until // tile) * tile
        timed = (since, until) != (None, None)
        x = [x for x, t in self.sets[id] if (t is None and not timed) or (t is not None and low <= t < high)]
        count, prediction = store.count_and_prediction(id, since=since, until=until)
        assert count == len(x)
        if x:
            torch.testing.assert_close(prediction, self.model(torch.stack(x)[None]), rtol=1e-4, atol=1e-5)


@pytest.fixture
def store(tmp_path):
    with ss.StateStore(tmp_path / "s.db", make(), tile=HOUR) as opened:
        yield opened


def fill(store, ids=("a", "b"), hours=3000, seed=0):
    rng, expected = random.Random(seed), Expected(store.model)
    for id in ids:
        times = torch.tensor([rng.randrange(hours * HOUR) for _ in range(400)])
        for some in times.split(rng.randrange(20, 90)):
            x = torch.randn(len(some), 3)
            store.update(id, x, time=some)
            expected.add(id, x, some.tolist())
    return expected


def test_any_range_is_a_recomputation(store):
    expected, rng = fill(store), random.Random(1)
    for _ in range(60):
        since, until = sorted(rng.randrange(3100 * HOUR) for _ in range(2))
        expected.check(store, rng.choice("ab"), since, until)
    expected.check(store, "a", since=1000 * HOUR)
    expected.check(store, "a", until=1000 * HOUR)
    expected.check(store, "a")
    assert store.count("a") == 400
    with pytest.raises(UnknownSetError, match="no set 'z'"):
        store.predict("z", since=0)


def test_merge_remove_decay_delete_and_replace_keep_tiles_and_whole_together(store):
    expected = fill(store, hours=100)
    store.merge("a", "b")
    expected.add("a", *zip(*expected.sets["b"], strict=True))
    for since, until in ((0, 5 * HOUR), (37 * HOUR, 99 * HOUR), (None, 20 * HOUR)):
        expected.check(store, "a", since, until)
    left = store.remove("a", since=10 * HOUR, until=40 * HOUR)
    expected.keep("a", lambda t: not 10 * HOUR <= t < 40 * HOUR)
    assert left == len(expected.sets["a"]) == store.count("a")
    for since, until in ((None, None), (0, 35 * HOUR), (5 * HOUR, 64 * HOUR), (39 * HOUR, 41 * HOUR), (12 * HOUR, 30 * HOUR)):
        expected.check(store, "a", since, until)
    state = store.encoder.update(None, torch.ones(1, 2, 3)).detach()
    store.merge("a", state)  # without a time
    expected.add("a", torch.ones(2, 3), [None, None])
    store.merge("a", state, time=50 * HOUR)
    expected.add("a", torch.ones(2, 3), [50 * HOUR] * 2)
    for since, until in ((None, None), (50 * HOUR, 51 * HOUR), (0, 99 * HOUR)):
        expected.check(store, "a", since, until)
    store.remove("a", until=90 * HOUR)
    expected.keep("a", lambda t: t is None or t >= 90 * HOUR)
    expected.check(store, "a")
    store.apply([Change("a", state), Change("a", state, replace=True), Change("a", "b"), Change("c", "a")])
    assert (store.count("a"), store.count("c")) == (402, 402)
    assert store.get("c", since=0, until=1000 * HOUR).count.tolist() == [400]
    store.delete("a")
    assert store.update("a", torch.ones(1, 3), time=0) == 1
    assert store.get("a", since=0).count.tolist() == [1]
    with pytest.raises(ConfigurationError, match="decay"):
        store.decay("a", 0.5)  # a maximum
    assert store.remove("a", until=HOUR) == 0
    assert "a" in store


def test_elements_are_subtracted_from_their_tiles(tmp_path):
    torch.manual_seed(0)
    model = ss.SetModel(ss.SetEncoder(nn.Linear(3, 4), ss.UMBC(4, num_slots=2)), nn.Linear(4, 1)).eval()
    x, times = torch.randn(200, 3), torch.arange(200) * HOUR
    with ss.StateStore(tmp_path / "s.db", model, tile=HOUR) as store:
        store.update("a", x, time=times)
        assert store.remove("a", x[50:60], time=times[50:60]) == 190
        for since, until in ((0, 200), (32, 64), (45, 70), (50, 60), (51, 64)):
            state = store.get("a", since=since * HOUR, until=until * HOUR)
            rest = torch.cat([x[since : max(since, 50)], x[60:until]])[None]
            assert int(state.count) == rest.shape[1]
            torch.testing.assert_close(store.finalize(state), model(rest), rtol=1e-3, atol=1e-4)
        with pytest.raises(RemovalError):
            store.remove("a", x[:1], time=50 * HOUR)  # that tile has no elements left
        with pytest.raises(ConfigurationError, match="the time= that they were added with"):
            store.remove("a", x[:1])
        assert store.count("a") == 190
        store.decay("a", 0.5)
        store.update("a", x[:1], time=0)
        state = store.get("a", since=0, until=32 * HOUR)
        with torch.no_grad():
            expected = model.encoder.update(None, x[None, :32]) * 0.5 + model.encoder.update(None, x[None, :1])
        torch.testing.assert_close(store.finalize(state), model.finalize(expected), rtol=1e-4, atol=1e-5)


def test_retention_drops_old_tiles_and_empty_sets(tmp_path):
    with ss.StateStore(tmp_path / "s.db", make(), tile=HOUR, retention=100 * HOUR) as store:
        expected = fill(store, hours=300)
        store.update("old", torch.ones(3, 3), time=5)
        assert store.expire(now=300 * HOUR) == 3
        for id in "ab":
            expected.keep(id, lambda t: t >= 200 * HOUR)
            for since, until in ((None, None), (0, 250 * HOUR), (201 * HOUR, 260 * HOUR), (190 * HOUR, 210 * HOUR)):
                expected.check(store, id, since, until)
        assert "old" not in store
        assert store.expire(now=300 * HOUR) == 0
        with pytest.raises(LateError, match="no longer kept"):
            store.update("a", torch.ones(1, 3), time=199 * HOUR)
        late, timely = store.encode("a", torch.ones(1, 3), 10), store.encode("a", torch.ones(1, 3), 250 * HOUR)
        results = store.apply([late, timely])
        assert isinstance(results[0], LateError)
        assert results[1].count == len(expected.sets["a"]) + 1
        assert store.expire(now=0) == 0  # what was dropped does not come back
        with pytest.raises(LateError):
            store.update("a", torch.ones(1, 3), time=10)
    with ss.StateStore(tmp_path / "s.db", make()) as store:
        assert store.expire() == 0  # this one keeps all that is left


def test_hours_roll_up_to_days_and_days_to_months(tmp_path):
    retention = {HOUR: 7 * DAY, DAY: 60 * DAY, 30 * DAY: 360 * DAY}
    with ss.StateStore(tmp_path / "s.db", make(), tile=HOUR, retention=retention) as store:
        assert store.tiles.tiling.sizes == (1, 24, 720)
        expected = fill(store, hours=400 * 24)
        now, before = 400 * DAY, {id: store.predict(id) for id in "ab"}
        rows = store.rows.query("SELECT level, COUNT(*) FROM tiles GROUP BY level")
        assert store.expire(now) == 2
        left = dict(store.rows.query("SELECT level, COUNT(*) FROM tiles GROUP BY level"))
        assert left[0] < dict(rows)[0] / 20
        for id in "ab":
            assert not torch.equal(store.predict(id), before[id])
            expected.keep(id, lambda t: t >= 30 * DAY)  # 40 days ago, in whole months
            expected.check(store, id)
            expected.check(store, id, since=394 * DAY + 5 * HOUR)  # hours are kept
            expected.check(store, id, 350 * DAY + 5 * HOUR, 360 * DAY + HOUR, tile=DAY)
            expected.check(store, id, 100 * DAY + 5 * HOUR, 180 * DAY + HOUR, tile=30 * DAY)
            assert int(store.get(id, since=100 * DAY, until=399 * DAY + 5).count) == sum(
                90 * DAY <= t < 399 * DAY + HOUR for _, t in expected.sets[id]
            )
        store.update("a", torch.ones(1, 3), time=355 * DAY + 3)  # late: to its day and its month
        expected.add("a", torch.ones(1, 3), [355 * DAY + 3])
        expected.check(store, "a", 355 * DAY, 356 * DAY)
        expected.check(store, "a", 330 * DAY, 360 * DAY)
        with pytest.raises(ConfigurationError, match=f"since={355 * DAY}, until={356 * DAY}"):
            store.remove("a", since=355 * DAY, until=355 * DAY + HOUR)
        store.remove("a", since=355 * DAY, until=356 * DAY)
        expected.keep("a", lambda t: not 355 * DAY <= t < 356 * DAY)
        expected.check(store, "a", 330 * DAY, 390 * DAY)
        expected.check(store, "a")


def test_a_store_without_tiles_gets_them(tmp_path):
    x = torch.randn(20, 3)
    with ss.StateStore(tmp_path / "s.db", make()) as store:
        store.update("a", x)
        for use in (
            lambda: store.update("a", x, time=3),
            lambda: store.predict("a", since=3),
            lambda: store.merge("a", store.get("a"), time=1),
        ):
            with pytest.raises(ConfigurationError, match="tile"):
                use()
        with pytest.raises(ConfigurationError, match="a store with tiles"):
            store.remove("a", since=3)
    with ss.StateStore(tmp_path / "s.db", make(), tile=HOUR) as store:
        assert store.update("a", x[:5], time=10) == 25
        assert store.get("a", since=0).count.tolist() == [5]
        assert store.remove("a", until=HOUR) == 20
        torch.testing.assert_close(store.predict("a"), make()(x[None]), rtol=1e-4, atol=1e-5)
    with ss.StateStore(tmp_path / "s.db", make()) as store:
        assert store.tiles.tiling.tile == HOUR
        assert store.tiles.tiling.sizes == (1, 32, 1024)
    with pytest.raises(ConfigurationError, match="its tiles are of 3600 s"):
        ss.StateStore(tmp_path / "s.db", make(), tile=60)
    with pytest.raises(ConfigurationError, match="the retention names"):
        ss.StateStore(tmp_path / "s.db", make(), retention={HOUR: DAY, DAY: math.inf})
    with pytest.raises(ConfigurationError, match="with tiles"):
        ss.StateStore(tmp_path / "t.db", make(), retention=60)
    with sqlite3.connect(tmp_path / "s.db") as database:  # setstream 0.1 and 0.2 refuse what they would damage
        assert database.execute("SELECT value FROM meta WHERE key = 'version'").fetchone() == ("2",)


def test_invalid_tiles_and_retentions_say_what_is_expected(tmp_path):
    for tile in (0, -1, math.inf, math.nan):
        with pytest.raises(ConfigurationError, match="a positive number of seconds"):
            ss.StateStore(tmp_path / "s.db", make(), tile=tile)
    for retention in ({HOUR: 1, 5000: 2}, {1: 5}):
        with pytest.raises(ConfigurationError, match="multiple of the next smaller"):
            ss.StateStore(tmp_path / "s.db", make(), tile=HOUR, retention=retention)
    with pytest.raises(ConfigurationError, match="positive number of seconds; got 0"):
        ss.StateStore(tmp_path / "s.db", make(), tile=HOUR, retention=0)
    assert not list(tmp_path.iterdir())  # nothing is left behind


def test_fill_replaces_a_set_and_its_tiles(store):
    store.update("a", torch.ones(5, 3), time=0)
    store.fill([("a", store.encoder.update(None, torch.ones(1, 2, 3)).detach())])
    assert store.count("a") == 2
    assert store.get("a", since=0).count.tolist() == [0]


def test_a_bad_change_adds_nothing_to_the_tiles(store):
    good, huge = store.encode("a", torch.ones(1, 3), 0), store.encode("a", torch.full((1, 3), 1e38), 0)
    results = store.apply([good, huge, good])
    assert [getattr(result, "count", None) for result in results] == [1, None, 2]
    assert store.get("a", since=0).count.tolist() == [2]


def test_without_a_time_elements_are_of_now(store, monkeypatch):
    monkeypatch.setattr("time.time", lambda: 7.5 * HOUR)
    store.update("a", torch.ones(2, 3))
    assert store.get("a", since=7 * HOUR, until=8 * HOUR).count.tolist() == [2]
    assert store.update("a", torch.ones(0, 3)) == 2


def test_expiry_while_others_write_and_read_loses_nothing(tmp_path):
    path = tmp_path / "s.db"
    retention = {HOUR: DAY, DAY: math.inf}
    with ss.StateStore(path, make(), tile=HOUR, retention=retention) as store:
        stop, failures, written = threading.Event(), [], [0]
        store.update("a", torch.ones(24, 3), time=torch.arange(24) * HOUR)

        def write():
            while not stop.is_set():
                store.update("a", torch.ones(1, 3), time=(30 + written[0] % 40) * HOUR)
                written[0] += 1

        def read():
            while not stop.is_set():
                count = int(store.get("a", since=0, until=DAY).count)
                if count != 24:
                    failures.append(count)

        threads = [threading.Thread(target=work) for work in (write, read)]
        for thread in threads:
            thread.start()
        for hour in range(24, 120):
            store.expire(hour * HOUR)
        stop.set()
        for thread in threads:
            thread.join()
        assert not failures
        assert int(store.get("a", since=DAY, until=10 * DAY).count) == written[0] > 0
        assert store.count("a") == 24 + written[0]


def test_damaged_tiles_are_told_so(store):
    store.update("a", torch.ones(5, 3), time=0)
    with store.rows.transaction([]) as transaction:
        transaction.execute("UPDATE tiles SET state = %s WHERE level = 0", [b"nothing"])
    with pytest.raises(ss.errors.StateFormatError):
        store.predict("a", since=0, until=HOUR)
    with store.rows.transaction([]) as transaction:
        transaction.execute("DROP TABLE tiles")
    with pytest.raises(StoreError, match="is damaged"):
        store.predict("a", since=0, until=HOUR)


tilings = st.sampled_from([Tiling(1.0, (1, 32, 1024)), Tiling(1.0, (1, 24, 720)), Tiling(1.0, (1, 2, 6, 30))])


@given(tilings, st.integers(-3000, 3000), st.integers(0, 5000))
def test_ranges_are_each_tile_once_and_few(tiling, start, length):
    ranges, stop = tiling.ranges(start, start + length), start + length
    covered = [
        tile
        for level, first, last in ranges
        for block in range(first, last)
        for tile in range(block * tiling.sizes[level], (block + 1) * tiling.sizes[level])
    ]
    assert sorted(covered) == list(range(start, stop))
    factors = [b // a for a, b in zip(tiling.sizes, tiling.sizes[1:], strict=False)]
    assert sum(last - first for _, first, last in ranges) <= 2 * sum(factors) + length / tiling.sizes[-1]


@given(tilings, st.lists(st.integers(0, 100), min_size=3, max_size=3), st.integers(-3000, 3000), st.integers(0, 3000))
def test_a_range_is_widened_to_what_is_kept(tiling, ages, start, length):
    sizes = tiling.sizes[1:]
    rolled = tuple(max(0, 2 - place) * age * sizes[-1] for place, (age, _) in enumerate(zip(ages, sizes, strict=False)))
    rolled = tuple(sorted(rolled, reverse=True))
    kept = Kept(FIRST, rolled)
    first, stop = tiling.whole(float(start), float(start + length), kept)
    assert first <= start
    assert stop >= start + length
    for level, low, high in tiling.ranges(first, stop):
        if low < high and level < len(rolled):
            assert low * tiling.sizes[level] >= rolled[level]
    assert tiling.whole(None, None, kept) == (FIRST, LAST)
