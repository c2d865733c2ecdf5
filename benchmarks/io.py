"""Bulk encoding from files against the same set in memory: elements a second, and memory.

    python benchmarks/encode.py                               10^6 elements of 64 features
    python benchmarks/encode.py --elements 100000000 --folder /big/disk

Writes one large set as npy, HDF5 and Parquet (and, for Parquet, scattered among 100 sets), then encodes each in a process of
its own: a two-layer phi, UMBC with 16 slots, chunks of 4,096, what `setstream encode` does without its output. In memory means:
the set lies in an array already, and is given out in the same chunks.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from memory import peak_mib
from torch import nn

import setstream as ss
from setstream.data import ArraySource, H5Source, NpySource, ParquetSets, SetDataset, SetSource
from setstream.scale.bulk import Journal, _work_through_files, _work_through_table

WIDTH, CHUNK, BLOCK = 64, 4096, 2**18
KINDS = ("memory", "npy", "hdf5", "parquet", "parquet, 100 sets")


def block(start: int, stop: int) -> np.ndarray:
    return np.random.default_rng(start).standard_normal((stop - start, WIDTH), dtype=np.float32)


def write(folder: Path, elements: int) -> None:
    import h5py
    import pyarrow as pa
    import pyarrow.parquet as pq

    array = np.lib.format.open_memmap(folder / "set.npy", "w+", np.float32, (elements, WIDTH))
    schema = pa.schema([("set_id", pa.string()), ("features", pa.list_(pa.float32(), WIDTH))])
    with (
        h5py.File(folder / "set.h5", "w") as file,
        pq.ParquetWriter(folder / "one.parquet", schema, compression="none") as one,
        pq.ParquetWriter(folder / "many.parquet", schema, compression="none") as many,
    ):
        data = file.create_dataset("features", (elements, WIDTH), "f4", chunks=(CHUNK, WIDTH))
        for start in range(0, elements, BLOCK):
            stop = min(start + BLOCK, elements)
            rows = block(start, stop)
            array[start:stop] = rows
            data[start:stop] = rows
            listed = pa.FixedSizeListArray.from_arrays(pa.array(rows.ravel()), WIDTH)
            ids = [str(number) for number in np.random.default_rng(start).integers(0, 100, stop - start)]
            one.write_table(pa.table([["0"] * len(rows), listed], schema=schema), row_group_size=2**16)
            many.write_table(pa.table([ids, listed], schema=schema), row_group_size=2**16)
    array.flush()


def worker(kind: str, folder: Path, elements: int) -> None:
    torch.manual_seed(0)
    phi = nn.Sequential(nn.Linear(WIDTH, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU())
    encoder = ss.SetEncoder(phi, ss.UMBC(64, 16, heads=4)).eval()
    with tempfile.TemporaryDirectory() as temporary:
        warm, journal = (Journal(Path(temporary) / name, {}) for name in ("a", "b"))
        _work_through_files(encoder, SetDataset([ArraySource(torch.randn(20_000, WIDTH), "w")]), warm, CHUNK)
        source: SetSource | None = None
        if kind == "memory":
            source = ArraySource(np.load(folder / "set.npy"), "0")
        elif kind in ("npy", "hdf5"):
            source = NpySource(folder / "set.npy") if kind == "npy" else H5Source(folder / "set.h5")
        before = peak_mib()
        start = time.perf_counter()
        if source is not None:
            _work_through_files(encoder, SetDataset([source]), journal, CHUNK)
        else:
            table = ParquetSets(folder / ("one.parquet" if kind == "parquet" else "many.parquet"))
            _work_through_table(encoder, table, journal, CHUNK)
        seconds = time.perf_counter() - start
        total = sum(int(state.count) for _, state in journal.states())
    assert total == elements, (total, elements)
    peak = peak_mib()
    print(json.dumps({"rate": elements / seconds, "before": before, "peak": peak}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--elements", type=int, default=10**6)
    parser.add_argument("--folder", type=Path, help="where to write the files (default: a temporary folder)")
    parser.add_argument("--kinds", nargs="+", default=list(KINDS), choices=KINDS)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--worker", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        worker(options.worker[0], Path(options.worker[1]), int(options.worker[2]))
        return
    with tempfile.TemporaryDirectory(dir=options.folder) as temporary:
        start = time.perf_counter()
        write(Path(temporary), options.elements)
        print(
            f"{options.elements:,} elements of {WIDTH} features, written in {time.perf_counter() - start:.0f} s\n", flush=True
        )
        rates: dict[str, list[float]] = {kind: [] for kind in options.kinds}
        peaks: dict[str, tuple[float, float]] = {}
        for _ in range(options.rounds):
            for kind in options.kinds:
                command = [sys.executable, __file__, "--worker", kind, temporary, str(options.elements)]
                found = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
                rates[kind].append(found["rate"])
                peaks[kind] = found["before"], found["peak"]
        best = {kind: max(values) for kind, values in rates.items()}
        print("| from | elements/s | of the rate in memory | peak MiB before | after |\n|---|---|---|---|---|")
        for kind, rate in best.items():
            share = f"{rate / best['memory']:.0%}" if "memory" in best else ""
            print(f"| {kind} | {rate:,.0f} | {share} | {peaks[kind][0]:.0f} | {peaks[kind][1]:.0f} |", flush=True)


if __name__ == "__main__":
    main()
