"""Every verb over HTTP, and what bad input is told."""

import contextlib
import json
import threading
import time

import numpy as np
import pytest
import torch
from fastapi.testclient import TestClient

import setstream as ss
import setstream.serve.service
from setstream.serve import Options, create_app
from setstream.states.fingerprint import Origin
from setstream.tasks.loading import open_model
from tests.serve.conftest import make, serving
from tests.serve.test_bodies import ARROW, NPY, arrow, listed, npy

STATE = {"content-type": "application/octet-stream"}


def add(client, id, rows):
    return client.post(f"/sets/{id}/elements", json={"elements": np.asarray(rows).tolist()})


def prediction(client, id):
    return torch.tensor(client.get(f"/sets/{id}/prediction").json()["prediction"])


def test_a_set_in_requests_of_three_kinds_is_the_whole_set(client):
    x = torch.randn(90, 3)
    parts = x.numpy().astype(np.float32)
    assert add(client, "a", parts[:30]).json() == {"id": "a", "count": 30}
    client.post("/sets/a/elements", content=npy(parts[30:60]), headers={"content-type": NPY})
    done = client.post("/sets/a/elements", content=arrow(listed(parts[60:])), headers={"content-type": ARROW})
    assert done.json() == {"id": "a", "count": 90}
    torch.testing.assert_close(prediction(client, "a"), make()(x[None])[0], rtol=1e-4, atol=1e-5)


def test_merge_list_describe_and_delete(client):
    add(client, "a", np.ones((2, 3)))
    add(client, "b c", np.zeros((3, 3)))
    assert client.post("/sets/a/merge", json={"from": "b c"}).json() == {"id": "a", "count": 5}
    assert client.get("/sets").json() == {"sets": [{"id": "a", "count": 5}, {"id": "b c", "count": 3}], "next": None}
    assert client.get("/sets?limit=1").json() == {"sets": [{"id": "a", "count": 5}], "next": "a"}
    assert client.get("/sets?limit=1&after=a").json() == {"sets": [{"id": "b c", "count": 3}], "next": None}
    assert client.get("/sets/a").json()["count"] == 5
    assert client.get("/sets/a").json()["bytes"] == len(client.get("/sets/a/state").content)
    assert client.delete("/sets/a").status_code == 204
    for method, path in (("DELETE", ""), ("GET", ""), ("GET", "/prediction"), ("GET", "/state")):
        answer = client.request(method, f"/sets/a{path}")
        assert answer.status_code == 404
        assert answer.json() == {"detail": "there is no set 'a'"}
    assert client.post("/sets/n/merge", json={"from": "a"}).status_code == 404
    assert client.post("/sets/b c/merge", json={"from": "b c"}).status_code == 422


def test_states_go_out_and_come_back(client):
    x = torch.randn(20, 3)
    add(client, "a", x)
    data = client.get("/sets/a/state").content
    assert int(ss.State.from_bytes(data).count) == 20
    assert client.put("/sets/b/state", content=data, headers=STATE).json() == {"id": "b", "count": 20}
    assert client.put("/sets/b/state", content=data, headers=STATE).json() == {"id": "b", "count": 20}
    elsewhere = make().encoder.update(None, torch.randn(1, 7, 3)).to_bytes()
    assert client.post("/sets/b/state", content=elsewhere, headers=STATE).json() == {"id": "b", "count": 27}


def test_a_state_of_another_encoder_is_a_conflict(client):
    foreign = make(seed=1).encoder.update(None, torch.randn(1, 7, 3)).to_bytes()
    for method in ("PUT", "POST"):
        answer = client.request(method, "/sets/a/state", content=foreign, headers=STATE)
        assert answer.status_code == 409
        assert "another encoder" in answer.json()["detail"]
    assert client.get("/sets/a").status_code == 404


def forged(change):
    """A state that says it is of this encoder, with a right checksum, and is not."""
    state = make().encoder.update(None, torch.randn(1, 7, 3))
    state.origin.fingerprint  # noqa: B018  taken while the weights are known
    change(state)
    return state.to_bytes()


def set_tensor(name, make_tensor):
    def change(state):
        state.accumulators["pooled"].tensors[name] = make_tensor(state.accumulators["pooled"].tensors[name])

    return change


def set_count(value):
    def change(state):
        state.count = torch.tensor([value])

    return change


