"""New weights while the old ones serve (docs/consume.md): each answered append is in the new store, once."""

import json
import subprocess
import threading

import httpx
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from typer.testing import CliRunner

import setstream as ss
from setstream.cli.commands import app
from setstream.stores.consume import Consumer
from setstream.stores.sources import Lines
from tests.serve.conftest import listening, make

HOUR = 3600


def make_new():
    return make(seed=1)


class Log:
    """The file of events that the application writes before it sends them."""

    def __init__(self, path):
        self.path, self._lock = path, threading.Lock()
        self._file = path.open("ab", buffering=0)

    def append(self, event):
        with self._lock:
            self._file.write(json.dumps(event).encode() + b"\n")


def follow(pipe, states, over):
    """`setstream consume` of what arrives in a pipe."""
    with ss.StateStore(states, make_new()) as store:
        Consumer(store, Lines(pipe.fileno(), "log"), wait=0.02).run(over.is_set)


def test_new_weights_take_over_under_load(tmp_path):
    log, answered, stop, over = Log(tmp_path / "log.jsonl"), [], threading.Event(), threading.Event()
    old, new = tmp_path / "old.db", tmp_path / "new.db"
    with ss.StateStore(old, make(), tile=HOUR):
        pass
    with listening(old) as (_, port):

        def send(client):
            """An application: each event goes to the log, then to the server that answers now."""
            generator = torch.Generator().manual_seed(client)
            with httpx.Client(base_url=f"http://127.0.0.1:{port}") as connection:
                number = 0
                while not stop.is_set():
                    event = {"id": f"s{(client + number) % 5}", "element": torch.randn(3, generator=generator).tolist()}
                    event["time"] = number * 400
                    log.append(event)
                    body, key = {"elements": [event["element"]]}, f'"{client}-{number}"'
                    path, seconds = f"/sets/{event['id']}/elements", {"time": event["time"]}
                    answer = connection.post(path, json=body, params=seconds, headers={"Idempotency-Key": key})
                    assert answer.status_code == 200
                    answered.append(event)
                    number += 1

        clients = [threading.Thread(target=send, args=(client,)) for client in range(3)]
        for client in clients:
            client.start()
        try:
            wait_for(lambda: len(answered) >= 60, clients)
            lines = log.path.read_bytes()
            begun = [json.loads(line) for line in lines[: lines.rfind(b"\n") + 1].splitlines()]
            columns = {"id": [event["id"] for event in begun], "time": [event["time"] for event in begun]}
            columns |= {f"x{column}": [event["element"][column] for event in begun] for column in range(3)}
            pq.write_table(pa.table(columns), tmp_path / "events.parquet")
            parquet, out = str(tmp_path / "events.parquet"), str(tmp_path / "out.parquet")
            command = ["encode", "tests.serve.test_new_weights:make_new", parquet, "--states", str(new), "--out", out]
            command += ["--set-column", "id", "--time", "time", "--tile", str(HOUR)]
            done = CliRunner().invoke(app, command)
            assert done.exit_code == 0, done.output
            with ss.StateStore(new, make_new()) as store:
                store.apply([], cursor=("log", "", len(begun)))
            tail = subprocess.Popen(["tail", "-n", "+1", "-f", log.path], stdout=subprocess.PIPE)
            consumer = threading.Thread(target=follow, args=(tail.stdout, new, over))
            consumer.start()
            so_far = len(answered)
            wait_for(lambda: len(answered) >= so_far + 60, clients)  # what only the consumer brings
        finally:
            stop.set()
            for client in clients:
                client.join(30)
        with ss.StateStore(new, make_new()) as store:
            wait_for(lambda: store.position("log") == len(answered), [consumer])
        over.set()
        consumer.join(60)
        tail.kill()
        tail.communicate()
    assert len(begun) < len(answered)
    with ss.StateStore(new, make_new()) as store, ss.StateStore(old, make()) as before:
        assert dict(store.counts()) == dict(before.counts())
        for id in store.ids():
            events = [event for event in answered if event["id"] == id]
            assert store.count(id) == len(events)
            for until in (None, 5 * HOUR):
                x = [event["element"] for event in events if until is None or event["time"] < until]
                assert int(store.get(id, until=until).count) == len(x)
                expected = make_new()(torch.tensor([x]))
                torch.testing.assert_close(store.predict(id, until=until), expected, rtol=1e-4, atol=1e-5)
    with pytest.raises(ss.errors.MismatchError, match="another encoder"):
        ss.StateStore(new, make())


def wait_for(condition, threads):
    while not condition():
        assert all(thread.is_alive() for thread in threads)
        threading.Event().wait(0.01)
