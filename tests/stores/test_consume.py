"""Events from lines and from a real Redis into a store, each once: kills, redelivery, dead letters, lost events."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from contextlib import contextmanager

import pytest
import torch

import setstream as ss
from setstream.errors import ConfigurationError, CursorError, DataError
from setstream.stores.consume import Consumer
from setstream.stores.events import Fields
from setstream.stores.sources import Lines, RedisStream
from tests.kills import kill_after
from tests.serve.conftest import make

BAD = ["{", "[1]", '{"id": "s1"}', '{"id": "s1", "element": [1, 2]}', '{"id": null, "element": [1, 2, 3]}', "7"]
BAD += ['{"id": "s1", "element": [1e39, 1, 1]}', '{"id": "s1", "element": ["1", 2, 3]}', '{"id": "s1", "elements": 3}']
BAD += ['{"id": "s1", "element": [1, 2, 3], "time": "now"}', '{"id": "s1", "elements": [[1, 2, 3], [1]]}']


def write_events(count, seed=0):
    """Lines about seven sets over 200 s, some of them bad; what a clean pass gives; and the positions of the bad ones."""
    rng, lines, sets, bad = random.Random(seed), [], {}, []
    for number in range(count):
        if rng.random() < 0.1:
            lines.append(rng.choice(BAD))
            bad.append(number)
            continue
        id, seconds = f"s{rng.randrange(7)}", rng.randrange(200)
        elements = [[rng.gauss(0, 1) for _ in range(3)] for _ in range(rng.choice((1, 1, 3)))]
        shape = {"element": elements[0]} if len(elements) == 1 else {"elements": elements}
        lines.append(json.dumps({"id": id, "time": seconds, **shape}))
        sets.setdefault(id, []).extend((seconds, element) for element in elements)
    return lines, sets, bad


def check(store, sets):
    """Counts are exact, and predictions those of one pass, also over a range."""
    assert dict(store.counts()) == {id: len(seen) for id, seen in sets.items()}
    for id, seen in sets.items():
        early = [element for seconds, element in seen if seconds < 100]
        torch.testing.assert_close(store.predict(id), make()(torch.tensor([[x for _, x in seen]])), rtol=1e-4, atol=1e-5)
        assert int(store.get(id, until=100).count) == len(early)
        torch.testing.assert_close(store.predict(id, until=100), make()(torch.tensor([early])), rtol=1e-4, atol=1e-5)


def letters(path):
    """The positions in a file of dead letters, where lines may be cut by a kill, and repeated."""
    found = set()
    for line in path.read_text().splitlines():
        try:
            found.add(json.loads(line)["position"])
        except ValueError:
            assert not line.endswith("}")
    return found


@contextmanager
def opened(path, text=None, **options):
    if text is not None:
        path.write_text(text)
    file = os.open(path, os.O_RDONLY)
    try:
        yield Lines(file, **options)
    finally:
        os.close(file)


def test_fields_of_events():
    event = Fields().parse(b'{"id": 7, "element": [1, 2.5], "more": {}}')
    assert (event.id, event.elements.tolist(), event.time) == ("7", [[1, 2.5]], None)
    assert Fields().parse('{"id": "a", "elements": [], "time": 5}').elements.shape == (0,)
    assert Fields().parse('{"id": "a", "element": 3}').elements.tolist() == [3]
    named = Fields("user", ("amount", "hour"), "at")
    event = named.parse('{"user": "b", "amount": 1, "hour": 2, "at": 1.5}')
    assert (event.id, event.elements.tolist(), event.time) == ("b", [[1, 2]], 1.5)
    for line, problem in (
        ('{"user": "b", "amount": 1, "at": 0}', "no field 'hour'"),
        ('{"user": "b", "amount": 1, "hour": 2}', "time must be a number"),
        ('{"user": "b", "amount": null, "hour": 2, "at": 0}', "lists of numbers"),
        ('{"user": true, "amount": 1, "hour": 2, "at": 0}', "'user' must be text"),
    ):
        with pytest.raises(DataError, match=problem):
            named.parse(line)
    with pytest.raises(DataError, match="got 'tiem'"):
        Fields(others=False).parse('{"id": "a", "element": [1], "tiem": 3}')


def test_a_file_that_grows_is_consumed_once(tmp_path):
    lines, sets, bad = write_events(300)
    text = "\n".join(lines)
    with ss.StateStore(tmp_path / "s.db", make(), tile=10) as store:
        for end in (0, 1000, len(text) // 2, len(text)):
            complete = text[: text.rfind("\n", 0, end) + 1] if end < len(text) else text  # the last line has no newline
            with opened(tmp_path / "log", complete, name="log") as source:
                consumer = Consumer(store, source, batch=50, dead_letters=tmp_path / "dead")
                consumer.run()
                assert consumer.messages + source.skipped == len(complete.splitlines())
        assert store.position("log") == 300
        check(store, sets)
        assert letters(tmp_path / "dead") == {number + 1 for number in bad}
        with (
            opened(tmp_path / "log", "\n".join(lines[:200]) + "\n", name="log") as source,
            pytest.raises(CursorError, match="200"),
        ):
            Consumer(store, source).run()
        with (
            opened(tmp_path / "log", text + '\n{"id": "s1", "ele', name="log") as source,
            pytest.raises(DataError, match="middle"),
        ):
            Consumer(store, source).run()
        check(store, sets)


def test_without_dead_letters_a_bad_line_is_an_error_and_nothing_is_passed(tmp_path):
    with ss.StateStore(tmp_path / "s.db", make()) as store:
        with opened(tmp_path / "log", '{"id": "a", "element": [1, 2, 3]}\n{\n', name="log") as source:
            with pytest.raises(DataError, match="message at 2 of 'log' cannot be added: the line is not valid JSON"):
                Consumer(store, source).run()
            assert store.position("log") is None
            assert len(store) == 0
        for _ in range(2):  # without a name, all lines are new
            with opened(tmp_path / "log", '{"id": "a", "element": [1, 2, 3]}\n\n{"id": "a", "element": [1.5, 2, 3]}') as source:
                Consumer(store, source).run()
        assert store.count("a") == 4
        with pytest.raises(ConfigurationError, match="store with tiles"):
            Consumer(store, Lines(0), fields=Fields(time="at"))


def test_offsets_may_be_delivered_again_but_not_be_missing(tmp_path):
    def text(*offsets):
        return "".join(f'{offset}\t{{"id": "a", "element": [{offset}, 1, 1]}}\n' for offset in offsets)

    with ss.StateStore(tmp_path / "s.db", make()) as store:
        for offsets, count in ((range(5, 9), 4), ((7, 8, 9, 9, 8, 12), 6), ((12, 12, 15), 7)):
            with opened(tmp_path / "log", text(*offsets), name="t", partition="0", offsets=True) as source:
                Consumer(store, source, batch=2).run()
            assert (store.count("a"), store.position("t", "0")) == (count, offsets[-1])
        for broken, error in ((text(17), CursorError), ("x\t{}\n", DataError), ("{}\n", DataError)):
            with opened(tmp_path / "log", broken, name="t", partition="0", offsets=True) as source, pytest.raises(error):
                Consumer(store, source).run()
        assert store.count("a") == 7


def check_kills(place, tmp_path, kills):
    """A consumer of a file, parts of which are delivered again, is killed at any line."""
    lines, sets, bad = write_events(100 + 25 * kills)
    rng = random.Random(5)
    with ss.StateStore(place, make(), tile=10):
        pass

    def consume(tick=lambda: None):
        with ss.StateStore(place, make()) as store:
            position = store.position("t")
            first = max(0, (0 if position is None else position) - rng.randrange(30))
            again = [number for number in range(first, len(lines)) for number in ([number] * rng.choice((1, 1, 2)))]
            text = "".join(f"{number}\t{lines[number]}\n" for number in again)
            with opened(tmp_path / f"log-{os.getpid()}", text, name="t", offsets=True) as source:
                consumer = Consumer(store, source, batch=5, dead_letters=tmp_path / "dead")
                source.read, read = lambda most, wait: one_by_one(source, read, most), source.read
                tick()
                while consumer.step():
                    tick()

    held = []

    def one_by_one(source, read, most):
        """Small batches: a file gives all its lines at once."""
        if not held:
            messages = read(most, 0)
            if messages is None:
                return None
            held.extend(messages)
        some = held[:most]
        del held[:most]
        return some

    killed = sum(kill_after(consume, ticks=rng.randrange(5), lines=rng.randrange(1500)) for _ in range(kills))
    assert killed == kills
    consume()
    with ss.StateStore(place, make()) as store:
        check(store, sets)
    assert letters(tmp_path / "dead") == set(bad)


@pytest.mark.parametrize("kills", [12, pytest.param(200, marks=pytest.mark.slow)])
def test_killed_at_any_line_with_redelivery_from_a_file(tmp_path, kills):
    check_kills(tmp_path / "s.db", tmp_path, kills)


@pytest.fixture(scope="module")
def redis_url(tmp_path_factory):
    """The URL of a Redis of its own, at a socket in a temporary folder."""
    redis = pytest.importorskip("redis")
    if shutil.which("redis-server") is None:
        pytest.skip("there is no Redis here: apt-get install redis-server")
    folder = tmp_path_factory.mktemp("redis")
    options = ["--port", "0", "--unixsocket", str(folder / "socket"), "--save", "", "--dir", str(folder)]
    process = subprocess.Popen(["redis-server", *options], stdout=subprocess.DEVNULL)
    url = f"unix://{folder / 'socket'}"
    try:
        for _ in range(600):
            if (folder / "socket").exists() and redis.Redis.from_url(url).ping():
                break
            time.sleep(0.05)
        yield url
    finally:
        process.kill()
        process.wait()


@pytest.fixture
def client(redis_url):
    with sys.modules["redis"].Redis.from_url(redis_url) as connected:
        yield connected
        connected.flushall()


def add(client, lines, stream="events"):
    with client.pipeline() as commands:
        for line in lines:
            commands.xadd(stream, {"event": line})
        return [id.decode() for id in commands.execute()]


@pytest.mark.parametrize("kills", [12, pytest.param(200, marks=pytest.mark.slow)])
def test_redis_consumers_that_are_killed_lose_and_double_nothing(tmp_path, client, redis_url, kills):
    """Two consumers of one group, in turn; some entries arrive between kills, all are acknowledged in the end."""
    lines, sets, bad = write_events(100 + 25 * kills)
    path, rng = tmp_path / "s.db", random.Random(6)
    ids = add(client, lines[: len(lines) // 2])
    with ss.StateStore(path, make(), tile=10):
        pass

    def consume(name, tick=lambda: None, until=lambda source: False, batch=5):
        with ss.StateStore(path, make()) as store:
            source = RedisStream(redis_url, "events", consumer=name)
            consumer = Consumer(store, source, batch=batch, wait=0.01, dead_letters=tmp_path / "dead")
            tick()
            while consumer.step() and not until(source):
                tick()

    killed = 0
    for turn in range(kills):
        ids += add(client, lines[len(ids) : len(ids) + len(lines) // 2 // kills + 1])
        name = str(turn % 2)
        killed += kill_after(lambda tick, name=name: consume(name, tick), rng.randrange(5), rng.randrange(1500))
    assert killed == kills
    ids += add(client, lines[len(ids) :])
    for name in "01":
        consume(name, until=lambda source: source.lag() == 0, batch=500)
    assert client.xpending("events", "setstream")["pending"] == 0
    with ss.StateStore(path, make()) as store:
        check(store, sets)
        assert set(store.positions("redis events setstream")) == {"0", "1"}
    assert letters(tmp_path / "dead") == {ids[number] for number in bad}


GOOD = '{"id": "a", "element": [1, 2, 3]}'


def test_two_redis_consumers_of_one_name(tmp_path, client, redis_url):
    """One of them is refused; what was delivered to it is committed by the other."""
    add(client, [GOOD] * 20)
    with ss.StateStore(tmp_path / "s.db", make()) as store:
        one, two = (Consumer(store, RedisStream(redis_url, "events"), batch=5, wait=0) for _ in range(2))
        delivered = two.source.read(5, 0)
        assert one.step()
        assert one.messages == 5 == len(delivered)
        two.source.read = lambda most, wait: delivered
        with pytest.raises(CursorError, match="another consumer"):
            two.step()
        while one.messages < 20:
            one.step()
        assert (store.count("a"), one.source.lag()) == (20, 0)
        assert client.xpending("events", "setstream")["pending"] == 0


def test_lost_redis_entries_are_an_error(tmp_path, client, redis_url):
    def consumer(store, name="0"):
        return Consumer(store, RedisStream(redis_url, "events", consumer=name), batch=5, wait=0)

    add(client, [GOOD] * 20)
    client.xtrim("events", 15, approximate=False)
    with ss.StateStore(tmp_path / "s.db", make()) as store:
        first = consumer(store)  # what was removed before is not missed
        first.step()
        assert store.count("a") == 5
        client.xtrim("events", 8, approximate=False)
        for attempt in (first.step, lambda: consumer(store), lambda: consumer(store, "1")):
            with pytest.raises(CursorError, match="were removed from the stream before they were read") as raised:
                attempt()
        client.execute_command(*str(raised.value).rpartition(": ")[2].split())  # as the message says
        first = consumer(store)
        first.source.read(3, 0)
        client.xtrim("events", 6, approximate=False)
        with pytest.raises(CursorError, match="was removed from the stream before it was in the store"):
            consumer(store).step()
        client.xgroup_destroy("events", "setstream")
        for name in "01":
            with pytest.raises(CursorError, match="XGROUP CREATE"):
                consumer(store, name)
        client.flushall()
        client.xadd("events", {"event": GOOD}, id="1-1")
        client.xgroup_create("events", "setstream", "0")
        with pytest.raises(CursorError, match="is it another one"):
            consumer(store)
        assert store.count("a") == 5
        with pytest.raises(DataError, match="does not answer"):
            Consumer(store, RedisStream("redis://127.0.0.1:1/0", "events"))


def test_the_command_stops_at_a_signal_and_goes_on(tmp_path):
    """SIGTERM while lines are in the pipe: what was read is committed, and the next one skips it."""
    command = [sys.executable, "-m", "setstream.cli", "consume", "tests.serve.conftest:make", "--states", f"{tmp_path}/s.db"]
    command += ["--name", "log", "--set-column", "user", "--columns", "x,y,z", "--time-column", "at", "--tile", "60"]
    lines = [json.dumps({"user": f"s{number % 5}", "x": number, "y": 1, "z": 0.5, "at": number}) for number in range(3000)]
    start, data = ("".join(line + "\n" for line in lines[:count]).encode() for count in (1000, 3000))
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    options = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "env": environment}
    with subprocess.Popen([*command, "--batch", "20"], **options) as process:
        process.stdin.write(start)
        process.stdin.flush()
        with ss.StateStore(tmp_path / "s.db", make(), tile=60) as store:
            while store.position("log") is None:
                assert process.poll() is None, process.stderr.read()
                time.sleep(0.05)
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors
    told = json.loads(errors.splitlines()[-1])
    assert 0 < told["position"] == told["messages"] <= 1000
    done = subprocess.run(command, input=data, capture_output=True, env=environment, timeout=120)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stderr.splitlines()[-1])["messages"] == 3000 - told["messages"]
    with ss.StateStore(tmp_path / "s.db", make()) as store:
        assert dict(store.counts()) == {f"s{number}": 600 for number in range(5)}
        assert int(store.get("s1", since=600, until=660).count) == 12
