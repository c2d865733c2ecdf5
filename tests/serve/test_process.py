"""The command itself, in a process of its own: killed, stopped, and spoken to without manners."""

import asyncio
import json
import logging
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import httpx
import pytest
import websockets
from typer.testing import CliRunner

import setstream as ss
from setstream.cli.commands import app
from setstream.errors import ConfigurationError, MismatchError
from setstream.serve.app import JsonLines
from tests.serve.conftest import Server, listening, make

BODY = b'{"elements": [[1, 2, 3]]}'
HEADERS = {"content-type": "application/json"}
TOKEN = "a-token-that-nobody-guesses"


def appending(url, ids, stop, noted):
    """Append until the server is gone; note each append that was answered."""
    with httpx.Client(base_url=url, timeout=30) as client:
        while not stop.is_set():
            for id in ids:
                try:
                    answer = client.post(f"/sets/{id}/elements", content=BODY, headers=HEADERS)
                except httpx.HTTPError:
                    return
                assert answer.status_code == 200
                noted[id] = noted.get(id, 0) + 1


def test_nothing_that_was_answered_is_lost(tmp_path):
    """Two servers one after the other on one file: the first is killed at work, the second asked to stop."""
    place, threads_of = tmp_path / "s.db", 4
    total: dict[str, int] = {}
    for number in (signal.SIGKILL, signal.SIGTERM):
        with Server(place) as server:
            stop, noted = threading.Event(), [{} for _ in range(threads_of)]
            threads = [
                threading.Thread(target=appending, args=(server.url, [f"s{k % 2}", f"own-{k}"], stop, noted[k]))
                for k in range(threads_of)
            ]
            for thread in threads:
                thread.start()
            while sum(sum(own.values()) for own in noted) < 30 and any(thread.is_alive() for thread in threads):
                time.sleep(0.02)
            code, log = server.stop(number)
            for thread in threads:
                thread.join(30)
            assert code == -number
            for own in noted:
                for id, count in own.items():
                    total[id] = total.get(id, 0) + count
    lines = [json.loads(line) for line in log.splitlines()]  # of the second: every line is JSON
    assert {line.get("status") for line in lines if line["event"] == "request"} == {200}
    assert sum(total.values()) >= 60
    with ss.StateStore(place, make()) as store:
        kept = {id: store.count(id) for id in total}
        assert all(total[id] <= kept[id] for id in total), (total, kept)
        assert sum(kept.values()) <= sum(total.values()) + 2 * threads_of  # done, and not yet answered
        for id in total:
            assert store.predict(id).isfinite().all()


def talk(port, data, cut):
    """Send bytes, if asked for cut the line, and give the beginning of what comes back."""
    with socket.create_connection(("127.0.0.1", port), timeout=20) as connection:
        try:
            connection.sendall(data)
            if cut:
                connection.shutdown(socket.SHUT_WR)
            return connection.recv(65536)
        except ConnectionError:
            return b""


def request(line, *headers, body=b""):
    return "\r\n".join([f"{line} HTTP/1.1", *headers, "", ""]).encode() + body


