"""Two versions of setstream: pooling, training steps, inference and updates, in one run.

    git worktree add /tmp/before 5c04cae
    python benchmarks/versions.py --before /tmp/before/src
    python benchmarks/versions.py --before /tmp/before/src --rows step update --turns 30

Each version is a process of its own, and both take turns, in changing order. A number is the best turn of each, in CPU time of
the one computing thread: on a machine with other work, the time of the clock would count that too. Memory that is freed stays
with the process, as in `setstream train`. "By hand" and "plain" are the loops of forward.py and step.py.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch
from forward import BATCH, PHIS, build, by_hand
from pooling import SHAPES, streamed
from step import GRADIENT_SET, bare_encode, dense_likelihood, likelihood, model, plain_encode, plain_head
from torch import Tensor

import setstream as ss
from setstream.training import keep_freed_memory

HERE = Path(__file__).resolve().parent
ROWS = ("whole", "streamed", "backward", "step", "inference", "update")
Job = tuple[str, Callable[[], object], int]  # a name, what is measured, and how often in a turn


def inferring(run: Callable[[], object]) -> Callable[[], object]:
    """The same without a graph."""

    def without_a_graph() -> object:
        with torch.no_grad():
            return run()

    return without_a_graph


def pooling(kind: str) -> Iterator[Job]:
    """The six shapes of pooling.py: whole sets, streamed ones, or whole sets forward and backward."""
    for shape in SHAPES:
        batch, size, in_dim, out_dim, slots, heads = shape
        pool = ss.UMBC(in_dim, slots, in_dim, out_dim, heads).eval()
        encoder = ss.SetEncoder(torch.nn.Identity(), pool, check_finite=False)
        x = torch.randn(batch, size, in_dim, requires_grad=kind == "backward")
        calls = 10 if batch > 1 else 2

        def backward(pool: ss.UMBC = pool, x: Tensor = x) -> None:
            x.grad = None
            pool(x).square().sum().backward()

        runs: dict[str, Callable[[], object]] = {
            "whole": inferring(partial(pool, x)),
            "streamed": inferring(partial(streamed, encoder, x)),
            "backward": backward,
        }
        yield f"{kind}: {', '.join(map(str, shape))}", runs[kind], calls


def steps() -> Iterator[Job]:
    """The training steps of step.py."""

    def step(encode: Callable[..., Tensor], x: Tensor, plain: bool = False) -> Callable[[], None]:
        mine = model().train()
        optimizer = torch.optim.Adam(mine.parameters(), 1e-3, fused=not plain)

        def run() -> None:
            optimizer.zero_grad()
            z = encode(mine.encoder, x)
            loss = dense_likelihood(plain_head(mine.head, z), x) if plain else likelihood(mine.head(z), x)
            loss.backward()
            optimizer.step()

        return run

    for points in (512, 4096, 16384):
        x, calls = torch.randn(BATCH, points, 2) * 2, 8 if points == 512 else 2
        yield f"step: plain, {points} points", step(plain_encode, x, plain=True), calls
        yield f"step: unbiased by hand, {points} points", step(bare_encode, x), calls
        for gradient in ("unbiased", "importance", "exact", "full"):
            encode = partial(ss.encode, chunk_size=256 if gradient == "exact" else GRADIENT_SET, gradient=gradient)
            yield f"step: {gradient}, {points} points", step(encode, x), calls


def inference() -> Iterator[Job]:
    """Encoding without a gradient, and the loop by hand."""
    encoder = build(PHIS["one layer"][0]())
    for points in (512, 16384):
        x, calls = torch.randn(BATCH, points, 2), 8 if points == 512 else 2
        contestants: dict[str, Callable[[], object]] = {
            "by hand": partial(by_hand, encoder, x),
            "ss.encode": partial(ss.encode, encoder, x, gradient="none"),
            "encoder(x)": partial(encoder, x),
        }
        for name, run in contestants.items():
            yield f"inference: {name}, {points} points", inferring(run), calls


def updates() -> Iterator[Job]:
    """A state that gets a few elements."""
    encoder = build(PHIS["one layer"][0]())
    for sets, elements in ((1, 1), (1, 10), (1000, 1)):
        with torch.no_grad():
            state = encoder.update(None, torch.randn(sets, 100 if sets == 1 else 5, 2))
        run = partial(encoder.update, state, torch.randn(sets, elements, 2))
        yield f"update: {sets} sets, {elements} elements each", inferring(run), 20


def jobs(row: str) -> Iterator[Job]:
    """All that a row of the command line measures."""
    yield from {"step": steps, "inference": inference, "update": updates}.get(row, partial(pooling, row))()


def child() -> None:
    """Measure what each line of the standard input asks for: a row, and the number of a job in it."""
    torch.set_num_threads(1)
    keep_freed_memory()
    known: dict[str, list[Job]] = {}
    for line in sys.stdin:
        row, number = json.loads(line)
        if row not in known:
            torch.manual_seed(0)
            known = {row: [*jobs(row)]}
        if number >= len(known[row]):
            print("null", flush=True)
            continue
        name, run, calls = known[row][number]
        run()  # not timed: it pays for the caches of what ran before
        best = float("inf")
        for _ in range(calls):
            start = time.thread_time()
            run()
            best = min(best, time.thread_time() - start)
        print(json.dumps([name, best]), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", type=Path, help="the src folder of the other version")
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=ROWS)
    parser.add_argument("--turns", type=int, default=15)
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        return child()
    if options.before is None or not (options.before / "setstream").is_dir():
        parser.error(f"--before must be a folder that contains setstream, such as a worktree's src; got {options.before}")
    sources = [options.before, HERE.parent / "src"]
    processes = [
        subprocess.Popen(
            [sys.executable, __file__, "--child"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONPATH": str(source.resolve()), "OMP_NUM_THREADS": "1"},
        )
        for source in sources
    ]

    def turn(process: subprocess.Popen[str], row: str, number: int) -> list[object] | None:
        assert process.stdin is not None
        assert process.stdout is not None
        print(json.dumps([row, number]), file=process.stdin, flush=True)
        answer: list[object] | None = json.loads(process.stdout.readline())
        return answer

    print(f"torch {torch.__version__}, one thread, {options.turns} turns; CPU milliseconds\n")
    print("| what | before | after | before / after, best turns | median of turns |\n|---|---|---|---|---|")
    for row in options.rows:
        number = 0
        while (first := turn(processes[0], row, number)) is not None and turn(processes[1], row, number) is not None:
            times: list[list[float]] = [[], []]
            for index in range(options.turns):
                for which in (0, 1) if index % 2 else (1, 0):
                    answer = turn(processes[which], row, number)
                    assert answer is not None
                    times[which].append(float(str(answer[1])))
            before, after = map(min, times)
            ratio = statistics.median(a / b for a, b in zip(*times, strict=True))
            print(f"| {first[0]} | {before * 1e3:.3g} | {after * 1e3:.3g} | {before / after:.2f}x | {ratio:.2f}x |", flush=True)
            number += 1
    for process in processes:
        assert process.stdin is not None
        process.stdin.close()
        process.wait()


if __name__ == "__main__":
    main()
