"""Requests with a key count once, and times and ranges of a store with tiles, over HTTP."""

import asyncio
import random
import threading
import uuid

import httpx
import numpy as np
import pytest
import torch
from fastapi.testclient import TestClient

import setstream as ss
from setstream.serve import Options, create_app
from tests.serve.conftest import Server, listening, make

HOUR = 3600
X = np.random.default_rng(0).standard_normal((200, 3))


def post(client, id, rows, key=None, path="elements", **more):
    headers = {} if key is None else {"Idempotency-Key": key}
    return client.post(f"/sets/{id}/{path}", json={"elements": rows.tolist()}, headers=headers, **more)


def test_a_repetition_gets_the_first_answer_and_says_so(client):
    first = post(client, "a", X[:5], '"k1"')
    assert (first.json(), "idempotency-replayed" in first.headers) == ({"id": "a", "count": 5}, False)
    post(client, "a", X[5:7])
    again = post(client, "a", X[:5], "k1")  # without quotes it is the same key
    assert (again.status_code, again.json()) == (200, first.json())
    assert again.headers["idempotency-replayed"] == "true"
    other = post(client, "a", X[:4], '"k1"')
    assert other.status_code == 422
    assert "other contents" in other.json()["detail"]
    assert post(client, "b", X[:5], '"k1"').json()["count"] == 5
    state = client.get("/sets/b/state").content
    for _ in range(2):
        assert client.post("/sets/a/merge", json={"from": "b"}, headers={"Idempotency-Key": '"m"'}).json()["count"] == 12
        headers = {"Idempotency-Key": '"s"', "Content-Type": "application/octet-stream"}
        assert client.post("/sets/a/state", content=state, headers=headers).json()["count"] == 17
    assert client.put("/sets/a/state", content=state, headers=headers).status_code == 422  # to replace is another request
    assert client.get("/sets/a").json()["count"] == 17
    assert "setstream_elements_total 12.0" in client.get("/metrics").text


def test_a_request_that_failed_can_be_repeated_with_its_key(client):
    assert post(client, "a", X[:5, :2], '"k"').status_code == 422
    assert post(client, "a", X[:5], '"k"').json()["count"] == 5


@pytest.mark.parametrize("key", ["", '""', "x" * 256, '"a"b"', "tab\there"])
def test_invalid_keys_are_400(client, key):
    answer = post(client, "a", X[:1], key)
    assert answer.status_code == 400
    assert client.get("/sets/a").status_code == 404


def test_a_key_in_progress_is_409(client):
    """The writer is held up by a transaction of this test."""
    app, holding, free = client.app.api, threading.Event(), threading.Event()
    store = app.state.service.store

    def hold():
        with store.rows.transaction([]):
            holding.set()
            free.wait(20)

    thread = threading.Thread(target=hold)
    thread.start()
    holding.wait(10)
    answers = []
    sender = threading.Thread(target=lambda: answers.append(post(client, "a", X[:2], '"k"')))
    sender.start()
    while not app.state.service._in_progress:
        holding.wait(0.01)
    second, other = post(client, "a", X[:2], '"k"'), post(client, "a", X[:1], '"k"')
    free.set()
    thread.join()
    sender.join()
    assert (second.status_code, other.status_code, answers[0].json()["count"]) == (409, 409, 2)
    assert "in progress" in second.json()["detail"]
    assert post(client, "a", X[:1], '"k"').status_code == 422
    assert post(client, "a", X[:2], '"k"').headers["idempotency-replayed"] == "true"


def test_duplicates_from_four_clients_at_once_count_once(tmp_path):
    with listening(tmp_path / "s.db") as (_, port):

        async def send(seed):
            async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as client:
                for number in random.Random(seed).sample(range(40), 40):
                    while True:
                        body, headers = {"elements": X[number : number + 1].tolist()}, {"Idempotency-Key": f'"{number}"'}
                        answer = await client.post("/sets/a/elements", json=body, headers=headers)
                        if answer.status_code != 409:
                            break
                        await asyncio.sleep(0.01)
                    assert answer.status_code == 200

        async def all_of_them():
            await asyncio.gather(*map(send, range(4)))

        asyncio.run(all_of_them())
        answer = httpx.get(f"http://127.0.0.1:{port}/sets/a/prediction").json()
    assert answer["count"] == 40
    expected = make()(torch.from_numpy(X[None, :40]).float())
    np.testing.assert_allclose(answer["prediction"], expected[0].tolist(), rtol=1e-3, atol=1e-4)


def test_a_client_that_repeats_until_it_is_answered_survives_kills(tmp_path):
    """The server is killed while a client sends; the client repeats each request with its key until there is an answer."""
    path, stop, done = tmp_path / "s.db", threading.Event(), []
    url = {}

    def send():
        client, keys = httpx.Client(timeout=10), [str(uuid.UUID(int=number)) for number in range(len(X))]
        for number, key in enumerate(keys):
            for _ in range(2000):
                try:
                    body, headers = {"elements": X[number : number + 1].tolist()}, {"Idempotency-Key": f'"{key}"'}
                    answer = client.post(f"{url['now']}/sets/a/elements", json=body, headers=headers)
                    if answer.status_code == 200:
                        done.append(number)
                        break
                except httpx.TransportError:
                    if stop.wait(0.02):
                        return

    tiles = ("--tile", "3600", "--retention", "3600:604800,86400:inf")
    server = Server(path, *tiles)
    url["now"] = server.url
    thread = threading.Thread(target=send)
    thread.start()
    for target in (40, 120):
        while len(done) < target and thread.is_alive():
            stop.wait(0.005)
        server.process.kill()
        server.stop()
        server = Server(path, *tiles)
        url["now"] = server.url
    thread.join(60)
    stop.set()
    counts = [httpx.get(f"{url['now']}/sets/a/prediction", params=some).json()["count"] for some in ({}, {"since": 0})]
    server.stop()
    assert [len(done), *counts] == [len(X)] * 3