HOST, AUTH, KIND = "Host: localhost", f"Authorization: Bearer {TOKEN}", "Content-Type: application/json"
APPEND = "POST /sets/trick/elements"
TRICKS = {
    "dot-dot": (request("GET /sets/../model", HOST, AUTH), {400}),
    "encoded dot-dot": (request("GET /sets/%2e%2e/model", HOST, AUTH), {400}),
    "encoded slash": (request("GET /sets/a%2Fstate", HOST, AUTH), {400}),
    "open path as a prefix": (request("GET /health/../sets", HOST), {401}),
    "open path, encoded": (request("GET /playground/..%2f..%2fsets", HOST), {401}),
    "two slashes": (request("GET //sets", HOST), {401}),
    "absolute form": (request("GET http://localhost/sets", HOST), {400, 401}),
    "newline in the path": (request("GET /sets/a%0d%0aX:1", HOST, AUTH), {400}),
    "null byte": (request("GET /sets/a%00", HOST, AUTH), {400}),
    "no host": (request("GET /sets", AUTH), {400, 421}),
    "two hosts": (request("GET /sets", HOST, "Host: evil.example", AUTH), {400}),
    "two tokens": (request("GET /sets", HOST, AUTH, "Authorization: Bearer x"), {401}),
    "a length that lies high": (request(APPEND, HOST, AUTH, KIND, "Content-Length: 999999999999", body=BODY), {413}),
    "a length beyond 64 bits": (request(APPEND, HOST, AUTH, KIND, f"Content-Length: {9 * 10**30}", body=BODY), {400, 413}),
    "two lengths": (request(APPEND, HOST, AUTH, KIND, "Content-Length: 25", "Content-Length: 3", body=BODY), {400}),
    "length and chunks": (
        request(APPEND, HOST, AUTH, KIND, "Content-Length: 3", "Transfer-Encoding: chunked", body=b"3\r\nabc\r\n0\r\n\r\n"),
        {400, 422},
    ),
    "chunks over the limit": (
        request(
            APPEND,
            HOST,
            AUTH,
            KIND,
            "Transfer-Encoding: chunked",
            body=b"1000\r\n" + b" " * 4096 + b"\r\n1000\r\n" + b" " * 4096 + b"\r\n0\r\n\r\n",
        ),
        {413},
    ),
    "a chunk size that lies": (
        request(APPEND, HOST, AUTH, KIND, "Transfer-Encoding: chunked", body=b"ffffffffffffffff\r\nabc"),
        {400, 413, None},
    ),
    "a body that is cut off": (request(APPEND, HOST, AUTH, KIND, "Content-Length: 100", body=BODY), {400, 422, None}),
    "a folded header": (request("GET /sets", HOST, AUTH, "X-Long: a\r\n b"), {200, 400}),
    "a huge header": (request("GET /sets", HOST, AUTH, "X-Long: " + "a" * 200_000), {431}),
    "no HTTP at all": (b"\x16\x03\x01\x02\x00" * 20, {400, None}),
    "an unknown method": (request("BREW /sets/trick", HOST, AUTH), {400, 405}),
}


def test_path_and_header_tricks(tmp_path, caplog):
    with (
        caplog.at_level(logging.INFO, "setstream.serve"),
        listening(tmp_path / "s.db", tokens=(TOKEN,), max_body=5000) as (_, port),
    ):
        for name, (data, expected) in TRICKS.items():
            answer = talk(port, data, cut=None in expected)
            status = int(answer[9:12]) if answer.startswith(b"HTTP/1.1 ") else None
            assert status in expected, (name, answer)
        answer = httpx.get(f"http://127.0.0.1:{port}/sets", headers={"Authorization": f"Bearer {TOKEN}"})
        assert answer.json() == {"sets": [], "next": None}  # no trick made a set
    assert TOKEN not in "".join(map(JsonLines().format, caplog.records))
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


def test_a_body_that_never_arrives_is_given_up(tmp_path):
    with (
        listening(tmp_path / "s.db", body_seconds=0.3) as (_, port),
        socket.create_connection(("127.0.0.1", port), timeout=20) as connection,
    ):
        connection.sendall(request(APPEND, HOST, KIND, "Content-Length: 100", body=b"{"))
        assert connection.recv(1000).startswith(b"HTTP/1.1 408")


def test_a_real_websocket_sees_changes_and_lets_the_server_stop(tmp_path):
    async def watch(server, port):
        url = f"ws://127.0.0.1:{port}/sets/a/live"
        with pytest.raises(websockets.InvalidStatus) as refused:
            await websockets.connect(url)
        assert refused.value.response.status_code == 401
        protocols = [websockets.Subprotocol(own) for own in ("setstream", f"bearer.{TOKEN}")]
        async with (
            websockets.connect(url, subprotocols=protocols) as connection,
            httpx.AsyncClient(headers=HEADERS | {"Authorization": f"Bearer {TOKEN}"}) as client,
        ):
            seen = [json.loads(await connection.recv())["count"]]
            for _ in range(3):
                await client.post(f"http://127.0.0.1:{port}/sets/a/elements", content=BODY)
            while seen[-1] < 3:
                seen.append(json.loads(await connection.recv())["count"])
            assert seen == sorted(set(seen))
            server.should_exit = True
            with pytest.raises(websockets.ConnectionClosed):
                await asyncio.wait_for(connection.recv(), 20)

    with listening(tmp_path / "s.db", tokens=(TOKEN,)) as (server, port):
        asyncio.run(watch(server, port))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nothing"], "not a run folder, a saved model or a shipped one"),
        (["tests.serve.conftest:pytest"], "must be an ss.SetModel"),
        (["tests.serve.conftest:make", "--token-file", "nowhere"], "cannot be read"),
        (["umbc+passes", "--port", "0"], "reads its sets 3 times (ss.MultiPass), which is not possible for a store"),
        (["tests.serve.conftest:make", "--port", "0", "--tile", "0"], "a tile is a positive number of seconds"),
    ],
)
def test_options_that_cannot_be(tmp_path, arguments, message):
    done = CliRunner().invoke(app, ["serve", *arguments, "--states", str(tmp_path / "s.db")])
    assert isinstance(done.exception, ConfigurationError)
    assert message in str(done.exception)
    assert not list(tmp_path.iterdir())