@pytest.mark.parametrize(
    ("change", "status"),
    [
        (set_tensor("numerator", lambda t: t[..., :1].expand(*t.shape[:-1], 99)), 409),
        (set_tensor("numerator", lambda t: t * float("nan")), 422),
        (set_tensor("normaliser", lambda t: t.long()), 409),
        (lambda state: state.accumulators["pooled"].tensors.pop("shift"), 409),
        (lambda state: state.accumulators.pop("pooled"), 409),
        (set_count(-3), 422),
        (set_count(2**60), 422),
    ],
)
def test_forged_states_are_refused(client, change, status):
    answer = client.put("/sets/a/state", content=forged(change), headers=STATE)
    assert answer.status_code == status, answer.text


def test_damaged_states_are_refused(client):
    add(client, "a", np.ones((2, 3)))
    data = client.get("/sets/a/state").content
    for bad in (b"", b"text", data[:-1], data[:100], bytes([data[0] ^ 1]) + data[1:], data[:-5] + b"12345"):
        assert client.put("/sets/a/state", content=bad, headers=STATE).status_code == 422
    assert client.get("/sets/a/state").content == data


def test_counts_cannot_overflow(client):
    data = forged(set_count(2**53 - 1))
    assert client.put("/sets/a/state", content=data, headers=STATE).status_code == 200
    assert add(client, "a", np.ones((1, 3))).json()["count"] == 2**53
    answer = add(client, "a", np.ones((1, 3)))
    assert answer.status_code == 422
    assert client.get("/sets/a").json()["count"] == 2**53


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([[1.0, 2.0]], "must be 3 numbers"),
        ([1.0, 2.0], "single numbers"),
        ([[float("nan"), 0.0, 0.0]], "NaN or infinity"),
        ([[float("inf"), 0.0, 0.0]], "NaN or infinity"),
        ([[1e300, 1e300, 1e300]], "overflow"),
        ([[[1.0, 2.0, 3.0]]], "lists of shape (1, 3)"),
    ],
)
def test_elements_that_cannot_be_are_422_and_change_nothing(client, rows, message):
    add(client, "a", np.ones((1, 3)))
    body = json.dumps({"elements": rows})
    answer = client.post("/sets/a/elements", content=body, headers={"content-type": "application/json"})
    assert answer.status_code == 422
    assert message in answer.json()["detail"]
    assert client.get("/sets/a").json()["count"] == 1


def test_limits(client):
    assert add(client, "a", np.ones((1000, 3))).status_code == 200
    answer = add(client, "a", np.ones((1001, 3)))
    assert answer.status_code == 413
    assert "at most 1000 elements" in answer.json()["detail"]
    assert add(client, "a", np.full((1000, 3), -0.123456789123456789e-5)).status_code == 413  # bytes
    codes = [add(client, f"s{number}", np.ones((1, 3))).status_code for number in range(51)]
    assert codes == [200] * 49 + [403] * 2
    assert client.delete("/sets/s0").status_code == 204
    assert add(client, "another", np.ones((1, 3))).status_code == 200
    assert add(client, "a", np.ones((1, 3))).status_code == 200


def test_bad_requests_of_many_at_once_keep_the_good_ones(client):
    """Requests that share a round: each gets its own answer."""
    found = {}

    def ask(number):
        rows = [[[1.0, 2.0, 3.0]], [[1.0, 2.0]], [[float("nan")] * 3]][number % 3]
        body = json.dumps({"elements": rows})
        answer = client.post(f"/sets/{number % 2}/elements", content=body, headers={"content-type": "application/json"})
        found[number] = answer.status_code

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(30)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {number: 200 if number % 3 == 0 else 422 for number in range(30)}
    assert sum(own["count"] for own in client.get("/sets").json()["sets"]) == 10


@pytest.mark.parametrize(
    "id",
    ["", ".", "..", ".hidden", "a/b", "a%00", "a%0a", "x" * 201, "a\\b", "a?b", "a%ff", "é%ff", "a#", "a%2fb", "-a", "a\u202e"],
)
def test_ids_that_cannot_be(client, id):
    body = json.dumps({"elements": [[1, 2, 3]]})
    answer = client.post(f"/sets/{id}/elements", content=body, headers={"content-type": "application/json"})
    assert answer.status_code in (400, 404, 405, 422), answer.text
    assert client.get("/sets").json()["sets"] == []
    assert client.post("/sets/fine/merge", json={"from": id}).status_code in (404, 422)


