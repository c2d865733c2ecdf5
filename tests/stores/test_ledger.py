"""Repeated deliveries count once: keys and cursors, with kills, threads and repetitions (PostgreSQL: test_postgres)."""

import random
import threading

import pytest
import torch

import setstream as ss
from setstream.errors import ConfigurationError, CursorError, KeyReusedError, NonFiniteError, UnknownSetError
from setstream.stores.store import Change, Cursor
from tests.kills import kill_after
from tests.stores.test_store import make


@pytest.fixture
def store(tmp_path):
    with ss.StateStore(tmp_path / "s.db", make()) as opened:
        yield opened


def part(store, value=1.0, size=1):
    with torch.no_grad():
        return store.encoder.update(None, torch.full((1, size, 3), value))


def test_a_key_counts_once_and_gets_its_first_answer(store):
    x = torch.randn(5, 3)
    assert store.update("a", x, key="k1") == 5
    assert store.update("a", x) == 10
    before = store.get_bytes("a")
    assert store.update("a", x, key="k1") == 5
    assert store.get_bytes("a") == before
    assert store.update("b", x, key="k1") == 5  # keys belong to their set
    with pytest.raises(KeyReusedError, match="'k1' of set 'a'"):
        store.update("a", x[:4], key="k1")
    with pytest.raises(KeyReusedError):
        store.merge("a", "b", key="k1")
    assert store.merge("a", "b", key="k2") == store.merge("a", "b", key="k2") == 15
    assert store.merge("a", store.get("b"), key="k3") == 20
    assert store.merge("a", store.get("b"), key="k3") == 20
    assert store.count("a") == 20
    store.delete("a")
    assert store.update("a", x, key="k1") == 5
    assert "a" not in store  # it was deleted after the change


def test_a_change_that_failed_leaves_no_key(store):
    with pytest.raises(NonFiniteError):
        store.update("a", torch.full((1, 3), float("inf")), key="k")
    with pytest.raises(UnknownSetError):
        store.merge("a", "nothing", key="k")
    assert store.update("a", torch.ones(1, 3), key="k") == 1
    for key in ("", "k" * 256, 7, "\ud800", "a\0b"):
        with pytest.raises(ConfigurationError, match="a key is a str of 1 to 255"):
            store.update("a", torch.ones(1, 3), key=key)
    assert store.count("a") == 1


def test_repetitions_within_one_batch(store):
    one, two = part(store), part(store, 2.0)
    same = Change("a", one, key="k", digest="1")
    changes = [
        same,
        same,
        Change("a", two, key="k", digest="2"),
        Change("a", two, key="l"),
        Change("b", one, key="k"),
        Change("a", one),
    ]
    changes += [Change("c", "nothing", key="m"), Change("c", "nothing", key="m")]
    results = store.apply(changes)
    assert [getattr(result, "count", None) for result in results] == [1, 1, None, 2, 1, 3, None, None]
    assert [getattr(result, "replayed", None) for result in results] == [False, True, None, False, False, False, None, None]
    assert isinstance(results[2], KeyReusedError)
    assert [type(result) for result in results[6:]] == [UnknownSetError] * 2
    assert [getattr(result, "replayed", None) for result in store.apply(changes)] == [
        True,
        True,
        None,
        True,
        True,
        False,
        None,
        None,
    ]


def test_times_are_part_of_the_contents(tmp_path):
    with ss.StateStore(tmp_path / "s.db", make(), tile=60) as store:
        x = torch.randn(2, 3)
        assert store.update("a", x, key="now") == store.update("a", x, key="now") == 2
        times = torch.tensor([0, 100])
        assert store.update("a", x, key="k", time=times) == store.update("a", x, key="k", time=times) == 4
        with pytest.raises(KeyReusedError):
            store.update("a", x, key="k", time=times + 1)
        assert int(store.get("a", since=0, until=120).count) == 2


def test_keys_are_kept_as_long_as_documented(tmp_path, monkeypatch):
    monkeypatch.setattr("setstream.stores.ledger.PAGE", 10)
    with ss.StateStore(tmp_path / "s.db", make(), key_retention=100) as store:
        for now in (1000, 1050):
            monkeypatch.setattr("time.time", lambda now=now: now)
            store.apply([Change("a", part(store), key=f"{now}-{number}") for number in range(25)])
        store.expire(now=1120)
        assert store.rows.query("SELECT MIN(time), COUNT(*) FROM keys") == [(1050, 25)]
        store.update("a", torch.ones(1, 3), key="1000-7")
        assert store.count("a") == 51
        store.expire()
        assert store.rows.query("SELECT COUNT(*) FROM keys") == [(26,)]


