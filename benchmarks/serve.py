"""Load on `setstream serve` over loopback: appends per second, CPU, latencies, reads, and answered appends that are missing.

    python benchmarks/serve.py                              10 s of load, 1,000 sets, two client processes, SQLite
    python benchmarks/serve.py --kill                       SIGKILL in the middle, and a new server on the same file
    python benchmarks/serve.py --states postgresql://...    the states in PostgreSQL
    python benchmarks/serve.py --keys --tile 3600           each append with an Idempotency-Key, in a store with tiles
    python benchmarks/serve.py --lines 100                  events of 100 sets in one request, as NDJSON
    python benchmarks/serve.py --compare                    CPU per append: plain, keys, tiles, NDJSON in turns, in one process

Each client process keeps `--connections` requests on the way, each the next append of `--elements` elements to one of the
1,000 sets, so every set is written to all the time. It notes what was answered, by set. Afterwards the count of every set is
asked for: at least all answered elements, at most those and the ones whose answer was on its way when the server was killed.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np


async def append(port: int, path: str, body: bytes, streams: list[Any], key: str = "") -> None:
    """One request over a connection that stays open; raises OSError when the server is gone."""
    if not streams:
        streams[:] = await asyncio.open_connection("127.0.0.1", port)
    reader, writer = streams
    kind = "x-ndjson" if path == "/events" else "json"
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/{kind}\r\n"
    head += f'Idempotency-Key: "{key}"\r\n' if key else ""
    writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
    status = await reader.readline()
    length = 0
    while (line := await reader.readline()) not in (b"\r\n", b""):
        if line.lower().startswith(b"content-length:"):
            length = int(line.split(b":")[1])
    await reader.readexactly(length)
    if not status.startswith(b"HTTP/1.1 200"):
        raise ConnectionError(f"answered {status!r}")


async def load(
    port_file: Path, number: int, sets: int, connections: int, elements: int, keys: bool, lines: int
) -> dict[str, Any]:
    """Append until a file says that it is over; when the server dies, wait for the next."""
    rng = np.random.default_rng(number)
    bodies = [json.dumps({"elements": rng.standard_normal((elements, 2)).round(4).tolist()}).encode() for _ in range(64)]
    answered = [0] * sets
    unsure = [0] * sets
    seconds: list[float] = []
    over = port_file.with_name("over")

    async def one(own: int) -> None:
        order = list(range(own, sets, connections)) or [own % sets]
        streams: list[Any] = []
        turn = 0
        while not over.exists():
            places, body = [order[turn % len(order)]], bodies[(turn + own) % len(bodies)]
            path = f"/sets/set-{places[0]}/elements"
            if lines:  # {"id": ..., "elements": ...}, some sets from a random one on
                first, path = int(rng.integers(sets)), "/events"
                places = [place % sets for place in range(first, first + lines)]
                body = b"\n".join(b'{"id": "set-%d", %s' % (place, body[1:]) for place in places)
            turn += 1
            begin = time.perf_counter()
            try:
                port = int(port_file.read_text()) if not streams else 0
                await append(port, path, body, streams, f"{number}-{own}-{turn}" if keys else "")
            except (OSError, asyncio.IncompleteReadError, ValueError):
                for place in places:
                    unsure[place] += elements * bool(streams)  # connected: it may have arrived
                streams.clear()
                await asyncio.sleep(0.2)
                continue
            seconds.append(time.perf_counter() - begin)
            for place in places:
                answered[place] += elements

    await asyncio.gather(*(one(own) for own in range(connections)))
    return {"answered": answered, "unsure": unsure, "seconds": seconds}


def start(states: str, model: str, port_file: Path) -> subprocess.Popen[str]:
    """Start a server; its first line of output says where it is."""
    command = [
        sys.executable,
        "-m",
        "setstream.cli",
        "serve",
        model,
        "--states",
        states,
        "--port",
        "0",
        "--log-level",
        "warning",
    ]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    line = server.stdout.readline() if server.stdout else ""
    if "127.0.0.1:" not in line:
        raise SystemExit("the server did not start")
    port_file.write_text(line.split("127.0.0.1:")[1].partition(",")[0])
    return server


def counts_of(port: int) -> dict[str, int]:
    import httpx

    found: dict[str, int] = {}
    after: str | None = ""
    while after is not None:
        page = httpx.get(f"http://127.0.0.1:{port}/sets", params={"after": after, "limit": 1000}, timeout=60).json()
        found |= {own["id"]: own["count"] for own in page["sets"]}
        after = page["next"]
    return found


def reads_of(port: int, ids: list[str], reads: int = 500) -> str:
    """Predictions one after another over one connection: their median time, and the server's CPU for each."""
    import httpx

    seconds: list[float] = []
    _, cpu = facts_of(port)
    with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as client:
        for turn in range(reads):
            begin = time.perf_counter()
            client.get(f"/sets/{ids[turn % len(ids)]}/prediction").raise_for_status()
            seconds.append(time.perf_counter() - begin)
    _, cpu_after = facts_of(port)
    return (
        f"{reads} predictions: median {1000 * statistics.median(seconds):.1f} ms, CPU {1000 * (cpu_after - cpu) / reads:.2f} ms"
    )


