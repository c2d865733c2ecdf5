"""StateStore: streams by id, across processes, threads and crashes."""

import multiprocessing
import os
import random
import sqlite3
import threading

import pytest
import torch
from torch import nn

import setstream as ss
from setstream.errors import ConfigurationError, MismatchError, StoreError
from tests.kills import kill_after


def make(seed=0):
    torch.manual_seed(seed)
    encoder = ss.SetEncoder(nn.Linear(3, 8), ss.UMBC(8, num_slots=2, heads=2))
    return ss.SetModel(encoder, nn.Linear(8, 1)).eval()


@pytest.fixture
def store(tmp_path):
    with ss.StateStore(tmp_path / "deep" / "states.db", make()) as opened:
        yield opened


def test_a_set_in_pieces_is_the_whole_set(store):
    x = torch.randn(100, 3)
    for piece in x.split(7):
        store.update("a", piece)
    assert store.count("a") == 100
    torch.testing.assert_close(store.predict("a"), make()(x[None]), rtol=1e-4, atol=1e-5)


def test_merge_remove_forget_and_decay(store):
    x, y = torch.randn(20, 3), torch.randn(30, 3)
    store.update("a", x)
    store.update("b", y)
    assert store.merge("a", "b") == 50
    assert store.count("b") == 30
    torch.testing.assert_close(store.predict("a"), make()(torch.cat([x, y])[None]), rtol=1e-4, atol=1e-5)
    assert store.remove("a", x) == 30
    torch.testing.assert_close(store.predict("a"), store.predict("b"), rtol=1e-3, atol=1e-4)
    assert store.merge("c", store.get("b")) == 30
    store.decay("a", 0.5)
    assert store.ids() == ["a", "b", "c"]
    assert len(store) == 3
    assert "b" in store
    assert store.forget("b")
    assert not store.forget("b")
    assert "b" not in store


def test_an_empty_update_makes_an_empty_set(store):
    assert store.update("none", torch.empty(0, 3)) == 0
    assert "none" in store
    assert torch.isfinite(store.predict("none")).all()


def test_bad_input_changes_nothing(store):
    store.update("a", torch.randn(5, 3))
    before = store.get("a").to_bytes()
    with pytest.raises(ValueError, match="width"):
        store.update("a", torch.randn(5, 4))
    with pytest.raises(ValueError, match="NaN"):
        store.update("a", torch.full((2, 3), float("nan")))
    with pytest.raises(ValueError, match="cannot remove"):
        store.remove("a", torch.randn(9, 3))
    with pytest.raises(StoreError, match="no set 'z'"):
        store.predict("z")
    with pytest.raises(StoreError, match="no set 'z'"):
        store.merge("a", "z")
    with pytest.raises(MismatchError, match="one set at a time"):
        store.merge("a", make().encoder.update(None, torch.randn(2, 4, 3)))
    assert store.get("a").to_bytes() == before


def test_stores_know_their_model(tmp_path):
    with ss.StateStore(tmp_path / "s.db", make()) as store:
        store.update("a", torch.randn(5, 3))
    with ss.StateStore(tmp_path / "s.db", make()) as store:
        assert store.count("a") == 5
    with pytest.raises(MismatchError, match="another encoder"):
        ss.StateStore(tmp_path / "s.db", make(seed=1))
    with pytest.raises(ConfigurationError, match="training mode"):
        ss.StateStore(tmp_path / "t.db", make().train())
    (tmp_path / "text.db").write_text("this is no database, and long enough to tell so " * 9)
    with pytest.raises(StoreError, match="is no store of states"):
        ss.StateStore(tmp_path / "text.db", make())


def test_threads_share_a_store(store):
    def work():
        for _ in range(10):
            store.update("a", torch.ones(3, 3))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert store.count("a") == 120


def _add(path, times):
    torch.set_num_threads(1)
    with ss.StateStore(path, make()) as store:
        for _ in range(times):
            store.update("a", torch.ones(1, 3))


def test_two_processes_that_update_one_set_lose_nothing(tmp_path):
    path = tmp_path / "s.db"
    ss.StateStore(path, make()).close()
    context = multiprocessing.get_context("fork")
    workers = [context.Process(target=_add, args=(path, 40)) for _ in range(2)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
    with ss.StateStore(path, make()) as store:
        assert store.count("a") == 80


def kill_updates(path, kills, seed):
    """Children that update and note each update that returned; killed at random moments. Gives notes and kills at work."""
    rng = random.Random(seed)
    noted = path.with_suffix(".log")

    def work(tick):
        with ss.StateStore(path, make()) as store, noted.open("ab", buffering=0) as log:
            tick()
            while True:
                store.update("a", torch.ones(1, 3))
                log.write(b".")
                tick()

    killed = sum(kill_after(work, ticks=rng.randrange(5), pause=rng.uniform(0.0, 0.01)) for _ in range(kills))
    return noted.stat().st_size, killed


@pytest.mark.parametrize("kills", [20, pytest.param(200, marks=pytest.mark.slow)])
def test_no_update_that_returned_is_lost_when_the_process_is_killed(tmp_path, kills):
    path = tmp_path / "s.db"
    ss.StateStore(path, make()).close()
    returned, killed = kill_updates(path, kills, seed=1)
    with ss.StateStore(path, make()) as store:
        kept = store.count("a")
        print(f"{killed} kills: {returned} updates returned, {kept} kept")
        assert returned <= kept <= returned + kills  # the last update of each may have been done and not yet noted
        assert killed == kills
        assert returned > kills / 2
        expected = make()(torch.ones(1, kept, 3))
        torch.testing.assert_close(store.predict("a"), expected, rtol=1e-4, atol=1e-5)


def test_a_store_that_is_open_during_a_fork_loses_nothing(tmp_path):
    with ss.StateStore(tmp_path / "s.db", make()) as store:
        store.update("a", torch.ones(1, 3))
        go, gone = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                os.read(go, 1)  # until the parent has closed its store
                for _ in range(5):
                    store.update("a", torch.ones(1, 3))
                store.close()
            finally:
                os._exit(0)
        store.update("a", torch.ones(1, 3))
        store.close()
        os.write(gone, b".")
        os.waitpid(child, 0)
        assert store.count("a") == 7


def test_a_foreign_database_is_refused(tmp_path):
    with sqlite3.connect(tmp_path / "other.db") as database:
        database.execute("CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT)")
        database.execute("INSERT INTO meta VALUES ('colour', 'red')")
    with pytest.raises(StoreError, match="no store of states"):
        ss.StateStore(tmp_path / "other.db", make())
