"""StateStore: streams by id, across processes, threads and crashes."""

import contextlib
import multiprocessing
import os
import random
import sqlite3
import threading

import pytest
import torch
from torch import nn

import setstream as ss
from setstream.errors import ConfigurationError, MismatchError, NonFiniteError, StoreError
from setstream.stores.store import Change
from tests._utils.test_memory import resident
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


def test_merge_remove_delete_and_decay(store):
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
    assert store.delete("b")
    assert not store.delete("b")
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
    with pytest.raises(StoreError, match="is not a store of states"):
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

    killed = sum(kill_after(work, ticks=rng.randrange(5), lines=rng.randrange(300)) for _ in range(kills))
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


def test_reads_of_ever_different_sizes_take_no_memory(tmp_path):
    """Each is a statement of its own, which SQLite prepares and the connection keeps for a while."""
    with ss.StateStore(tmp_path / "s.db", make()) as store:
        sizes = []
        for count in range(2000, 2150):
            ids = [f"customer-{number:050}" for number in range(count)]
            with store.rows.transaction(ids) as transaction:
                assert transaction.read(ids) == {}
            sizes.append(resident())
        assert max(sizes) < max(sizes[:30]) + 20


def test_a_foreign_database_is_refused(tmp_path):
    with sqlite3.connect(tmp_path / "other.db") as database:
        database.execute("CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT)")
        database.execute("INSERT INTO meta VALUES ('colour', 'red')")
    with pytest.raises(StoreError, match="not a store of states"):
        ss.StateStore(tmp_path / "other.db", make())


def test_ids_are_text(store):
    """A number was looked up under one key and written under another: elements were lost."""
    store.update("7", torch.randn(3, 3))
    state = store.get("7")
    for id in (7, b"7", None, 7.0, ("7",)):
        for use in (
            lambda id: store.update(id, torch.randn(2, 3)),
            lambda id: store.remove(id, torch.randn(1, 3)),
            lambda id: store.merge(id, "7"),
            lambda id: store.merge("8", id) if not isinstance(id, ss.State) else None,
            lambda id: store.fill([(id, state)]),
            lambda id: store.decay(id, 0.5),
            store.get,
            store.get_bytes,
            store.describe,
            store.predict,
            store.delete,
            store.count,
            lambda id: store.counts(after=id),
            store.__contains__,
        ):
            with pytest.raises(ConfigurationError, match="the id of a set is a str"):
                use(id)
    with pytest.raises(ConfigurationError, match="surrogate"):
        store.update("\ud800", torch.randn(2, 3))
    assert store.ids() == ["7"]
    assert store.count("7") == 3


def test_a_set_is_not_merged_into_itself(store):
    store.update("a", torch.randn(3, 3))
    with pytest.raises(ConfigurationError, match="merged into itself"):
        store.merge("a", "a")
    assert store.count("a") == 3


def deepsets(pool="mean"):
    torch.manual_seed(0)
    encoder = ss.SetEncoder(nn.Linear(2, 8), ss.DeepSets(pool))
    return ss.SetModel(encoder, nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 1))).eval()


