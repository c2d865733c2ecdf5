"""Silent and dribbling clients against `setstream serve --connections 50`, and what two honest clients notice.

    python benchmarks/serve_crowd.py --seconds 60 --crowd 200

A quarter of the crowd each: sends nothing; sends its headers a byte at a time; sends its body a byte at a time; sends one
request and then keeps its connection. Dropped clients reconnect at once. Two honest clients append to a set and get its
prediction, one with a connection that is kept, one with a new connection for every request. First without the crowd, then
with it. Beside what the clients measure: what the server measured for the same requests (from its log), and the longest delay
of a task of the clients' process that only sleeps, which shows how long the machine kept that process waiting.
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
from pathlib import Path
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
    async with httpx.AsyncClient(base_url=url, timeout=30, limits=limits, verify=False) as client:
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


async def longest_pause() -> float:
    """Sleep 10 ms at a time until cancelled; gives by how many milliseconds the longest sleep was late."""
    longest = 0.0
    with contextlib.suppress(asyncio.CancelledError):
        while True:
            began = time.perf_counter()
            await asyncio.sleep(0.01)
            longest = max(longest, 1000 * (time.perf_counter() - began) - 10)
    return longest


def quantiles(milliseconds: list[float]) -> dict[str, float]:
    """The median, the 99th percentile and the maximum."""
    return {f"p{q}": round(float(np.percentile(milliseconds, q)), 1) for q in (50, 99, 100)}


async def measure(port: int, crowd: int, seconds: float, log: Path) -> dict[str, object]:
    """What the honest clients see beside a crowd of this size."""
    logged = log.stat().st_size
    context = multiprocessing.get_context("spawn")
    told = context.Queue()
    others = context.Process(target=bother_all, args=(port, crowd, seconds + 4, told), daemon=True)
    others.start()
    await asyncio.sleep(3.0)
    url = f"http://127.0.0.1:{port}"
    sleeper = asyncio.create_task(longest_pause())
    clients = await asyncio.gather(*(ask(url, name, name == "kept", seconds) for name in ("kept", "new")))
    sleeper.cancel()
    lines = [json.loads(line) for line in log.read_bytes()[logged:].decode().splitlines()]
    honest = ("/sets/kept/", "/sets/new/")
    latencies = [milliseconds for client in clients for milliseconds in client[0]]
    return {
        "crowd": crowd,
        "requests": len(latencies),
        "problems": [problem for client in clients for problem in client[1]][:10],
        "milliseconds": quantiles(latencies),
        "in the server": quantiles([line["milliseconds"] for line in lines if line.get("path", "").startswith(honest)]),
        "longest pause": round(await sleeper, 1),
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
        command = [sys.executable, "-m", "setstream.cli", "serve", "deepsets", "--port", "0"]
        command += ["--states", f"{folder}/s.db", "--connections", str(asked.connections)]
        log = Path(folder) / "log"
        with log.open("wb") as errors:
            server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True)
        try:
            assert server.stdout is not None
            port = int(server.stdout.readline().split("127.0.0.1:")[1].partition(",")[0])
            for crowd in (0, asked.crowd):
                print(json.dumps(asyncio.run(measure(port, crowd, asked.seconds, log))), flush=True)
        finally:
            server.terminate()
            server.wait(60)


if __name__ == "__main__":
    main()
