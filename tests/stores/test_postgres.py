"""A store in PostgreSQL: a real one, started for the test, shared by two servers."""

import contextlib
import os
import pwd
import random
import shutil
import socket
import subprocess
import tempfile
import threading
import time
from pathlib import Path

import httpx
import pytest
import torch

import setstream as ss
from setstream.errors import CursorError, KeyReusedError, MismatchError, StoreError, UnknownSetError
from setstream.stores.store import Change, Changed, Cursor
from tests.serve.conftest import listening, make
from tests.serve.test_process import appending
from tests.stores import test_consume, test_ledger, test_tiles


def find_binaries():
    """Where initdb and pg_ctl lie: on the path, or where Debian puts them."""
    places = sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)
    return next((place for place in places if (place / "initdb").exists()), None) or (
        Path(shutil.which("initdb")).parent if shutil.which("initdb") else None
    )


BINARIES = find_binaries()
pytestmark = pytest.mark.skipif(BINARIES is None, reason="there is no PostgreSQL here: apt-get install postgresql")


def _as_nobody():
    """PostgreSQL refuses to run as root: its own user, or any that is not root."""
    if os.getuid() != 0:
        return {}
    names = [entry.pw_name for entry in pwd.getpwall()]
    user = pwd.getpwnam(next(name for name in ("postgres", "nobody") if name in names))
    return {"user": user.pw_uid, "group": user.pw_gid, "extra_groups": []}


@pytest.fixture(scope="module")
def database():
    """The URL of a cluster of its own, in a temporary folder, on a free port."""
    identity = _as_nobody()
    folder = Path(tempfile.mkdtemp(prefix="setstream-postgres-"))
    if identity:
        os.chown(folder, identity["user"], identity["group"])
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    data = folder / "data"

    def call(*command):
        # The output goes to a file: a server that is left behind would keep a pipe open.
        with (folder / "log.txt").open("ab") as log:
            done = subprocess.run(list(map(str, command)), stdout=log, stderr=log, cwd=folder, timeout=120, **identity)
        assert done.returncode == 0, (folder / "log.txt").read_text()

    call(
        BINARIES / "initdb", "-D", data, "-U", "setstream", "--auth", "trust", "-E", "UTF8", "--no-sync", "--locale", "C.UTF-8"
    )
    options = f"-p {port} -c listen_addresses=127.0.0.1 -c unix_socket_directories= -c max_connections=50"
    call(BINARIES / "pg_ctl", "-D", data, "-w", "-o", options, "start")
    try:
        yield f"postgresql://setstream@127.0.0.1:{port}/postgres"
    finally:
        call(BINARIES / "pg_ctl", "-D", data, "-m", "immediate", "stop")
        shutil.rmtree(folder)


@pytest.fixture
def place(database):
    """The database, without tables."""
    import psycopg

    yield database
    with psycopg.connect(database, autocommit=True) as connection:
        tables = ", ".join(f"setstream_{name}" for name in ("states", "meta", "tiles", "keys", "cursors"))
        connection.execute(f"DROP TABLE IF EXISTS {tables}")


def test_a_store_in_postgres_does_what_one_in_sqlite_does(place, tmp_path):
    torch.manual_seed(3)
    x, y = torch.randn(20, 3), torch.randn(30, 3)
    seen = []
    for where in (place, tmp_path / "s.db"):
        with ss.StateStore(where, make()) as store:
            steps = [store.update("a", x), store.update("b", y), store.update("Ä", x[:1]), store.merge("a", "b")]
            steps += [store.remove("a", x), store.ids(), store.counts("a", 1), store.count("z"), len(store), "b" in store]
            store.decay("b", 0.5)
            steps += [store.delete("b"), store.delete("b"), store.describe("a"), store.get_bytes("a")]
            with pytest.raises(UnknownSetError, match="no set 'z'"):
                store.predict("z")
            with pytest.raises(UnknownSetError, match="no set 'z'"):
                store.merge("a", "z")
            store.fill([("c", store.get("a"))])
            steps.append(store.count("c"))
            seen.append(steps)
    assert seen[0] == seen[1]


