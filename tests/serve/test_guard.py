"""Tokens, hosts, origins, sizes: who gets in, and what the others learn."""

import json
import logging

import pytest
from starlette.testclient import WebSocketDenialResponse

from setstream.errors import ConfigurationError
from setstream.serve.app import JsonLines
from setstream.serve.options import Options, is_loopback, read_tokens
from tests.serve.conftest import serving

TOKEN, OTHER = "a-token-that-nobody-guesses", "another-one-for-someone-else"
BODY = {"elements": [[1, 2, 3]]}


@pytest.fixture
def guarded(tmp_path):
    with serving(tmp_path / "s.db", tokens=(TOKEN, OTHER), max_body=1000) as client:
        yield client


def bearer(token):
    return {"Authorization": f"Bearer {token}"}


def test_right_tokens_get_in(guarded):
    for token in (TOKEN, OTHER):
        assert guarded.get("/sets", headers=bearer(token)).status_code == 200
    assert guarded.get("/sets", headers={"Authorization": f"bearer {TOKEN}"}).status_code == 200


WRONG = [
    {},
    bearer(""),
    bearer("wrong"),
    bearer(TOKEN[:-1]),
    bearer(TOKEN + "x"),
    bearer(f"{TOKEN},{OTHER}"),
    bearer(TOKEN.upper()),
    {"Authorization": TOKEN},
    {"Authorization": f"Basic {TOKEN}"},
    {"Authorization": f"Bearer  {TOKEN}"},
    {"X-Authorization": f"Bearer {TOKEN}"},
    {"Authorization": b"Bearer \xff\xfe"},
]
PATHS = [
    "/sets",
    "/sets/a",
    "/model",
    "/metrics",
    "/openapi.json",
    "/nothing",
    "/sets/a%2fb",
    "/health/",
]


@pytest.mark.parametrize("path", PATHS)
def test_wrong_tokens_learn_nothing(guarded, path):
    seen = set()
    for headers in WRONG:
        for method in ("GET", "POST", "DELETE", "PATCH"):
            answer = guarded.request(method, path, headers=headers, content=b"x" * 5000)
            assert answer.status_code == 401
            assert answer.headers["www-authenticate"] == "Bearer"
            seen.add(answer.content)
    assert len(seen) == 1


def test_two_authorizations_are_none(guarded):
    headers = [("Authorization", f"Bearer {TOKEN}"), ("Authorization", "Bearer wrong")]
    assert guarded.get("/sets", headers=headers).status_code == 401


def test_the_front_page_and_health_need_no_token(guarded):
    assert guarded.get("/health").json() == {"status": "ok"}
    assert guarded.get("/").status_code == 200
    assert guarded.get("/playground/page.css").status_code == 200


def test_websockets_need_tokens_too(guarded):
    url = "ws://localhost/sets/a/live"
    for headers in WRONG[:5]:
        with pytest.raises(WebSocketDenialResponse) as refused, guarded.websocket_connect(url, headers=headers):
            pass
        assert refused.value.status_code == 401
    with guarded.websocket_connect(url, headers=bearer(TOKEN)) as socket:
        assert socket.receive_json()["count"] == 0
    with guarded.websocket_connect(url, subprotocols=["setstream", f"bearer.{TOKEN}"]) as socket:
        assert socket.accepted_subprotocol == "setstream"  # and never the token
    with pytest.raises(WebSocketDenialResponse), guarded.websocket_connect(url, subprotocols=["setstream", "bearer.wrong"]):
        pass


def test_a_body_over_the_limit_is_413(guarded):
    headers = bearer(TOKEN) | {"Content-Type": "application/json"}
    path = "/sets/a/elements"
    assert guarded.post(path, headers=headers, content=b" " * 1001).status_code == 413
    assert guarded.post(path, headers=headers, content=(b" " * 100 for _ in range(11))).status_code == 413  # in chunks
    merged = guarded.post("/sets/a/merge", headers=headers, content=(b" " * 100 for _ in range(11)))
    assert merged.status_code == 413
    lie = headers | {"Content-Length": "9" * 30}
    assert guarded.post(path, headers=lie, content=b"{}").status_code == 413
    for length in ("-1", "ten", "1e3", "+5", "٣"):
        answer = guarded.post(path, headers=headers | {"Content-Length": length.encode()}, content=b"{}")
        assert answer.status_code == 400


def test_all_bodies_together_have_a_limit(tmp_path):
    with serving(tmp_path / "s.db", max_waiting=500) as client:
        headers = {"Content-Type": "application/json"}
        answer = client.post("/sets/a/elements", headers=headers, content=b" " * 501)
        assert answer.status_code == 429
        assert answer.headers["retry-after"] == "1"
        assert client.post("/sets/a/elements", json=BODY).status_code == 200  # and what was held is given back


