"""Connections that bring too much, too slowly, or nothing: they end, and the others do not notice."""

import contextlib
import json
import socket
import threading
import time

import httpx
import pytest
import websockets.sync.client

import setstream as ss
from setstream.serve import connections, guard
from tests.serve.conftest import listening

HEAD = b"GET /health HTTP/1.1\r\nHost: localhost\r\n"
APPEND = b"POST /sets/a/elements HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 1000\r\n\r\n{"


@contextlib.contextmanager
def connected(port):
    with socket.create_connection(("127.0.0.1", port), timeout=20) as opened:
        yield opened


def answer_of(opened):
    """What comes until the server closes; fails after 20 s of silence."""
    found = b""
    with contextlib.suppress(ConnectionError):
        while data := opened.recv(65536):
            found += data
    return found


def status_of(answer):
    return int(answer[9:12])


def dribble(opened, data, seconds):
    """Send the data again and again until the server has closed; gives how long that took."""
    began = time.monotonic()
    opened.settimeout(seconds)
    with contextlib.suppress(ConnectionError):
        while time.monotonic() - began < 20:
            opened.sendall(data)
            with contextlib.suppress(TimeoutError):
                while opened.recv(65536):
                    pass
                break
    return time.monotonic() - began


@pytest.mark.parametrize(
    ("begin", "more", "status"),
    [
        (HEAD, b"X-Line: %s\r\n" % (b"a" * 1000), 431),
        (HEAD + b"X-Line: ", b"a" * 1000, 431),
        (HEAD, b"a:\r\n" * 250, 431),
        (b"GET /sets?after=", b"a" * 1000, 414),
        (b"GET /" + b"a" * 9000, b" HTTP/1.1\r\nHost: localhost\r\n\r\n", 414),
        (b"\r\n", b"\r\n" * 500, None),
    ],
    ids=["lines", "one line", "short lines", "a URL", "a whole URL", "no request"],
)
def test_headers_and_url_have_a_limit(tmp_path, begin, more, status):
    with listening(tmp_path / "s.db", head_seconds=2.0) as (_, port), connected(port) as opened:
        opened.sendall(begin)
        sent = 0
        with contextlib.suppress(ConnectionError, TimeoutError):
            opened.settimeout(0.001)
            while sent < 100 * 2**20 and not peek(opened):
                sent += opened.send(more)
        opened.settimeout(20)
        answer = answer_of(opened)
        assert sent < 20 * 2**20  # what fits into the buffers between us
        if status is not None:
            assert status_of(answer) == status
            assert "bytes" in json.loads(answer.partition(b"\r\n\r\n")[2])["detail"]


def peek(opened):
    try:
        return bool(opened.recv(1, socket.MSG_PEEK))
    except TimeoutError:
        return False


def test_what_is_within_the_limits_gets_in(tmp_path):
    with listening(tmp_path / "s.db") as (_, port), connected(port) as opened:
        lines = b"".join(b"X-%02d: %s\r\n" % (number, b"a" * 1000) for number in range(20))
        for piece in (
            b"GET /health?x=" + b"a" * 8000,
            b" HTTP/1.1\r\nHost: localhost\r\n",
            lines,
            b"Connection: close\r\n\r\n",
        ):
            opened.sendall(piece)
            time.sleep(0.01)
        assert status_of(answer_of(opened)) == 200
        with connected(port) as other:
            for byte in HEAD + b"Connection: close\r\n\r\n":
                other.sendall(bytes([byte]))
            assert status_of(answer_of(other)) == 200


@pytest.mark.parametrize(
    ("begin", "more", "starts"),
    [
        (b"", b"", b""),
        (b"GET /hea", b"", b"HTTP/1.1 408"),
        (HEAD, b"X: a\r\n", b"HTTP/1.1 408"),
        (HEAD + b"\r\n", b"", b"HTTP/1.1 200"),
        (HEAD + b"X: " + b"a" * 9000 + b"\r\n\r\n", b"", b"HTTP/1.1 200"),
        (HEAD + b"\r\n", b"\r\n", b"HTTP/1.1 200"),
        (HEAD + b"\r\n" + HEAD, b"", b"HTTP/1.1 200"),
        (b"GET /sets HTTP/1.1\r\nHost: evil\r\nContent-Length: 1000\r\n\r\n", b"a", b"HTTP/1.1 421"),
        (APPEND.replace(b"/json", b"/xml"), b"a", b"HTTP/1.1 415"),
        (APPEND, b" ", b"HTTP/1.1 408"),
    ],
    ids=[
        "silent",
        "half a line",
        "half a head",
        "idle",
        "idle after long headers",
        "idle, newlines",
        "second head",
        "refused",
        "refused later",
        "body",
    ],
)
def test_slow_clients_are_dropped(tmp_path, monkeypatch, begin, more, starts):
    monkeypatch.setattr(guard, "BODY_START", 0.3)
    monkeypatch.setattr(connections, "DRAIN", 0.3)
    monkeypatch.setattr(connections, "LINGER", 0.1)
    with listening(tmp_path / "s.db", head_seconds=0.3, idle_seconds=0.3) as (server, port), connected(port) as opened:
        opened.sendall(begin)
        if more:
            if starts:
                time.sleep(0.1)
            assert dribble(opened, more, 0.05) < 15
        else:
            answer = answer_of(opened)
            assert answer.startswith(starts)
            assert b"HTTP/1.1 408" not in answer or b"HTTP/1.1 200" not in answer or begin.count(HEAD) == 2
        assert wait_for(lambda: not server.server_state.connections)


