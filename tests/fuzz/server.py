"""Hostile requests to a server of this machine: damaged bodies and states, hostile request lines and headers."""

import collections
import http.client
import random
import socket
import threading
import time
from contextlib import suppress
from pathlib import Path

from setstream.serve.bodies import JSON
from tests.fuzz.children import Outcome
from tests.fuzz.targets import bodies, damage_state
from tests.serve.conftest import Server
from tests.serve.mutations import mutate

WORDS = [b"\x00", b"\r", b"\n", b"http://[", b"A" * 5000, b"%00", b"%ff%fe", b"..", b"\xff\xfe", b"chunked", b"-1", b"9" * 30]
PATHS = [b"/sets/a/elements", b"/sets/a/prediction", b"/sets/%ff/state", b"/sets?limit=9999999", b"/health", b"/metrics"]
NAMES = [b"Host", b"Origin", b"Content-Length", b"Transfer-Encoding", b"Content-Type", b"Authorization", b"Upgrade", b"Expect"]


def hostile(draw: random.Random) -> bytes:
    """A request whose line and headers are made to harm."""
    method = draw.choice([b"GET", b"POST", b"PUT", b"DELETE", b"PATCH", b"G\x00T", b"A" * 100])
    path = draw.choice(PATHS) + (draw.choice(WORDS) if draw.random() < 0.3 else b"")
    lines = [method + b" " + path + b" " + draw.choice([b"HTTP/1.1"] * 6 + [b"HTTP/9.9", b""])]
    if draw.random() < 0.8:
        lines.append(b"Host: localhost")
    lines += [draw.choice(NAMES) + b": " + draw.choice(WORDS) for _ in range(draw.randrange(4))]
    body = draw.randbytes(draw.randrange(40))
    if draw.random() < 0.7:
        lines.append(b"Content-Length: " + str(len(body)).encode())
    request = b"\r\n".join([*lines, b"", body])
    return mutate(request, draw) if draw.random() < 0.5 else request


def answer(port: int, request: bytes, wait: float) -> int:
    """The status of a raw request; zero where the server closes without one, or waits for more of it."""
    with socket.create_connection(("127.0.0.1", port), wait) as line:
        with suppress(OSError):
            line.sendall(request)
        head = b""
        with suppress(OSError):
            while b"\r\n" not in head and (more := line.recv(4096)):
                head += more
    words = head.split(b" ", 2)
    return int(words[1]) if len(words) > 1 and words[0].startswith(b"HTTP/") and words[1].isdigit() else 0


def memory_of(pid: int) -> int:
    """Bytes that a process has had at most."""
    line = next(line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


def attack_server(folder: Path, count: int, seconds: float = 600.0) -> Outcome:
    """So many requests to one server, which must answer an honest client all the while, and never with a 5xx."""
    outcome, ends, kinds = Outcome(), time.monotonic() + seconds, collections.Counter()
    server = Server(folder / "states.db")
    threading.Thread(target=server.process.stderr.read, daemon=True).start()  # a line for each request would fill the pipe
    originals = sorted(bodies(folder).items())
    try:
        honest = http.client.HTTPConnection("127.0.0.1", server.port, timeout=30)
        honest.request("POST", "/sets/honest/elements", b'{"elements": [[1, 2, 3]]}', {"Content-Type": JSON})
        honest.getresponse().read()
        honest.request("GET", "/sets/honest/state")
        state = honest.getresponse().read()
        for seed in range(count):
            if time.monotonic() > ends:
                break
            draw = random.Random(seed)
            kind = draw.choice(["headers", "headers", "body", "state"])
            if kind == "headers":
                request = hostile(draw)
            else:
                name, body = draw.choice(originals)
                media, place = name.split(" ", 1)[1], b"POST /sets/a/elements"
                body = mutate(body, draw) if kind == "body" else damage_state(state, draw)
                if kind == "state":
                    media, place = "application/octet-stream", draw.choice([b"PUT /sets/b/state", b"POST /sets/b/state"])
                head = f" HTTP/1.1\r\nHost: localhost\r\nContent-Type: {media}\r\nContent-Length: {len(body)}\r\n\r\n"
                request = place + head.encode() + body
            began = time.perf_counter()
            status = answer(server.port, request, wait=0.1 if kind == "headers" else 30.0)
            outcome.slowest = max(outcome.slowest, time.perf_counter() - began)
            outcome.inputs += 1
            kinds[status] += 1
            if status >= 500 and status != 505:
                outcome.wrong.append(f"server, seed {seed}: {status} for {request[:300]!r}")
            if server.process.poll() is not None:
                outcome.wrong.append(f"server, seed {seed}: it ended with {server.process.returncode} after {request[:300]!r}")
                break
            if seed % 200 == 0:
                honest.request("GET", "/sets/honest/prediction")
                told = honest.getresponse()
                told.read()
                if told.status != 200:
                    outcome.wrong.append(f"server, seed {seed}: the honest client was told {told.status}")
        outcome.memory = memory_of(server.process.pid)
    finally:
        server.process.terminate()
        server.process.wait(30)
    outcome.became = collections.Counter({str(status): times for status, times in kinds.items()})
    return outcome
