"""Imported weights, and heat maps of large slides: peak memory and time, beside the library that the weights are from.

    python benchmarks/imported_mil.py memory       ours and torchmil's ABMIL, 12,000 to 1,000,000 patches (needs torchmil)
    python benchmarks/imported_mil.py heatmap      attention of a CLAM model from a file, PNG and CSV, 20,000 to 400,000 patches

Each row is a process of its own. Memory is the largest resident memory beyond that of the libraries.
"""

import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import h5py
import numpy as np
import torch
from torch import Tensor

import setstream as ss
from setstream.sets.source import SetSource
from setstream.tasks.mil.attribution import element_scores

ROWS = 4000  #: patches that are drawn together; divides all numbers of patches


class Drawn(SetSource):
    """Random features, drawn again whenever they are read; reads are in multiples of ROWS."""

    def __init__(self, size: int, width: int) -> None:
        super().__init__("drawn", None, None)
        self.size, self.width = size, width

    def __len__(self) -> int:
        return self.size

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.width,)

    @property
    def dtype(self) -> torch.dtype:
        return torch.float32

    def read(self, start: int, stop: int) -> Tensor:
        blocks = range(start // ROWS, -(-stop // ROWS))
        return torch.cat([torch.randn(ROWS, self.width, generator=torch.Generator().manual_seed(n)) for n in blocks])


def megabytes() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def measured(run: Callable[[], str]) -> None:
    """Print MiB, seconds of the process, and what the run says."""
    before, start = megabytes(), time.process_time()
    said = run()
    print(f"{megabytes() - before:8.0f} MiB {time.process_time() - start:8.1f} s   {said}", flush=True)


@torch.no_grad()
def memory(kind: str, size: int) -> None:
    """Logit and attention of all patches."""
    abmil = resolve_name("torchmil.models:ABMIL")

    torch.manual_seed(0)
    theirs, source = abmil(in_shape=(512,), att_dim=128, gated=True).eval(), Drawn(size, 512)
    model = ss.integrations.mil.load(theirs.state_dict())
    element_scores(model, Drawn(ROWS, 512), ROWS)
    theirs(torch.randn(1, 9, 512))

    def run() -> str:
        if kind == "ours":
            found = element_scores(model, source, ROWS, ["attention"])
            logit, attention = found.logits, found.elements["attention"]
        else:
            bag = torch.empty(1, size, 512)
            for start in range(0, size, ROWS):
                bag[0, start : start + ROWS] = source.read(start, start + ROWS)
            logit, scores = theirs(bag, return_att=True)
            attention = scores[0].softmax(0)
        return f"logit {float(logit):.7f}, largest weight {float(attention.max()):.6e}"

    measured(run)


def heatmap(folder: Path, size: int) -> None:
    """`setstream slides heatmap`, attention, on 1024-wide features in a file."""
    from setstream.cli.slides import run_heatmap

    path, rng = folder / f"{size}.h5", np.random.default_rng(0)
    if not path.exists():
        side = int(np.ceil((size / 0.6) ** 0.5))
        y, x = np.mgrid[:side, :side].reshape(2, -1) - side / 2
        near = np.argsort(np.hypot(x, y * 1.4) + side / 30 * np.sin(5 * np.arctan2(y, x)))[:size]  # an uneven disc
        coords = np.stack([x[near], y[near]], 1) * 256
        coords -= coords.min(0)
        with h5py.File(path, "w") as file:
            features = file.create_dataset("features", (size, 1024), np.float32)
            for start in range(0, size, ROWS):
                block = rng.standard_normal((min(ROWS, size - start), 1024), np.float32)
                features[start : start + ROWS] = block + 0.5 * np.cos(coords[start : start + ROWS, :1] / 9000)
            file["coords"] = coords.astype(np.int64)
            file["coords"].attrs.update({"patch_size": 256, "patch_size_level0": 256})
        return
    torch.manual_seed(0)
    sizes = {"attention_net.0": (512, 1024), "attention_net.3.attention_a.0": (256, 512)}
    sizes |= {"attention_net.3.attention_b.0": (256, 512), "attention_net.3.attention_c": (1, 256), "classifiers": (2, 512)}
    weights = {f"{name}.weight": torch.randn(shape) / shape[1] ** 0.5 for name, shape in sizes.items()}
    weights |= {f"{name}.bias": torch.zeros(shape[0]) for name, shape in sizes.items()}
    ss.integrations.mil.load(weights).save_pretrained(folder / "clam")
    options: dict[str, Any] = {"features_of": path, "patches": None, "patch_size": None, "score": "attention", "write": None}
    options |= {"device": "cpu", "chunk_size": 256, "out": folder, "slide": None}
    warm = folder / "warm.h5"
    with h5py.File(path) as source, h5py.File(warm, "w") as file:  # what every run loads
        for name in ("features", "coords"):
            file[name] = source[name][:500]
        file["coords"].attrs.update(source["coords"].attrs)
    run_heatmap(str(folder / "clam"), **options | {"features_of": warm})

    def run() -> str:
        run_heatmap(str(folder / "clam"), **options)
        return f"{size:,} patches"

    measured(run)


if __name__ == "__main__":
    torch.set_num_threads(1)
    match sys.argv[1:]:
        case ["memory", kind, size]:
            memory(kind, int(size))
        case ["heatmap", folder, size]:
            heatmap(Path(folder), int(size))
        case ["memory"]:
            for size in ("12000", "100000", "1000000"):
                for kind in ("ours", "torchmil"):
                    print(f"{size:>8} {kind:9}", end="", flush=True)
                    subprocess.run([sys.executable, __file__, "memory", kind, size], check=True)
        case ["heatmap"]:
            with tempfile.TemporaryDirectory() as folder:
                for size in ("20000", "100000", "400000"):
                    subprocess.run([sys.executable, __file__, "heatmap", folder, size], check=True)
                    print(f"{size:>8}", flush=True)
                    subprocess.run([sys.executable, __file__, "heatmap", folder, size], check=True)
        case _:
            print(__doc__)