def test_a_position_moves_with_the_changes(store):
    assert store.position("events") is None
    store.apply([Change("a", part(store))], cursor=("events", "", 10))
    assert store.position("events") == 10
    assert store.position("events", "1") is None
    for offset in (10, 9):
        with pytest.raises(CursorError, match="the store is at 10"):
            store.apply([Change("a", part(store))], cursor=("events", "", offset))
    store.apply([], cursor=("events", "", 12))
    store.apply([Change("a", part(store))], cursor=Cursor("redis", "0", "5-0", None))
    for after in (None, "4-0", 5):
        with pytest.raises(CursorError, match="'5-0'"):
            store.apply([Change("a", part(store))], cursor=Cursor("redis", "0", "7-0", after))
    store.apply([Change("a", "nothing"), Change("a", part(store))], cursor=Cursor("redis", "0", "7-0", "5-0"))
    assert (store.position("events"), store.position("redis", "0"), store.count("a")) == (12, "7-0", 3)


def test_two_consumers_of_one_partition_do_not_both_count(store):
    barrier, refused = threading.Barrier(4), []

    def consume():
        barrier.wait()
        for _ in range(30):
            after = store.position("events") or 0
            if after >= 30:
                return
            try:
                store.apply([Change("a", part(store))], cursor=Cursor("events", "", after + 1, after or None))
            except CursorError:
                refused.append(after)

    threads = [threading.Thread(target=consume) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    while store.position("events") < 30:
        consume_one = store.position("events")
        store.apply([Change("a", part(store))], cursor=Cursor("events", "", consume_one + 1, consume_one))
    assert store.count("a") == 30


def test_four_clients_that_repeat_each_others_requests(store):
    """Each of 40 updates is sent by all four, some of them twice."""
    x = torch.randn(40, 3)

    def send(seed):
        order = random.Random(seed).sample(range(40), 40)
        for number in order + order[:10]:
            store.update("a", x[number : number + 1], key=str(number))

    threads = [threading.Thread(target=send, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert store.count("a") == 40
    torch.testing.assert_close(store.predict("a"), make()(x[None]), rtol=1e-4, atol=1e-5)


def check_kills(place, answered, kills, way):
    """A client repeats what was not answered, with its key; a consumer goes on from its position. Both are killed."""
    x = torch.randn(4000, 3)
    with ss.StateStore(place, make(), tile=10):
        answered.write_bytes(b"")
    rng = random.Random(7)

    def work(tick):
        with ss.StateStore(place, make()) as store, answered.open("ab", buffering=0) as log:
            tick()
            while True:
                if way == "keys":
                    number = answered.stat().st_size
                    store.update("a", x[number : number + 1], key=str(number), time=number)
                    log.write(b".")
                else:
                    number = store.position("log") or 0
                    change = store.encode("a", x[number : number + 1], number)
                    store.apply([change], cursor=Cursor("log", "", number + 1, number or None))
                tick()

    killed = sum(kill_after(work, ticks=rng.randrange(6), lines=rng.randrange(600)) for _ in range(kills))
    assert killed == kills
    with ss.StateStore(place, make()) as store:
        count = store.count("a")
        seen = answered.stat().st_size if way == "keys" else store.position("log")
        assert count in ((seen, seen + 1) if way == "keys" else (seen,))  # the last answer may not have been noted
        assert count > kills
        torch.testing.assert_close(store.predict("a"), make()(x[None, :count]), rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(
            store.predict("a", since=10, until=count // 10 * 10), make()(x[None, 10 : count // 10 * 10]), rtol=1e-4, atol=1e-5
        )


@pytest.mark.parametrize("kills", [12, pytest.param(200, marks=pytest.mark.slow)])
@pytest.mark.parametrize("way", ["keys", "cursor"])
def test_killed_at_any_line_and_repeated_nothing_is_missing_or_doubled(tmp_path, kills, way):
    check_kills(tmp_path / "s.db", tmp_path / "answered", kills, way)
