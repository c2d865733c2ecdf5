"""Bulk encoding from files against the same set in memory, and against reading the same bytes: elements a second, and memory.

    python benchmarks/io.py                                10^6 elements of 64 features
    python benchmarks/io.py --elements 100000000 --folder /big/disk --kinds memory npy parquet

Writes one large set in each format, as the format's own library does by default (Parquet: one set, and scattered among 100
sets), then encodes each in a process of its own: a two-layer phi, UMBC with 16 slots, chunks of 4,096, what `setstream encode`
does without its output. In memory means: the set lies in an array already, and is given out in the same chunks. Raw means: the
bytes of the file are read in blocks of 4 MiB and thrown away. Every round measures every kind once; the table shows the best of
each, and the median over the rounds of its rate to that of the same sets in memory in the same round, which a busy machine
disturbs less.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from memory import peak_mib
from torch import nn

import setstream as ss
from setstream.bulk import EncodeOptions
from setstream.bulk.encode import encode_states, local_engine
from setstream.bulk.journal import Journal
from setstream.data import ArraySource, ParquetSets, SetCollection, SetDataset, open_collection
from setstream.data.formats.table import Group

WIDTH, CHUNK, BLOCK, RAW_BLOCK = 64, 4096, 2**18, 2**22
FILES = {
    "npy": "set.npy",
    "hdf5": "set.h5",
    "torch": "set.pt",
    "zarr": "set.zarr",
    "arrow": "set.arrow",
    "parquet": "one.parquet",
    "parquet, 100 sets": "many.parquet",
}
KINDS = ("memory", "memory, 100 sets", *FILES)


def block(start: int, stop: int) -> np.ndarray:
    return np.random.default_rng(start).standard_normal((stop - start, WIDTH), dtype=np.float32)


def write(folder: Path, elements: int, kinds: list[str]) -> None:
    """All formats in one pass over the blocks, so that nothing but one block is in memory (torch: the whole)."""
    import h5py
    import pyarrow as pa
    import pyarrow.parquet as pq
    import zarr

    schema = pa.schema([("set_id", pa.string()), ("features", pa.list_(pa.float32(), WIDTH))])
    array = np.lib.format.open_memmap(folder / FILES["npy"], "w+", np.float32, (elements, WIDTH))
    hdf5 = h5py.File(folder / FILES["hdf5"], "w").create_dataset("features", (elements, WIDTH), "f4", chunks=(CHUNK, WIDTH))
    writers: dict[str, Any] = {}
    if "zarr" in kinds:
        place = str(folder / FILES["zarr"])
        writers["zarr"] = zarr.create_array(place, shape=(elements, WIDTH), chunks=(CHUNK, WIDTH), dtype="f4")
    if "arrow" in kinds:
        writers["arrow"] = pa.ipc.new_file(str(folder / FILES["arrow"]), schema)
    for kind in ("parquet", "parquet, 100 sets"):
        if kind in kinds:
            writers[kind] = pq.ParquetWriter(folder / FILES[kind], schema)
    for start in range(0, elements, BLOCK):
        stop = min(start + BLOCK, elements)
        rows = block(start, stop)
        array[start:stop] = rows
        if "hdf5" in kinds:
            hdf5[start:stop] = rows
        listed = pa.FixedSizeListArray.from_arrays(pa.array(rows.ravel()), WIDTH)
        one = pa.table([["0"] * len(rows), listed], schema=schema)
        for kind, writer in writers.items():
            if kind == "zarr":
                writer[start:stop] = rows
            elif kind == "parquet, 100 sets":
                ids = [str(number) for number in np.random.default_rng(start).integers(0, 100, stop - start)]
                writer.write_table(pa.table([ids, listed], schema=schema))
            else:
                writer.write_table(one)
    array.flush()
    hdf5.file.close()
    for kind, writer in writers.items():
        if kind != "zarr":
            writer.close()
    if "torch" in kinds:
        torch.save(torch.from_numpy(np.load(folder / FILES["npy"])), folder / FILES["torch"])


def raw_seconds(path: Path) -> float:
    """How long reading all bytes takes."""
    start = time.perf_counter()
    for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
        if file.is_file():
            with file.open("rb", buffering=0) as opened:
                while opened.read(RAW_BLOCK):
                    pass
    return time.perf_counter() - start


def worker(kind: str, folder: Path, elements: int) -> None:
    torch.manual_seed(0)
    phi = nn.Sequential(nn.Linear(WIDTH, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU())
    encoder = ss.SetEncoder(phi, ss.UMBC(64, 16, heads=4)).eval()
    path = folder / FILES.get(kind, FILES["npy"])
    raw = raw_seconds(path)
    options, warm = EncodeOptions(chunk_size=CHUNK), SetDataset([ArraySource(torch.randn(20_000, WIDTH), "w")])
    # Opening loads the format's library, which is no part of the rate.
    data: SetCollection = warm
    if kind.startswith("memory"):
        whole = torch.from_numpy(np.load(path))
        data = SetDataset([ArraySource(part, str(n)) for n, part in enumerate(whole.chunk(100 if "100" in kind else 1))])
    else:
        data = open_collection(path)
    if isinstance(data, ParquetSets):
        next(data.features(Group(path, 0, 0)))
    for some in (warm, data):
        with tempfile.TemporaryDirectory() as temporary, local_engine(encoder, some, options) as read:
            journal, before = Journal(Path(temporary) / "journal", encoder, {}), peak_mib()
            start = time.perf_counter()
            encode_states(encoder, some, journal, options, lambda *done: None, read)
            seconds = time.perf_counter() - start
            total = sum(int(state.count) for _, state in journal.states())
    assert total == elements, (total, elements)
    print(json.dumps({"rate": elements / seconds, "raw": elements / raw, "before": before, "peak": peak_mib()}))


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
        write(Path(temporary), options.elements, options.kinds)
        print(
            f"{options.elements:,} elements of {WIDTH} features, written in {time.perf_counter() - start:.0f} s\n", flush=True
        )
        found: dict[str, list[dict[str, float]]] = {kind: [] for kind in options.kinds}
        for _ in range(options.rounds):
            for kind in options.kinds:
                command = [sys.executable, __file__, "--worker", kind, temporary, str(options.elements)]
                done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
                found[kind].append(json.loads(done))
    print("| from | elements/s | of the rate in memory | raw read, elements/s | peak MiB before | after |")
    print("|---|---|---|---|---|---|")
    for kind, rounds in found.items():
        share, same = "", "memory, 100 sets" if "100" in kind else "memory"
        if same in found:
            ratios = [own["rate"] / memory["rate"] for own, memory in zip(rounds, found[same], strict=True)]
            share = f"{statistics.median(ratios):.0%}"
        rate, raw = max(own["rate"] for own in rounds), max(own["raw"] for own in rounds)
        before, peak = rounds[-1]["before"], max(own["peak"] for own in rounds)
        raw_text = "" if kind.startswith("memory") else f"{raw:,.0f}"
        print(f"| {kind} | {rate:,.0f} | {share} | {raw_text} | {before:.0f} | {peak:.0f} |", flush=True)


if __name__ == "__main__":
    main()
