"""Events of many sets in one request, and windows of time over the WebSocket."""

import json
import time
from types import SimpleNamespace

import pytest
import torch

import setstream as ss
from setstream.serve.events import NDJSON
from tests.serve.conftest import make, serving


def post(client, *events, key=None):
    lines = [event if isinstance(event, str) else json.dumps(event) for event in events]
    headers = {"Content-Type": NDJSON} | ({} if key is None else {"Idempotency-Key": f'"{key}"'})
    return client.post("/events", content="\n".join(lines), headers=headers)


@pytest.fixture
def tiled(tmp_path):
    ss.StateStore(tmp_path / "s.db", make(), tile=60).close()
    with serving(tmp_path / "s.db") as client:
        yield client


def test_events_of_many_sets_in_one_request(client):
    x = torch.randn(30, 3)
    events = [{"id": f"s{number % 3}", "element": row} for number, row in enumerate(x.tolist())]
    answer = post(client, *events, "", {"id": "s0", "elements": [[1, 2, 3], [4, 5, 6]]}, {"id": "empty", "elements": []})
    assert (answer.status_code, answer.json()) == (200, {"events": 32, "sets": 4})
    counts = {one["id"]: one["count"] for one in client.get("/sets").json()["sets"]}
    assert counts == {"empty": 0, "s0": 12, "s1": 10, "s2": 10}
    expected = make()(x[None, 1::3])[0].tolist()
    torch.testing.assert_close(client.get("/sets/s1/prediction").json()["prediction"], expected, rtol=1e-4, atol=1e-5)
    assert post(client).json() == {"events": 0, "sets": 0}
    assert "setstream_elements_total 32.0" in client.get("/metrics").text


@pytest.mark.parametrize(
    ("line", "status", "problem"),
    [
        ("{", 422, "line 2: the line is not valid JSON"),
        ('{"id": "../x", "element": [1, 2, 3]}', 422, "line 2: '../x' is not a valid id"),
        ('{"id": "a", "element": [1, 2, 3], "tmie": 3}', 422, "got 'tmie'"),
        ('{"id": "a", "element": [1, 2, 3], "time": 3}', 422, "keeps no times: leave them out, or start it with --tile"),
        ('{"id": "a", "element": [1, 2, 3], "time": 1e999}', 422, "line 2: the time must be"),
        ('{"id": "a", "elements": ' + "[" * 5000 + "]" * 5000 + "}", 422, "line 2: "),
        ('{"id": "a", "elements": [' + "1, " * 1500 + "1]}", 413, "at most 1000 elements"),
    ],
    ids=["json", "id", "field", "no tiles", "time", "deep", "many"],
)
def test_if_a_line_cannot_be_read_nothing_is_added(client, line, status, problem):
    answer = post(client, {"id": "a", "element": [1, 2, 3]}, line)
    assert (answer.status_code, problem in answer.json()["detail"]) == (status, True), answer.json()
    assert client.get("/sets").json()["sets"] == []


def test_a_line_has_a_limit(tmp_path):
    with serving(tmp_path / "s.db") as client:
        answer = post(client, {"id": "a", "element": [1, 2, 3]}, {"id": "a", "element": [1] * 30_000})
        assert (answer.status_code, "line 2: it has" in answer.json()["detail"]) == (413, True)


def test_an_answer_says_what_the_model_refused(client):
    answer = post(client, *[{"id": id, "element": [1, 2, 3]} for id in "ab"], {"id": "c", "element": [1e39, 1, 1]})
    assert answer.status_code == 422
    assert answer.json()["detail"].startswith("line 3 (set 'c'): ")
    assert answer.json()["detail"].endswith("Of 3 events, 2 were added")
    assert client.post("/events", json={}).status_code == 415


def test_a_repeated_request_adds_what_is_missing(tiled):
    now = [{"id": "a", "element": [1, 2, 3]}, {"id": "b", "element": [1, 2, 3]}]
    then = [{"id": "a", "element": [1, 2, 3], "time": seconds} for seconds in (5, 10, 100)]
    for replayed in (None, "true"):
        answer = post(tiled, *now, *then, key="k")
        assert (answer.status_code, answer.json()) == (200, {"events": 5, "sets": 2})
        assert answer.headers.get("Idempotency-Replayed") == replayed
    answer = post(tiled, *now, key="k")
    assert (answer.status_code, "other contents" in answer.json()["detail"]) == (422, True)
    assert tiled.get("/sets/a").json()["count"] == 4
    assert tiled.get("/sets/a/prediction?since=0&until=60").json()["count"] == 2
    refused = [{"id": "b", "element": [1, 2, 3]}, {"id": "c", "element": [1e39, 2, 3]}]
    for _ in range(2):
        assert post(tiled, *refused, key="l").status_code == 422
    assert tiled.get("/sets/b").json()["count"] == 2


def test_a_window_is_watched(tmp_path, monkeypatch):
    clock = SimpleNamespace(time=lambda: now[0], monotonic=time.monotonic)
    now = [1_700_000_000.0]
    monkeypatch.setattr("setstream.serve.service.clock", clock)
    ss.StateStore(tmp_path / "s.db", make(), tile=1).close()
    with serving(tmp_path / "s.db") as client:
        post(client, *[{"id": "a", "element": [1, 2, 3], "time": now[0] - age} for age in (10, 20, 7200)])
        with client.websocket_connect("ws://localhost/sets/a/live?last=3600") as socket:
            assert socket.receive_json()["count"] == 2
            post(client, {"id": "a", "element": [1, 2, 3], "time": now[0]})
            assert socket.receive_json()["count"] == 3
            now[0] += 3595
            assert socket.receive_json()["count"] == 1  # nothing was added: the others are too old now
    with serving(tmp_path / "plain.db") as client, client.websocket_connect("ws://localhost/sets/a/live?last=60") as socket:
        assert "tiles" in socket.receive_json()["detail"]
