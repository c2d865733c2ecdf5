"""Memory and time of a step of stage two (fine-tuning the backbone through a whole bag) against the number of patches.

    python benchmarks/finetune_memory.py --width 16                  256 to 20,000 patches of 256x256
    python benchmarks/finetune_memory.py --sizes 256 1024 --chunk 32 ResNet18 at its full width

One bag of N patches of 256x256 pixels lies in an .npy file, as bytes, and is served from there. The model is that of the
paper: ResNet18 with instance norm and its projection, the instance stream, UMBC with 64 slots and a Set Transformer; pool and
head are frozen, AdamW takes the step. Each measurement runs in a fresh process; peak is its largest resident memory, of which
`before` was there after a step on one chunk. `full` holds the graph of the whole bag. The bag is one block of noise, again and
again.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from memory import peak_mib

from setstream.data import NpySource
from setstream.tasks.mil.models import MODELS
from setstream.tasks.mil.task import Bags, Mil
from setstream.training import Encode, keep_freed_memory
from setstream.training.checkpoint import freeze, train_mode

FROZEN = ["head", "encoder.pool", "encoder.phi.layers"]
MODES = ("unbiased", "importance", "exact", "full")
BLOCK = 256


def write_bag(path: Path, size: int, side: int) -> None:
    """A bag of `size` patches as bytes."""
    block = np.random.default_rng(0).integers(0, 256, (min(BLOCK, size), 3, side, side), dtype=np.uint8)
    with path.open("wb") as file:
        np.lib.format.write_array_header_1_0(file, {"descr": "|u1", "fortran_order": False, "shape": (size, 3, side, side)})
        for start in range(0, size, len(block)):
            block[: size - start].tofile(file)


def worker(mode: str, size: int, side: int, width: int, chunk: int) -> None:
    torch.manual_seed(0)
    keep_freed_memory()
    with tempfile.TemporaryDirectory() as folder:
        options: dict[str, Any] = {"backbone": "resnet18", "backbone_options": {"width": width}, "two_stream": True}
        model = MODELS["umbc+set-transformer"](**options)
        freeze(model, FROZEN)
        train_mode(model, FROZEN)
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=5e-5, weight_decay=1e-2)

        def step(n: int) -> float:
            path = Path(folder) / f"{n}.npy"
            if not path.exists():
                write_bag(path, n, side)
            task = Mil(bags=Bags([NpySource(path), NpySource(path)], torch.tensor([0, 1])), count=2)  # trained on one of them
            batch = task.batch(0, 1, torch.Generator())
            start = time.perf_counter()
            optimizer.zero_grad()
            task.loss(model, batch, Encode(mode, chunk_size=chunk)).backward()
            optimizer.step()
            return time.perf_counter() - start

        step(chunk)  # libraries, thread pools and the optimizer's moments fill memory the first time
        before = peak_mib()
        seconds = step(size)
        print(json.dumps({"seconds": seconds, "before": before, "peak": peak_mib()}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs="+", default=[256, 1024, 4096, 20_000])
    parser.add_argument("--modes", nargs="+", default=list(MODES[:3]), choices=MODES)
    parser.add_argument("--side", type=int, default=256, help="pixels along a side of a patch")
    parser.add_argument("--width", type=int, default=64, help="channels of ResNet18's first stage; 64 is ResNet18 itself")
    parser.add_argument("--chunk", type=int, default=256, help="patches with a graph at a time")
    parser.add_argument("--worker", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    rest = [options.side, options.width, options.chunk]
    if options.worker:
        worker(options.worker[0], int(options.worker[1]), *rest)
        return
    print("| mode | patches | peak MiB | of which before the step | seconds |\n|---|---|---|---|---|")
    for mode in options.modes:
        for size in options.sizes:
            command = [sys.executable, __file__, "--worker", mode, str(size)]
            flags = [f"--{name}={value}" for name, value in zip(("side", "width", "chunk"), rest, strict=True)]
            done = subprocess.run([*command, *flags], capture_output=True, text=True, check=False)
            if done.returncode:
                said = done.stderr.strip().splitlines()
                print(
                    f"| {mode} | {size:,} | failed ({done.returncode}): {said[-1][:80] if said else 'killed'} | | |", flush=True
                )
                break
            found = json.loads(done.stdout)
            print(
                f"| {mode} | {size:,} | {found['peak']:.0f} | {found['before']:.0f} | {found['seconds']:.1f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