@pytest.fixture
def tiled(tmp_path):
    app = create_app(ss.StateStore(tmp_path / "s.db", make(), tile=HOUR), Options())
    with TestClient(app, "http://localhost", raise_server_exceptions=False) as client:
        yield client


def test_times_and_ranges(tiled):
    for hour in range(50):
        assert post(tiled, "a", X[hour : hour + 1], params={"time": hour * HOUR + 5}).json()["count"] == hour + 1
    answer = tiled.get("/sets/a/prediction", params={"since": 10 * HOUR, "until": 45 * HOUR - 1}).json()
    assert answer["count"] == 35
    expected = make()(torch.from_numpy(X[None, 10:45]).float())
    np.testing.assert_allclose(answer["prediction"], expected[0].tolist(), rtol=1e-3, atol=1e-4)
    state = ss.State.from_bytes(tiled.get("/sets/a/state", params={"since": 48 * HOUR}).content)
    assert int(state.count) == 2
    assert tiled.delete("/sets/a/elements", params={"until": 40 * HOUR}).json() == {"id": "a", "count": 10}
    assert tiled.get("/sets/a/prediction").json()["count"] == 10
    headers = {"Content-Type": "application/octet-stream"}
    tiled.post("/sets/b/state", params={"time": 7 * HOUR}, content=state.to_bytes(), headers=headers)
    tiled.post("/sets/b/state", content=state.to_bytes(), headers=headers)
    post(tiled, "b", X[:1])  # now
    counts = [
        tiled.get("/sets/b/prediction", params=some).json()["count"] for some in ({}, {"until": 8 * HOUR}, {"since": 8 * HOUR})
    ]
    assert counts == [5, 2, 1]
    post(tiled, "b", X[:3], '"k"', params={"time": 5})
    assert post(tiled, "b", X[:3], '"k"', params={"time": 5}).headers["idempotency-replayed"] == "true"
    assert post(tiled, "b", X[:3], '"k"', params={"time": 6}).status_code == 422


def test_invalid_times_and_ranges_are_422_or_404(tiled, client):
    post(tiled, "a", X[:1], params={"time": 5})
    for method, path, some in (
        ("POST", "/sets/a/elements", {"time": "nan"}),
        ("POST", "/sets/a/elements", {"time": "1e300"}),
        ("POST", "/sets/a/elements", {"time": "noon"}),
        ("GET", "/sets/a/prediction", {"since": "inf"}),
        ("GET", "/sets/a/state", {"until": "-inf"}),
        ("DELETE", "/sets/a/elements", {}),
        ("DELETE", "/sets/a/elements", {"since": 5}),
    ):
        answer = tiled.request(method, path, params=some, json={"elements": X[:1].tolist()} if method == "POST" else None)
        assert answer.status_code == 422, (method, path, some, answer.text)
    assert tiled.get("/sets/a/prediction", params={"since": 1e300, "until": -1e300}).json()["count"] == 0
    assert tiled.get("/sets/z/prediction", params={"since": 0}).status_code == 404
    assert tiled.delete("/sets/z/elements", params={"until": 0}).status_code == 404
    post(client, "a", X[:1])
    assert post(client, "a", X[:1], params={"time": 5}).status_code == 422
    assert client.get("/sets/a/prediction", params={"since": 0}).status_code == 422


def test_predictions_for_several_sets(tiled):
    post(tiled, "a", X[:3], params={"time": 5})
    post(tiled, "b", X[3:9], params={"time": 5 * HOUR})
    answer = tiled.post("/predictions", json={"ids": ["b", "z", "a", "b"]}).json()["predictions"]
    assert [(one["id"], one["count"]) for one in answer] == [("b", 6), ("z", 0), ("a", 3), ("b", 6)]
    assert answer[1]["prediction"] is None
    assert [answer[0], answer[2]] == [tiled.get(f"/sets/{id}/prediction").json() for id in "ba"]
    ranged = tiled.post("/predictions", json={"ids": ["a", "b"], "since": 0, "until": HOUR}).json()["predictions"]
    assert [one["count"] for one in ranged] == [3, 0]
    for body in ({}, {"ids": []}, {"ids": ["a"] * 101}, {"ids": ["../a"]}, {"ids": ["a"], "since": "noon"}, {"ids": "a"}, [1]):
        assert tiled.post("/predictions", json=body).status_code == 422
    for content in (b"{", b'{"ids": ["a"], "since": NaN}', b'{"ids": ["\\ud800"]}', b"[" * 100_000, b""):
        answer = tiled.post("/predictions", content=content, headers={"Content-Type": "application/json"})
        assert answer.status_code in (400, 422)


def test_the_server_drops_what_is_older_than_the_retention(tmp_path):
    """From its start on: one that is started anew each hour would otherwise drop nothing."""
    with ss.StateStore(tmp_path / "s.db", make(), tile=0.01) as store:
        store.update("old", torch.ones(1, 3), time=5)
    app = create_app(ss.StateStore(tmp_path / "s.db", make(), retention=1000.0), Options())
    with TestClient(app, "http://localhost") as client:
        for _ in range(200):
            if client.get("/sets/old").status_code == 404:
                break
            threading.Event().wait(0.05)
        assert client.get("/sets/old").status_code == 404
        late = post(client, "old", X[:1], params={"time": 5})
        assert (late.status_code, "no longer kept" in late.json()["detail"]) == (422, True)