@pytest.mark.parametrize("id", ["a", "A-1", "slide 7.svs", "user@host:7", "x" * 200, "Größe", "病人7", "a+b=c~d"])
def test_ids_that_can_be(client, id):
    assert add(client, id, np.ones((1, 3))).json() == {"id": id, "count": 1}


def test_elements_of_another_shape_are_told_theirs(client):
    answer = client.post("/sets/a/elements", json={"elements": [1.0, 2.0, 3.0]})  # as many numbers as one element has
    assert answer.status_code == 422
    assert answer.json()["detail"] == "each element must be 3 numbers, as in [[...], [...]]; got single numbers"


@pytest.mark.parametrize(("given", "said"), [(["no", "yes"], ["no", "yes"]), (2, None)], ids=["names", "a number"])
def test_a_classifiers_classes_are_told(tmp_path, given, said):
    model = make().remember("tests.serve.conftest:make", {"classes": given})
    app = create_app(ss.StateStore(tmp_path / "states.db", model), Options(), "classifier")
    with TestClient(app, "http://localhost") as opened:
        assert opened.get("/model").json()["classes"] == said


def test_the_server_describes_itself(client):
    model = client.get("/model").json()
    assert model["element_width"] == 3
    assert model["classes"] is None
    assert model["fingerprint"] == make().encoder.empty(1).fingerprint
    assert client.get("/health").json() == {"status": "ok"}
    add(client, "a", np.ones((5, 3)))
    metrics = client.get("/metrics").text
    assert "setstream_elements_total 5.0" in metrics
    assert "setstream_sets 1.0" in metrics
    assert 'setstream_requests_total{method="POST",route="/sets/{id}/elements",status="200"} 1.0' in metrics
    page = client.get("/")
    assert page.headers["content-security-policy"].startswith("default-src 'none'")
    assert "http" not in page.text.replace("/openapi.json", "")
    assert client.get("/playground/page.css").headers["content-type"].startswith("text/css")
    assert client.get("/docs").status_code == 404


def test_openapi_has_examples(client):
    schema = client.get("/openapi.json").json()
    assert len(schema["paths"]) == 11
    post = schema["paths"]["/sets/{id}/elements"]["post"]
    assert post["requestBody"]["content"]["application/json"]["examples"]
    assert {"400", "401", "403", "408", "413", "415", "422"} <= set(post["responses"])
    models = schema["components"]["schemas"]
    assert all("examples" in models[name] for name in ("Prediction", "SetInfo", "Problem", "Model"))
    merge = schema["paths"]["/sets/{id}/merge"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert merge["examples"] == [{"from": "customer-7-phone"}]


def test_a_watcher_sees_every_last_state(client):
    with client.websocket_connect("ws://localhost/sets/a/live", subprotocols=["setstream"]) as socket:
        assert socket.accepted_subprotocol == "setstream"
        assert socket.receive_json() == {"id": "a", "count": 0, "prediction": None, "classes": None}
        add(client, "b", np.ones((1, 3)))
        x = torch.randn(6, 3)
        for row in x:
            add(client, "a", row[None])
        seen = [socket.receive_json()]
        while seen[-1]["count"] < 6:
            seen.append(socket.receive_json())
        assert [own["count"] for own in seen] == sorted({own["count"] for own in seen})
        torch.testing.assert_close(torch.tensor(seen[-1]["prediction"]), make()(x[None])[0], rtol=1e-4, atol=1e-5)
        assert "setstream_watchers 1.0" in client.get("/metrics").text
        client.delete("/sets/a")
        assert socket.receive_json()["count"] == 0


def test_a_watcher_is_told_only_what_is_new(client):
    add(client, "a", np.ones((1, 3)))
    with client.websocket_connect("ws://localhost/sets/a/live") as socket:
        assert socket.receive_json()["count"] == 1
        state = client.get("/sets/a/state").content
        for _ in range(5):
            assert client.put("/sets/a/state", content=state, headers=STATE).json()["count"] == 1
        add(client, "a", np.ones((1, 3)))
        assert socket.receive_json()["count"] == 2


def test_many_watchers_of_a_set_are_one_computation(tmp_path, monkeypatch):
    asked = []
    predict = ss.StateStore.count_and_prediction

    def counted(self, id, **times):
        asked.append(id)
        time.sleep(0.05)
        return predict(self, id, **times)

    monkeypatch.setattr(ss.StateStore, "count_and_prediction", counted)
    with serving(tmp_path / "s.db") as client, contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(client.websocket_connect("ws://localhost/sets/a/live")) for _ in range(20)]
        assert {socket.receive_json()["count"] for socket in sockets} == {0}
        asked.clear()
        for count in (1, 2, 3):
            add(client, "a", np.ones((1, 3)))
            assert {socket.receive_json()["count"] for socket in sockets} == {count}
        assert 3 <= len(asked) <= 6  # a change while one is computed is one more