def test_states_of_another_model_are_not_taken(tmp_path):
    ss.StateStore(tmp_path / "s.db", make()).close()
    done = CliRunner().invoke(app, ["serve", "deepsets", "--port", "0", "--states", str(tmp_path / "s.db")])
    assert isinstance(done.exception, MismatchError)
    assert "For deepsets, give --states and the name of a new file" in str(done.exception)


def test_a_port_that_is_taken(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        done = CliRunner().invoke(app, ["serve", "deepsets", "--port", port, "--states", str(tmp_path / "s.db")])
    assert isinstance(done.exception, ConfigurationError)
    assert f"port {port}" in str(done.exception)
    assert "another --port" in str(done.exception)
    assert not (tmp_path / "s.db").exists()


def test_a_saved_model_of_ones_own_is_named_with_its_builder(tmp_path):
    make().save_pretrained(tmp_path / "mine", builder="tests.serve.conftest:make", options={"seed": 0})
    done = CliRunner().invoke(app, ["serve", str(tmp_path / "mine"), "--port", "0", "--states", str(tmp_path / "s.db")])
    assert "--trust tests.serve.conftest:make" in str(done.exception)
    with Server(tmp_path / "s.db", "--builder", "tests.serve.conftest:make", model=str(tmp_path / "mine")) as server:
        line = f"{tmp_path / 'mine'} at {server.url}, states in {tmp_path / 's.db'}   (Ctrl-C stops it)\n"
        assert server.process.stdout.readline() == line
        assert httpx.get(f"{server.url}/model").json()["element_width"] == 3
    done = CliRunner().invoke(app, ["serve", "deepsets", "--builder", "tests.serve.conftest:make"])
    assert "builder is for folders written by save_pretrained" in str(done.exception)


def test_a_server_answers_at_its_own_address(tmp_path):
    with listening(tmp_path / "s.db", host="127.0.0.2") as (_, port):
        assert httpx.get(f"http://127.0.0.2:{port}/sets").json() == {"sets": [], "next": None}
        assert httpx.get(f"http://127.0.0.2:{port}/sets", headers={"Host": "evil.example"}).status_code == 421


@pytest.mark.skipif(shutil.which("curl") is None, reason="there is no curl here")
def test_the_routes_of_the_page_run_as_read(tmp_path):
    page = (Path(__file__).parents[2] / "docs/serve.md").read_text().partition("## Routes")[2]
    files, lines = (re.search(rf"```{kind}\n(.*?)```", page, re.DOTALL)[1] for kind in ("python", "sh"))
    with Server(tmp_path / "s.db", "--tile", "3600", model="umbc+set-transformer") as server:
        code = 'curl() { command curl -fsS "$@"; echo; }; ' + lines.replace("http://127.0.0.1:8000", server.url)
        subprocess.run([sys.executable, "-c", files], cwd=tmp_path, check=True)
        done = subprocess.run(["bash", "-euo", "pipefail", "-c", code], cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        counts = {one["id"]: one["count"] for one in httpx.get(f"{server.url}/sets").json()["sets"]}
    assert counts == {"a": 1, "b": 1000, "c": 2 * 2002, **{f"set-{n}": 10 for n in range(10)}}