@pytest.mark.parametrize(
    "kind", ["", "text/plain", "application/xml", "multipart/form-data", "application/jsonx", "application/json, text/plain"]
)
def test_other_content_types_are_415(guarded, kind):
    headers = bearer(TOKEN) | {"Content-Type": kind}
    for method, path in (("POST", "elements"), ("PUT", "state"), ("POST", "state")):
        assert guarded.request(method, f"/sets/a/{path}", headers=headers, content=json.dumps(BODY)).status_code == 415
    assert guarded.post("/sets/a/merge", headers=headers, content=b'{"from": "b"}').status_code in (415, 422)


def test_headers_sent_twice_are_refused(guarded):
    for name, values in (("Content-Type", ["application/json", "application/x-npy"]), ("Host", ["localhost", "evil.example"])):
        headers = [("Authorization", f"Bearer {TOKEN}"), *((name, value) for value in values)]
        answer = guarded.post("/sets/a/elements", headers=headers, content=json.dumps(BODY))
        assert answer.status_code == 400
        assert "twice" in answer.json()["detail"]


def test_compressed_bodies_are_refused(guarded):
    headers = bearer(TOKEN) | {"Content-Type": "application/json", "Content-Encoding": "gzip"}
    assert guarded.post("/sets/a/elements", headers=headers, content=b"x").status_code == 415


def test_other_hosts_and_origins_are_refused(tmp_path):
    with serving(tmp_path / "s.db") as client:
        for host in ("evil.example", "localhost.evil.example", "", "evil.example:8000", "127.0.0.1.nip.io"):
            assert client.get("/sets", headers={"Host": host}).status_code == 421
        for host in ("localhost", "localhost:8000", "127.0.0.1:80", "[::1]:8000"):
            assert client.get("/sets", headers={"Host": host}).status_code == 200
        for origin in (
            "http://evil.example",
            "null",
            "http://localhost.evil.example",
            "http://localhost:1234",
            "http://[",
            "http://[::1",
        ):
            assert client.get("/sets", headers={"Origin": origin}).status_code == 403
        assert client.get("/sets", headers={"Origin": "http://localhost"}).status_code == 200
        with (
            pytest.raises(WebSocketDenialResponse) as refused,
            client.websocket_connect("ws://localhost/sets/a/live", headers={"Origin": "http://evil.example"}),
        ):
            pass
        assert refused.value.status_code == 403


def test_request_ids_are_in_answers_and_logs(tmp_path, caplog):
    with serving(tmp_path / "s.db") as client, caplog.at_level(logging.INFO, "setstream.serve"):
        assert client.get("/sets", headers={"X-Request-ID": "mine-7"}).headers["x-request-id"] == "mine-7"
        for bad in ("a b", "x" * 65, 'a"}\u007f', ""):
            assert client.get("/health", headers={"X-Request-ID": bad.encode()}).headers["x-request-id"] != bad
        client.post("/sets/a/elements", json=BODY)
    lines = [json.loads(JsonLines().format(record)) for record in caplog.records]
    assert len(lines) == 6
    assert lines[0] | {"request": "mine-7", "method": "GET", "path": "/sets", "status": 200} == lines[0]
    assert lines[-1]["bytes"] > 0
    assert len({line["request"] for line in lines}) == 6


def test_a_failure_is_a_500_that_says_nothing(tmp_path, caplog):
    with serving(tmp_path / "s.db") as client:

        def broken(*_):
            raise ZeroDivisionError("a secret")

        client.app.api.state.service.store.describe = broken
        answer = client.get("/sets/a")
        assert answer.status_code == 500
        assert "secret" not in answer.text
        assert "secret" in caplog.text
        assert client.get("/health").status_code == 200


def test_a_store_that_is_gone_is_a_503(tmp_path, caplog):
    with serving(tmp_path / "s.db") as client:
        from setstream.errors import StoreError

        def gone(*_):
            raise StoreError("postgresql://db: it cannot be reached")

        client.app.api.state.service.store.describe = gone
        answer = client.get("/sets/a")
        assert answer.status_code == 503
        assert "postgresql" not in answer.text


def test_options_that_cannot_be(tmp_path):
    with pytest.raises(ConfigurationError, match="16 to 256"):
        Options(tokens=("short",))
    with pytest.raises(ConfigurationError, match="max_body"):
        Options(max_body=0)
    with pytest.raises(ConfigurationError, match="no token"):
        read_tokens("", None)
    with pytest.raises(ConfigurationError, match="not from both"):
        read_tokens("x", tmp_path / "tokens")
    with pytest.raises(ConfigurationError, match="cannot be read"):
        read_tokens(None, tmp_path / "tokens")
    (tmp_path / "tokens").write_text(f"{TOKEN}\n\n{OTHER}\n")
    assert read_tokens(None, tmp_path / "tokens") == (TOKEN, OTHER)
    assert read_tokens(f"{TOKEN}, {OTHER}", None) == (TOKEN, OTHER)
    assert read_tokens(None, None) == ()
    assert [is_loopback(host) for host in ("127.0.0.1", "::1", "localhost", "127.9.9.9", "0.0.0.0", "example.org")] == [
        True
    ] * 4 + [False] * 2