def wait_for(condition, seconds=15):
    until = time.monotonic() + seconds
    while not condition() and time.monotonic() < until:
        time.sleep(0.02)
    return condition()


def test_a_refusal_reaches_a_client_that_is_still_sending(tmp_path):
    """Its connection goes on if the body comes in time: an honest mistake."""
    with listening(tmp_path / "s.db", max_body=1000) as (_, port), connected(port) as opened:
        opened.sendall(b"POST /sets/a/elements HTTP/1.1\r\nHost: localhost\r\nContent-Length: 3000000\r\n\r\n")
        opened.sendall(b" " * 3_000_000)
        assert status_of(opened.recv(65536)) == 413
        opened.sendall(HEAD + b"\r\n")
        assert status_of(opened.recv(65536)) == 200


def test_answers_that_are_not_read_end(tmp_path, monkeypatch):
    monkeypatch.setattr(connections, "UNREAD", 0.3)
    with listening(tmp_path / "s.db") as (server, port), connected(port) as opened:
        opened.settimeout(0.2)
        with contextlib.suppress(TimeoutError, ConnectionError):
            for _ in range(2000):
                opened.sendall(b"GET /openapi.json HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert wait_for(lambda: not server.server_state.connections)
        assert httpx.get(f"http://127.0.0.1:{port}/health").status_code == 200


def test_silent_clients_keep_nobody_out(tmp_path, monkeypatch):
    monkeypatch.setattr(connections, "YOUNG", 0.1)
    with listening(tmp_path / "s.db", connections=5) as (server, port), contextlib.ExitStack() as stack:
        for begin in (b"", HEAD, APPEND, HEAD + b"\r\n") * 5:
            stack.enter_context(connected(port)).sendall(begin)
        for _ in range(20):
            assert httpx.get(f"http://127.0.0.1:{port}/health").status_code == 200
            time.sleep(0.03)
        assert len(server.server_state.connections) <= 40
        assert "displaced" in httpx.get(f"http://127.0.0.1:{port}/metrics").text


def test_a_request_at_work_is_never_displaced(tmp_path, monkeypatch):
    go = threading.Event()
    monkeypatch.setattr(ss.StateStore, "describe", lambda *_: (go.wait(20), (7, 8))[1])
    with listening(tmp_path / "s.db", connections=2) as (_, port), contextlib.ExitStack() as stack:
        busy = [stack.enter_context(connected(port)) for _ in range(2)]
        for opened in busy:
            opened.sendall(b"GET /sets/a HTTP/1.1\r\nHost: localhost\r\n\r\n")
        time.sleep(0.2)
        assert httpx.get(f"http://127.0.0.1:{port}/model").status_code == 503
        go.set()
        assert [status_of(opened.recv(65536)) for opened in busy] == [200, 200]
        assert httpx.get(f"http://127.0.0.1:{port}/model").status_code == 200


def test_websockets_are_connections_and_at_most_half_of_them(tmp_path):
    with listening(tmp_path / "s.db", connections=4) as (server, port), contextlib.ExitStack() as stack:
        url = f"ws://127.0.0.1:{port}/sets/a/live"
        for _ in range(2):
            assert json.loads(stack.enter_context(websockets.sync.client.connect(url)).recv())["count"] == 0
        for _ in range(3):
            with pytest.raises(websockets.InvalidStatus) as refused:
                websockets.sync.client.connect(url)
            assert refused.value.response.status_code == 503
        assert httpx.get(f"http://127.0.0.1:{port}/health").status_code == 200
        for _ in range(50):
            stack.enter_context(connected(port))
        assert wait_for(lambda: len(server.server_state.connections) <= 32)
        assert httpx.get(f"http://127.0.0.1:{port}/health").status_code == 200
