"""Which files of the library `ss.encode(...)` and `backward()` go through, for each gradient mode.

    python benchmarks/trace_modes.py

Sets in memory, a UMBC pool, training mode. Counted are all files but those of the pool that was chosen: `pools/` and
`states/accumulators/`, which are listed apart. CONTRIBUTING has the table, and tests/gradients/test_trace.py its bound.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import nn

import setstream as ss
from setstream.gradients.encode import GRADIENTS

ROOT = Path(ss.__file__).parent
POOL = ("pools/", "states/accumulators/")


def files_of(call: Callable[[], Any]) -> list[str]:
    """The files of the library whose functions a call enters."""
    entered: set[str] = set()

    def note(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call":
            entered.add(frame.f_code.co_filename)

    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
    return sorted(str(Path(name).relative_to(ROOT)) for name in entered if name.startswith(f"{ROOT}/"))


def trace(gradient: str) -> list[str]:
    """The files of one encoding and its backward pass."""
    encoder = ss.SetEncoder(nn.Sequential(nn.Linear(3, 8), nn.ReLU()), ss.UMBC(8, 3, heads=2, slot_residual=True))
    x = torch.randn(2, 40, 3)

    def step() -> None:
        z = ss.encode(encoder, x, chunk_size=8, gradient=gradient)
        if z.requires_grad:
            z.square().sum().backward()

    step()  # not traced: what is found out about an encoder once
    return files_of(step)


def main() -> None:
    print("| mode | files | which | of the pool |\n|---|---|---|---|")
    for gradient in GRADIENTS:
        names = trace(gradient)
        counted = [name for name in names if not name.startswith(POOL)]
        print(f"| {gradient} | {len(counted)} | {', '.join(counted)} | {len(names) - len(counted)} |")


if __name__ == "__main__":
    main()