def test_tiles_in_postgres(place):
    hour, day = test_tiles.HOUR, test_tiles.DAY
    with ss.StateStore(place, test_tiles.make()) as store:
        store.update("a", torch.ones(2, 3))
    with ss.StateStore(place, test_tiles.make(), tile=hour, retention={hour: 7 * day, day: 60 * day}) as store:
        expected = test_tiles.fill(store, hours=100 * 24)
        expected.add("a", torch.ones(2, 3), [None, None])
        for since, until in ((0, 90), (3, 4), (None, 50), (50, None), (None, None)):
            expected.check(store, "a", *(None if end is None else end * day + 1800 for end in (since, until)))
        store.merge("b", "a")
        expected.add("b", *zip(*expected.sets["a"], strict=True))
        store.expire(100 * day)
        store.remove("a", since=95 * day, until=96 * day)
        expected.keep("a", lambda t: t is None or not 95 * day <= t < 96 * day)
        for id in "ab":
            expected.keep(id, lambda t: t is None or t >= 40 * day)
            expected.check(store, id)
            expected.check(store, id, since=94 * day + 1800, until=99 * day)
            expected.check(store, id, since=50 * day + 1800, until=60 * day, tile=day)
        assert store.delete("a")
        assert store.update("a", torch.ones(1, 3), time=100 * day) == 1
        assert int(store.get("a", since=0).count) == 1


def test_keys_and_positions_in_postgres(place):
    """Four clients of two servers send the same updates; two consumers read the same partition."""
    x, stores = torch.randn(20, 3), [ss.StateStore(place, make()) for _ in range(2)]
    part = stores[0].encoder.update(None, x[None, :1]).detach()

    def send(seed):
        for number in random.Random(seed).sample(range(20), 20):
            stores[seed % 2].update("a", x[number : number + 1], key=str(number))

    def consume(seed):
        store = stores[seed % 2]
        while (after := store.position("events", "0") or 0) < 20:
            with contextlib.suppress(CursorError):
                store.apply([Change("b", part)], cursor=Cursor("events", "0", after + 1, after or None))

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4) for work in (send, consume)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (stores[0].count("a"), stores[0].count("b")) == (20, 20)
    with pytest.raises(KeyReusedError):
        stores[1].update("a", x[:2], key="7")
    stores[0].expire(time.time() + 8 * 86_400)
    assert stores[1].rows.query("SELECT COUNT(*) FROM setstream_keys") == [(0,)]
    for store in stores:
        store.close()


SOME_KILLS = pytest.mark.parametrize("kills", [4, pytest.param(200, marks=pytest.mark.slow)])


@SOME_KILLS
@pytest.mark.parametrize("way", ["keys", "cursor"])
def test_killed_at_any_line_and_repeated_nothing_is_missing_or_doubled(place, tmp_path, kills, way):
    test_ledger.check_kills(place, tmp_path / "answered", kills, way)


@SOME_KILLS
def test_a_consumer_that_is_killed_at_any_line_loses_and_doubles_nothing(place, tmp_path, kills):
    test_consume.check_kills(place, tmp_path, kills)


def test_it_knows_its_model_and_says_what_is_wrong(place):
    with ss.StateStore(place, make()) as store:
        store.update("a", torch.ones(2, 3))
    with ss.StateStore(place, make()) as store:
        assert store.count("a") == 2
    with pytest.raises(MismatchError, match="another encoder"):
        ss.StateStore(place, make(seed=1))
    secret = place.replace("setstream@", "setstream:secret@").replace("/postgres", "/nothing")
    with pytest.raises(StoreError, match="nothing") as error:
        ss.StateStore(secret, make(), wait=2)
    assert "secret" not in str(error.value)


def test_two_stores_that_update_the_same_sets_at_once_lose_nothing(place):
    """Groups of sets in opposite orders: without an order of locks they would wait in a circle."""
    stores = [ss.StateStore(place, make()) for _ in range(2)]
    part = make().encoder.update(None, torch.ones(1, 1, 3))
    ids = [f"s{number}" for number in range(8)]

    def work(store, order):
        for _ in range(5):
            done = store.apply([Change(id, part) for id in order])
            assert all(isinstance(own, Changed) for own in done)

    threads = [threading.Thread(target=work, args=(stores[k % 2], ids if k < 2 else ids[::-1])) for k in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {stores[0].count(id) for id in ids} == {20}
    for store in stores:
        store.close()


def test_two_servers_share_one_database(place):
    with listening(place) as (_, one), listening(place) as (_, two):
        urls = [f"http://127.0.0.1:{port}" for port in (one, two)]
        stop, noted = threading.Event(), [{} for _ in range(4)]
        threads = [threading.Thread(target=appending, args=(urls[k % 2], ["a", "b"], stop, noted[k])) for k in range(4)]
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads) and any(counts.get("b", 0) < 3 for counts in noted):
            time.sleep(0.02)
        stop.set()
        for thread in threads:
            thread.join(30)
        for id in ("a", "b"):
            answered = sum(own[id] for own in noted)
            assert answered > 3
            assert [httpx.get(f"{url}/sets/{id}").json()["count"] for url in urls] == [answered, answered]