def facts_of(port: int) -> tuple[float, float]:
    """Changes that shared a commit, on average, and the CPU seconds that the server took so far."""
    import httpx

    facts = dict(
        line.rsplit(" ", 1) for line in httpx.get(f"http://127.0.0.1:{port}/metrics").text.splitlines() if line[0] != "#"
    )
    together = float(facts["setstream_round_changes_sum"]) / max(1.0, float(facts["setstream_round_changes_count"]))
    return together, float(facts["process_cpu_seconds_total"])


async def compare(model: str, rounds: int = 40, size: int = 128, elements: int = 10) -> None:
    """CPU per append of four servers in this process, without connections: rounds of appends that arrive together, in turns."""
    import setstream as ss
    from setstream.serve import Options, create_app
    from setstream.tasks.loading import open_model

    rng = np.random.default_rng(0)
    bodies = [json.dumps({"elements": rng.standard_normal((elements, 2)).round(4).tolist()}).encode() for _ in range(size)]

    async def post(app: Any, path: str, body: bytes, key: str = "") -> None:
        headers = [
            (b"host", b"localhost"),
            (b"content-type", b"application/" + (b"x-ndjson" if path == "/events" else b"json")),
        ]
        headers += [(b"content-length", b"%d" % len(body))] + [(b"idempotency-key", key.encode())] * bool(key)
        scope = {
            "type": "http",
            "method": "POST",
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "scheme": "http",
        }
        status = []

        async def receive() -> dict[str, Any]:
            return {"type": "http.request", "body": body, "more_body": False}

        async def send(message: dict[str, Any]) -> None:
            status.append(message.get("status", 200))

        address = {
            "client": ("127.0.0.1", 1),
            "server": ("127.0.0.1", 80),
            "scheme": "http",
            "root_path": "",
            "http_version": "1.1",
        }
        await app({**scope, **address, "headers": headers, "asgi": {"version": "3.0"}}, receive, send)
        if set(status) != {200}:
            raise SystemExit(f"answered {status}")

    with tempfile.TemporaryDirectory() as folder:
        async with contextlib.AsyncExitStack() as running:
            apps, spent = {}, dict[str, list[float]]()
            for name in ("plain", "with a key", "with tiles of an hour", "NDJSON, 32 sets per request"):
                store = ss.StateStore(f"{folder}/{name}.db", open_model(model), tile=3600 if "tiles" in name else None)
                apps[name] = create_app(store, Options())
                await running.enter_async_context(apps[name].api.router.lifespan_context(apps[name].api))
            for turn in range(rounds):
                for name, app in apps.items():
                    if "NDJSON" in name:
                        lines = [b'{"id": "set-%d", %s' % (place, body[1:]) for place, body in enumerate(bodies)]
                        work = [post(app, "/events", b"\n".join(lines[start : start + 32])) for start in range(0, size, 32)]
                    else:
                        keys = [f'"{turn}-{place}"' if "key" in name else "" for place in range(size)]
                        work = [post(app, f"/sets/set-{place}/elements", bodies[place], keys[place]) for place in range(size)]
                    begin = time.process_time()
                    await asyncio.gather(*work)
                    spent.setdefault(name, []).append(1000 * (time.process_time() - begin) / size)
    print("| appends | CPU per append, ms | compared with plain |\n|---|---|---|")
    for name, times in spent.items():
        middle = statistics.median(times)
        print(f"| {name} | {middle:.3f} | {middle / statistics.median(spent['plain']):.2f} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--sets", type=int, default=1000)
    parser.add_argument("--clients", type=int, default=2, help="client processes")
    parser.add_argument("--connections", type=int, default=64, help="requests on the way, each client")
    parser.add_argument("--elements", type=int, default=10, help="elements of a request")
    parser.add_argument("--model", default="umbc+set-transformer")
    parser.add_argument("--states", help="a file or postgresql://...; a temporary file unless given")
    parser.add_argument("--kill", action="store_true", help="SIGKILL in the middle, then a new server")
    parser.add_argument("--keys", action="store_true", help="send each append with a key")
    parser.add_argument("--tile", type=float, help="make the store with tiles of so many seconds")
    parser.add_argument("--lines", type=int, default=0, help="sets per request of NDJSON; 0: one append per request")
    parser.add_argument("--compare", action="store_true", help="CPU per append only, without connections")
    parser.add_argument("--worker", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        file, number = options.worker
        work = load(Path(file), int(number), options.sets, options.connections, options.elements, options.keys, options.lines)
        print(json.dumps(asyncio.run(work)))
        return
    if options.compare:
        asyncio.run(compare(options.model))
        return
    with tempfile.TemporaryDirectory() as folder:
        states, port_file = options.states or f"{folder}/states.db", Path(folder) / "port"
        if options.tile:  # clients do without torch
            import setstream as ss
            from setstream.tasks.loading import open_model

            ss.StateStore(states, open_model(options.model), tile=options.tile).close()
        server = start(states, options.model, port_file)
        before = counts_of(int(port_file.read_text()))
        _, cpu = facts_of(int(port_file.read_text()))
        shared = ["--sets", str(options.sets), "--connections", str(options.connections), "--elements", str(options.elements)]
        shared += ["--lines", str(options.lines)] + ["--keys"] * options.keys
        workers = [
            subprocess.Popen(
                [sys.executable, __file__, *shared, "--worker", str(port_file), str(number)],
                stdout=subprocess.PIPE,
                text=True,
            )
            for number in range(options.clients)
        ]
        down, early = 0.0, options.seconds * random.uniform(0.3, 0.7)
        time.sleep(early)
        if options.kill:
            server.send_signal(signal.SIGKILL)
            server.wait()
            moment = time.time()
            server = start(states, options.model, port_file)
            down = time.time() - moment
        time.sleep(options.seconds - early)
        port_file.with_name("over").touch()
        found = [json.loads(worker.communicate()[0]) for worker in workers]
        port = int(port_file.read_text())
        kept, (together, cpu_after) = counts_of(port), facts_of(port)
        reads = reads_of(port, list(kept))
        server.send_signal(signal.SIGTERM)
        server.wait()
    seconds = sorted(own for client in found for own in client["seconds"])
    answered = [sum(client["answered"][place] for client in found) for place in range(options.sets)]
    unsure = [sum(client["unsure"][place] for client in found) for place in range(options.sets)]
    new = [kept.get(f"set-{place}", 0) - before.get(f"set-{place}", 0) for place in range(options.sets)]
    missing = sum(max(0, own - there) for own, there in zip(answered, new, strict=True))
    strange = sum(max(0, there - own - maybe) for own, there, maybe in zip(answered, new, unsure, strict=True))
    appends, percentiles = len(seconds) * max(1, options.lines), statistics.quantiles(seconds, n=100)
    rate = appends / options.seconds
    row = [f"{options.sets:,}", f"{rate:,.0f}", f"{rate * options.elements:,.0f}"]
    row += [f"{1000 * percentiles[place]:.0f} ms" for place in (49, 98)]
    row += ["" if options.kill else f"{1000 * (cpu_after - cpu) / appends:.2f} ms"]
    row += [f"{together:.0f}", f"{sum(answered):,}", f"{missing}", f"{strange}"]
    titles = ("sets", "appends/s", "elements/s", "median", "p99", "CPU per append", "changes per commit", "answered elements")
    print(f"| {' | '.join((*titles, 'missing', 'more than sent'))} |")
    print("|---|---|---|---|---|---|---|---|---|---|")
    print(f"| {' | '.join(row)} |\n\n{reads}")
    if options.kill:
        print(f"\nkilled once; {down:.1f} s until the next server answered; {sum(unsure)} elements were on their way, ", end="")
        print(f"{sum(new) - sum(answered)} of them kept")
    if missing or strange:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