@pytest.mark.parametrize("pool", ["umbc", "mean", "sum", "max"])
def test_what_the_model_cannot_read_is_not_committed(tmp_path, pool):
    """Elements that make every later answer NaN are refused, alone, in their set and among others in one transaction."""
    model = deepsets(pool) if pool != "umbc" else deepsets()
    if pool == "umbc":
        model.encoder.pool = ss.UMBC(8, 4, norm_after=True).eval()
    with ss.StateStore(tmp_path / "s.db", model) as store:
        good, bad = torch.randn(4, 2), torch.tensor([[1e20, 1e20]])
        with pytest.raises(NonFiniteError, match="too large"):
            store.update("a", bad)
        store.update("a", good)
        with pytest.raises(NonFiniteError, match="too large"):
            store.update("a", bad)
        encode = torch.no_grad()(lambda x: model.encoder.update(None, [x]))
        parts = [encode(x) for x in (good, bad, good, bad, good)]
        done = store.apply([Change(id, part) for id, part in zip("abaab", parts, strict=True)])
        assert [getattr(own, "count", type(own)) for own in done] == [8, NonFiniteError, 12, NonFiniteError, 4]
        assert store.count("a") == 12
        for id in "ab":
            assert torch.isfinite(store.predict(id)).all()
            torch.testing.assert_close(
                store.predict(id), model(good.repeat(store.count(id) // 4, 1)[None]), rtol=1e-4, atol=1e-5
            )


def test_an_empty_set_of_a_model_without_widths_can_be_read(tmp_path):
    """DeepSets does not know its width before it has seen an element; phi does."""
    with ss.StateStore(tmp_path / "s.db", deepsets()) as store:
        store.update("none", torch.empty(0, 2))
        assert store.predict("none").shape == (1, 1)


def test_damaged_files_and_folders_are_told_so(tmp_path):
    with pytest.raises(StoreError, match="is a folder"):
        ss.StateStore(tmp_path, make())
    (tmp_path / "file").write_text("x")
    with pytest.raises(StoreError, match="folder does not exist"):
        ss.StateStore(tmp_path / "file" / "s.db", make())
    path = tmp_path / "s.db"
    with ss.StateStore(path, make()) as store:
        for number in range(50):
            store.update(str(number), torch.randn(5, 3))
    whole = path.read_bytes()
    rng = random.Random(0)
    seen = set()
    for round in range(60):
        data = bytearray(whole)
        if round % 3 == 0:
            data = data[: rng.randrange(1, len(data))]
        for _ in range(rng.choice([0, 5, 500])):
            data[rng.randrange(len(data))] = rng.randrange(256)
        if round % 3 == 1:
            page = 4096 * rng.randrange(len(data) // 4096)
            data[page : page + 4096] = bytes(4096)  # a page of a file of 0.1, or a quarter of one
        path.write_bytes(data)
        for side in ("-wal", "-shm"):
            path.with_name(path.name + side).unlink(missing_ok=True)
        try:
            with ss.StateStore(path, make(), wait=1.0) as store:
                for use in (store.ids, lambda: store.predict("7"), lambda: store.update("7", torch.ones(1, 3)), store.counts):
                    try:
                        use()
                    except ss.errors.SetstreamError as error:  # never sqlite3.Error, KeyError, ...
                        seen.add(type(error).__name__)
        except ss.errors.SetstreamError as error:
            seen.add(type(error).__name__)
    assert "StoreError" in seen


def test_a_fork_while_the_cache_is_locked_leaves_the_child_free(store):
    """A lock that another thread held at the fork would be locked in the child for ever."""
    store.update("a", torch.ones(1, 3))
    holding, go = threading.Event(), threading.Event()

    def hold():
        with store.rows.cache_lock:
            holding.set()
            go.wait(5)

    thread = threading.Thread(target=hold)
    thread.start()
    holding.wait(5)
    threading.Timer(0.2, go.set).start()
    child = os.fork()
    if child == 0:
        try:
            free = store.rows.cache_lock.acquire(timeout=5)
            os._exit(0 if free else 1)
        finally:
            os._exit(2)
    _, status = os.waitpid(child, 0)
    thread.join()
    assert os.waitstatus_to_exitcode(status) == 0
    assert store.update("a", torch.ones(1, 3)) == 2


@pytest.mark.parametrize("size", [1e19, 1e20, 1e30])
def test_large_elements_are_refused_or_can_be_read(tmp_path, size):
    """The estimate of their rounding error overflowed: such a set was written and never read again."""
    torch.manual_seed(0)
    model = ss.SetModel(ss.SetEncoder(nn.Linear(2, 8), ss.UMBC(8, num_slots=2)), nn.Linear(8, 1)).eval()
    with ss.StateStore(tmp_path / "states.db", model) as store:
        store.update("a", torch.randn(50, 2))
        with contextlib.suppress(ss.errors.SetstreamError):
            store.update("a", torch.full((1, 2), size))
        assert bool(torch.isfinite(store.predict("a")).all())
        assert store.update("a", torch.randn(5, 2)) in (55, 56)
        assert bool(torch.isfinite(store.predict("a")).all())


def test_sets_of_another_width_are_not_broadcast():
    for pool in ("mean", "max"):
        encoder = ss.SetEncoder(nn.Identity(), ss.DeepSets(pool)).eval()
        narrow = encoder.update(None, torch.full((1, 5, 1), 7.0))
        with pytest.raises(ss.errors.MismatchError, match="takes elements of width"):
            encoder.update(narrow, torch.ones(1, 5, 3))
        empty = encoder.empty(1)
        assert encoder.finalize(encoder.update(empty, torch.ones(1, 5, 3))).tolist() == [[1.0, 1.0, 1.0]]


class Exponential(nn.Module):
    """A head whose output overflows for large z and is fine for small z of any size."""

    def forward(self, z):
        return z.exp()


def exponential(pool="mean"):
    return ss.SetModel(ss.SetEncoder(nn.Identity(), ss.DeepSets(pool)), Exponential()).eval()


@pytest.fixture
def overflowing(tmp_path):
    with ss.StateStore(tmp_path / "s.db", exponential()) as opened:
        yield opened


def encoded(store, *rows):
    with torch.no_grad():
        return store.encoder.update(None, [torch.tensor(rows)])


def test_the_head_reads_every_state_before_it_is_committed(overflowing):
    """A large z that the head can read says nothing about a smaller one."""
    assert overflowing.update("a", torch.tensor([[-100.0]])) == 1
    for change in (
        lambda: overflowing.update("a", torch.tensor([[90.0]])),
        lambda: overflowing.merge("a", encoded(overflowing, [90.0])),
        lambda: overflowing.merge("new", encoded(overflowing, [90.0])),
        lambda: overflowing.fill([("a", encoded(overflowing, [1.0])), ("b", encoded(overflowing, [90.0]))]),
    ):
        with pytest.raises(NonFiniteError, match="too large"):
            change()
    assert overflowing.counts() == [("a", 1)]
    assert float(overflowing.predict("a")) < 1e-40


def test_a_removal_that_leaves_what_the_head_cannot_read_is_refused(tmp_path):
    with ss.StateStore(tmp_path / "s.db", exponential("sum")) as store:
        store.update("a", torch.tensor([[60.0], [-60.0]]))
        store.update("a", torch.tensor([[60.0]]))
        with pytest.raises(NonFiniteError, match="too large"):
            store.remove("a", torch.tensor([[-60.0]]))
        assert store.count("a") == 3


def test_sums_that_only_together_are_too_large_are_refused_at_the_step_that_overflows(tmp_path):
    with ss.StateStore(tmp_path / "s.db", exponential("sum")) as store:
        changes = [Change(name, encoded(store, [60.0])) for name in "aabab"] + [Change("c", encoded(store, [1.0]))]
        results = store.apply(changes)
        assert [getattr(result, "count", None) for result in results] == [1, None, 1, None, None, 1]
        assert {type(result) for result in results if not hasattr(result, "count")} == {NonFiniteError}
        assert store.counts() == [("a", 1), ("b", 1), ("c", 1)]


@pytest.mark.parametrize("output", [tuple, dict, list])
def test_every_tensor_of_a_prediction_is_checked(tmp_path, output):
    class Several(nn.Module):
        def forward(self, z):
            return {"z": z, "exp": z.exp()} if output is dict else output([z, z.exp()])

    model = ss.SetModel(ss.SetEncoder(nn.Identity(), ss.DeepSets()), Several()).eval()
    with ss.StateStore(tmp_path / "s.db", model) as store:
        store.update("a", torch.tensor([[-100.0]]))
        with pytest.raises(NonFiniteError, match="too large"):
            store.update("a", torch.tensor([[300.0]]))


def test_fill_names_what_it_leaves_out(overflowing):
    states = [(f"s{number:03}", encoded(overflowing, [90.0 if number in (7, 280) else 1.0])) for number in range(300)]
    with pytest.raises(NonFiniteError, match="set 's007'"):
        overflowing.fill(states)
    assert len(overflowing) == 0
    skipped = {}
    overflowing.fill(states, skipped.__setitem__)
    assert list(skipped) == ["s007", "s280"]
    assert "too large" in skipped["s280"]
    assert len(overflowing) == 298


def test_few_bad_changes_among_many_cost_few_calls_of_the_head(overflowing):
    calls = []
    overflowing.model.head.register_forward_hook(lambda *_: calls.append(1))
    parts = [encoded(overflowing, [90.0 if number == 100 else 1.0]) for number in range(256)]
    results = overflowing.apply([Change(f"s{number}", part) for number, part in enumerate(parts)])
    assert [number for number, result in enumerate(results) if isinstance(result, NonFiniteError)] == [100]
    assert len(calls) < 30
    calls.clear()
    overflowing.apply([Change(f"s{number}", part) for number, part in enumerate(parts[:100])])
    assert len(calls) == 1


def test_forget_is_the_former_name_of_delete(store):
    store.update("a", torch.randn(2, 3))
    with pytest.warns(DeprecationWarning, match=r"delete\(id\)"):
        assert store.forget("a")
    assert "a" not in store


def test_a_round_is_the_same_as_its_changes_one_by_one(tmp_path):
    """Sums of different sets are made together, but in the order of the changes."""
    model = make()
    encode = torch.no_grad()(lambda n: model.encoder.update(None, [torch.randn(n, 3)]))
    torch.manual_seed(0)
    before = [Change(id, encode(4)) for id in "abcd"]
    rounds = [before, [Change("a", encode(1)), Change("b", encode(2)), Change("a", encode(3)), Change("c", "a")]]
    rounds += [[Change("a", encode(1)), Change("a", encode(5), replace=True), Change("b", "a"), Change("d", "new")]]
    rounds += [[Change("new", encode(1)), Change("d", "new"), Change("new", encode(2)), Change("d", encode(1))]]
    with ss.StateStore(tmp_path / "one.db", model) as one, ss.StateStore(tmp_path / "many.db", model) as many:
        for changes in rounds:
            together = many.apply(changes)
            alone = [one.apply([change])[0] for change in changes]
            assert list(map(str, together)) == [str(result).replace("one.db", "many.db") for result in alone]
        assert many.counts() == one.counts() == [("a", 5), ("b", 11), ("c", 12), ("d", 6), ("new", 3)]
        for id in many.ids():
            assert many.get_bytes(id) == one.get_bytes(id)


def test_two_stores_on_one_file_see_each_others_commits(tmp_path):
    """What a store keeps parsed is compared with the row."""
    x = torch.randn(30, 3)
    with ss.StateStore(tmp_path / "s.db", make()) as one, ss.StateStore(tmp_path / "s.db", make()) as other:
        for turn, piece in enumerate(x.split(5)):
            (one, other)[turn % 2].update("a", piece)
            expected = make()(x[None, : 5 * turn + 5])
            for store in (one, other, one):
                torch.testing.assert_close(store.predict("a"), expected, rtol=1e-4, atol=1e-5)
        other.delete("a")
        with pytest.raises(StoreError, match="no set 'a'"):
            one.predict("a")
        assert one.update("a", x[:2]) == 2
        torch.testing.assert_close(other.predict("a"), make()(x[None, :2]), rtol=1e-4, atol=1e-5)


def test_a_small_cache_changes_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr("setstream.stores.cache.CACHE_BYTES", 2000)
    x = torch.randn(8, 5, 3)
    with ss.StateStore(tmp_path / "s.db", make()) as store:
        for piece in x.split(1, dim=1):
            store.apply([Change(str(id), state) for id, state in enumerate(make().encoder.update(None, piece).detach())])
        for id in range(8):
            torch.testing.assert_close(store.predict(str(id)), make()(x[id : id + 1]), rtol=1e-4, atol=1e-5)
