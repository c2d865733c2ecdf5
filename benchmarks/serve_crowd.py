"""Silent and dribbling clients against `setstream serve --connections 50`, and what two honest clients notice.

    python benchmarks/serve_crowd.py --seconds 60 --crowd 200

A quarter of the crowd each: says nothing; sends its headers a byte at a time; sends its body a byte at a time; asks once and
then keeps its connection. Who is dropped comes back at once. Two honest clients append to a set and ask for its prediction,
one with a connection that is kept, one with a new connection for every request. First without the crowd, then with it.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import multiprocessing
import subprocess
import sys
import tempfile
import time
from typing import Any

import httpx
import numpy as np

HEAD = b"GET /health HTTP/1.1\r\nHost: localhost\r\n"
APPEND = b"POST /sets/a/elements HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 9999\r\n\r\n"
CROWD = {"silent": (b"", b""), "headers": (HEAD, b"X"), "body": (APPEND, b" "), "idle": (HEAD + b"\r\n", b"")}


async def bother(port: int, kind: str, drops: dict[str, int], stop: asyncio.Event) -> None:
    """One of the crowd, until told to stop."""
    begin, more = CROWD[kind]
    while not stop.is_set():
        writer = None
        with contextlib.suppress(OSError):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(begin)
            while not stop.is_set():
                with contextlib.suppress(TimeoutError):
                    if not await asyncio.wait_for(reader.read(65536), 0.5):
                        break
                writer.write(more)
        if writer is not None:
            writer.close()
        drops[kind] += 1


async def ask(url: str, name: str, keep: bool, seconds: float) -> tuple[list[float], list[str]]:
    """An honest client: its latencies in milliseconds, and what went wrong."""
    latencies, problems = [], []
    limits = httpx.Limits(max_keepalive_connections=1 if keep else 0)
    async with httpx.AsyncClient(base_url=url, timeout=30, limits=limits) as client:
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            for method, path, body in (("POST", "elements", {"elements": [[1.0, 2.0]]}), ("GET", "prediction", None)):
                began = time.perf_counter()
                try:
                    answer = await client.request(method, f"/sets/{name}/{path}", json=body)
                    if answer.status_code != 200:
                        problems.append(f"{answer.status_code}")
                except httpx.HTTPError as error:
                    problems.append(repr(error))
                latencies.append(1000 * (time.perf_counter() - began))
                await asyncio.sleep(0.02)
    return latencies, problems


async def gather(port: int, crowd: int, seconds: float) -> dict[str, int]:
    """The crowd, for so many seconds: how often each kind was dropped."""
    stop, drops = asyncio.Event(), dict.fromkeys(CROWD, 0)
    asyncio.get_running_loop().call_later(seconds, stop.set)
    tasks = [asyncio.create_task(bother(port, kind, drops, stop)) for kind in list(CROWD) * (crowd // len(CROWD))]
    await asyncio.wait([*tasks, asyncio.create_task(asyncio.sleep(seconds))], timeout=seconds + 10)
    return drops


def bother_all(port: int, crowd: int, seconds: float, told: Any) -> None:
    """The crowd in a process of its own."""
    told.put(asyncio.run(gather(port, crowd, seconds)))


async def measure(port: int, crowd: int, seconds: float) -> dict[str, object]:
    """What the honest clients see beside a crowd of this size."""
    context = multiprocessing.get_context("spawn")
    told = context.Queue()
    others = context.Process(target=bother_all, args=(port, crowd, seconds + 4, told), daemon=True)
    others.start()
    await asyncio.sleep(3.0)
    url = f"http://127.0.0.1:{port}"
    found = await asyncio.gather(*(ask(url, name, name == "kept", seconds) for name in ("kept", "new")))
    latencies = np.array([own for one in found for own in one[0]])
    return {
        "crowd": crowd,
        "requests": len(latencies),
        "problems": [own for one in found for own in one[1]][:10],
        "milliseconds": {f"p{q}": round(float(np.percentile(latencies, q)), 1) for q in (50, 99, 100)},
        "dropped": told.get(timeout=60),
    }


def main() -> None:
    """Start the server, and measure."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--seconds", type=float, default=60.0)
    options.add_argument("--crowd", type=int, default=200)
    options.add_argument("--connections", type=int, default=50)
    asked = options.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "setstream.cli", "serve", "deepsets", "--port", "0", "--log-level", "warning"]
        command += ["--states", f"{folder}/s.db", "--connections", str(asked.connections)]
        server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        try:
            assert server.stdout is not None
            port = int(server.stdout.readline().split("127.0.0.1:")[1].split()[0])
            for crowd in (0, asked.crowd):
                print(json.dumps(asyncio.run(measure(port, crowd, asked.seconds))), flush=True)
        finally:
            server.terminate()
            server.wait(60)


if __name__ == "__main__":
    main()