def test_a_set_without_elements_predicts_or_says_why_not(tmp_path):
    torch.manual_seed(0)
    unknown = ss.SetEncoder(torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(2, 8)), ss.DeepSets())  # phi tells no width
    models = {"deepsets": 200, "umbc+set-transformer": 200, "unknown": 422}
    for name, status in models.items():
        model = ss.SetModel(unknown, torch.nn.Linear(8, 1)).eval() if name == "unknown" else open_model(name)
        app = create_app(ss.StateStore(tmp_path / f"{name}.db", model))
        with TestClient(app, "http://localhost", raise_server_exceptions=False) as client:
            assert client.post("/sets/a/elements", json={"elements": []}).json() == {"id": "a", "count": 0}
            answer = client.get("/sets/a/prediction")
            assert answer.status_code == status
            assert status == 200 or "Add an element first" in answer.json()["detail"]
            add(client, "a", [[0.0, 1.0]])
            assert client.get("/sets/a/prediction").status_code == 200


def test_a_merge_names_one_set_and_nothing_else(client):
    headers = {"content-type": "application/json"}
    many = json.dumps({f"k{number}": 0 for number in range(200_000)})
    assert client.post("/sets/a/merge", content=many[: 2**16], headers=headers).status_code == 413
    for body in (
        "{}",
        "[]",
        "",
        "{",
        '{"from": 7}',
        '{"from": "a", "k": 0}',
        '{"from": "\\ud800"}',
        '{"from": "\ud800"}',
        "[" * 4000,
    ):
        content = body.encode("utf-8", "surrogatepass")
        answer = client.post("/sets/a/merge", content=content, headers=headers)
        assert answer.status_code == 422, answer.text
        assert len(answer.content) < 4000


def test_halves_of_characters_are_no_500(client):
    for fingerprint in ("\ud800", "x" * 10_000):  # with a right checksum
        state = make().encoder.update(None, torch.randn(1, 7, 3))
        state.origin = Origin(None, fingerprint)
        answer = client.put("/sets/a/state", content=state.to_bytes(), headers=STATE)
        assert answer.status_code == 409, answer.text
        assert len(answer.content) < 8000
    for path in ("/sets/%ed%a0%80", "/sets?after=%ed%a0%80", "/sets/a%ed%a0%80/prediction"):
        assert client.get(path).status_code < 500


def test_a_store_that_hangs_is_unhealthy_soon_and_once(client, monkeypatch):
    go, asked = threading.Event(), []
    rows = client.app.api.state.service.store.rows
    monkeypatch.setattr(setstream.serve.service, "PULSE", 0.2)
    monkeypatch.setattr(rows, "query", lambda *_: (asked.append(1), go.wait(20), [(1,)])[2])
    hanging = [threading.Thread(target=client.get, args=("/sets",)) for _ in range(4)]  # all threads that read
    for thread in hanging:
        thread.start()
    for _ in range(3):
        began = time.monotonic()
        answer = client.get("/health")
        assert answer.status_code == 503
        assert time.monotonic() - began < 5
    go.set()
    for thread in hanging:
        thread.join(20)
    assert len(asked) <= 4 + 1
    assert client.get("/health").json() == {"status": "ok"}


def test_sets_that_another_server_began_are_counted(tmp_path, monkeypatch):
    monkeypatch.setattr(setstream.serve.service, "RECOUNT", 0.1)
    with serving(tmp_path / "s.db", max_sets=2) as one, serving(tmp_path / "s.db", max_sets=2) as two:
        for id in "ab":
            assert add(one, id, np.ones((1, 3))).status_code == 200
        until = time.monotonic() + 15
        while add(two, "c", np.ones((1, 3))).status_code != 403 and time.monotonic() < until:
            assert two.delete("/sets/c").status_code == 204
            time.sleep(0.05)
        assert add(two, "c", np.ones((1, 3))).status_code == 403
        assert one.get("/sets").json()["next"] is None


def test_the_service_goes_on_where_it_was(tmp_path):
    for count in (2, 4):
        with serving(tmp_path / "s.db") as client:
            assert add(client, "a", np.ones((2, 3))).json()["count"] == count
