"""How far a store goes: bytes per state, CPU per append, merges per query, rows per second, the error of float32.

    python benchmarks/sizing.py                                 SQLite
    python benchmarks/sizing.py --postgres postgresql://...     and an empty PostgreSQL database

Everything is measured in one process and one thread. CPU times are of this process, and of PostgreSQL's on this machine. Rows
per second of the clock are fewer if other programs run.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import torch
from torch import nn

import setstream as ss
from setstream.stores.store import Change, Changed

HOUR = 3600
POOLS = {
    "mean of 64 features": lambda: ss.DeepSets("mean"),
    "mean and maximum of 64 features": lambda: ss.Parallel(mean=ss.DeepSets("mean"), most=ss.DeepSets("max")),
    "UMBC, 4 slots of 64, 1 head": lambda: ss.UMBC(64, num_slots=4, heads=1),
    "UMBC, 16 slots of 64, 1 head": lambda: ss.UMBC(64, num_slots=16, heads=1),
    "UMBC, 16 slots of 64, 4 heads": lambda: ss.UMBC(64, num_slots=16, heads=4),
    "UMBC, 64 slots of 64, 4 heads": lambda: ss.UMBC(64, num_slots=64, heads=4),
}
TYPICAL = "UMBC, 16 slots of 64, 1 head"


def make(pool: str) -> ss.SetModel:
    """Elements of 8 numbers, 64 features."""
    torch.manual_seed(0)
    return ss.SetModel(ss.SetEncoder(nn.Sequential(nn.Linear(8, 64), nn.ReLU()), POOLS[pool]()), nn.Identity()).eval()


def cpu_of(store: ss.StateStore, rounds: int, size: int, tiled: bool) -> float:
    """CPU milliseconds per append of ten elements, in batches as a busy server makes them; the last half of the rounds."""
    spent = []
    for turn in range(rounds):
        parts = list(store.encoder.update(None, torch.randn(size, 10, 8)))
        tiles = [{400_000 + turn // 4: part} if tiled else None for part in parts]
        changes = [Change(f"set-{n}", part, tiles=tiles[n]) for n, part in enumerate(parts)]
        began = time.process_time()
        assert all(isinstance(one, Changed) for one in store.apply(changes))
        spent.append(1000 * (time.process_time() - began) / size)
    return statistics.median(spent[rounds // 2 :])


@torch.no_grad()
def states(folder: str) -> None:
    """Bytes and CPU by configuration."""
    print("| state | bytes, float64 | bytes, float32 | on disk, float64 | CPU per append, ms | float32, ms | with tiles, ms |")
    print("|---|---|---|---|---|---|---|")
    for number, pool in enumerate(POOLS):
        row, sizes = [], []
        for dtype, tile in ((torch.float64, None), (torch.float32, None), (torch.float64, HOUR)):
            place = Path(folder) / f"{number}-{dtype}-{tile}.db"
            with ss.StateStore(place, make(pool), dtype=dtype, tile=tile) as store:
                row.append(f"{cpu_of(store, 8, 256, tile is not None):.2f}")
                sizes.append(len(store.get_bytes("set-0")))
            if len(row) == 1:
                disk = place.stat().st_size / 256
        print(f"| {pool} | {sizes[0]:,} | {sizes[1]:,} | {disk:,.0f} | {' | '.join(row)} |", flush=True)


def cpu_of_postgres(store: ss.StateStore) -> float:
    """CPU seconds of all processes of a PostgreSQL on this machine that still run."""
    stats = {}
    for file in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            fields = file.read_text().rpartition(")")[2].split()
            stats[int(file.parent.name)] = int(fields[1]), int(fields[11]) + int(fields[12])
    server, _ = stats[store.rows.query("SELECT pg_backend_pid()")[0][0]]
    return sum(ticks for parent, ticks in stats.values() if parent == server) / os.sysconf("SC_CLK_TCK")


@torch.no_grad()
def rows(place: str, count: int = 10_000) -> None:
    """Rows per second of a database, written in transactions of 500 and read one by one; and bytes per row."""
    with ss.StateStore(place, make(TYPICAL)) as store:
        parts, rates = list(store.encoder.update(None, torch.randn(500, 10, 8))), list[str]()
        data = [(int(part.count), part.to_bytes()) for part in parts]
        names = [f"set-{n}" for n in random.Random(0).sample(range(count), count)]
        is_postgres = place.startswith("postgres")

        def cpu() -> float:
            return time.process_time() + (cpu_of_postgres(store) if is_postgres else 0.0)

        def write() -> None:
            for start in range(0, count, 500):
                with store.rows.transaction(names[start : start + 500]) as transaction:
                    transaction.write((name, *one) for name, one in zip(names[start : start + 500], data, strict=True))

        def read() -> None:
            for name in names:
                store.get_bytes(name)

        for work in (write, write, read):  # new rows, then the same ones again
            began, used = time.monotonic(), cpu()
            work()
            spent, seconds = cpu() - used, time.monotonic() - began
            rates.append(f"{count / seconds:,.0f} | {1e6 * spent / count:,.0f}")
        if is_postgres:
            size = store.rows.query(f"SELECT pg_total_relation_size('{store.rows.states}')")[0][0]
        else:
            size = Path(place).stat().st_size
    kind = "PostgreSQL" if is_postgres else "SQLite"
    print(f"| {kind} | {' | '.join(rates)} | {size / count:,.0f} | {len(data[0][1]):,} |", flush=True)


@torch.no_grad()
def queries(folder: str, tiles: int = 10_000) -> None:
    """Rows that are merged for a range of hourly tiles."""
    rng = random.Random(0)
    with ss.StateStore(f"{folder}/ranges.db", make("mean of 64 features"), tile=HOUR) as store:
        assert store.tiles is not None
        tiling, merged = store.tiles.tiling, []
        for _ in range(10_000):
            start, stop = sorted(rng.sample(range(tiles + 1), 2))
            merged.append(sum(some.stop - some.start for some in tiling.ranges(start, stop)))
    print(
        f"\nrows of a random range of {tiles:,} hourly tiles: {statistics.mean(merged):.0f} on average, at most {max(merged)}"
    )


@torch.no_grad()
def errors(folder: str) -> None:
    """The relative error of predictions from a float32 store, beside float64."""
    print("| updates of a set | UMBC: error of float32 | mean: error of float32 |\n|---|---|---|")
    stores = {
        (pool, dtype): ss.StateStore(f"{folder}/{number}-{dtype}-errors.db", make(pool), dtype=dtype)
        for number, pool in enumerate((TYPICAL, "mean of 64 features"))
        for dtype in (torch.float32, torch.float64)
    }
    done = 0
    for updates in (1, 10, 100, 300):
        for _ in range(updates - done):
            x = torch.randn(20, 10, 8)
            for store in stores.values():
                store.apply([Change(f"s{n}", part) for n, part in enumerate(store.encoder.update(None, x))])
        done, shown = updates, []
        for pool in (TYPICAL, "mean of 64 features"):
            narrow, wide = (
                torch.cat([stores[pool, dtype].predict(f"s{n}").double().flatten() for n in range(20)])
                for dtype in (torch.float32, torch.float64)
            )
            shown.append(f"{float((narrow - wide).norm() / wide.norm()):.0e}")
        print(f"| {updates:,} | {' | '.join(shown)} |", flush=True)
    for store in stores.values():
        store.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--postgres", help="the URL of an empty database")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        states(folder)
        titles = ["database", "new rows per second", "CPU, µs", "changed per second", "CPU, µs", "read per second", "CPU, µs"]
        print(f"\n| {' | '.join([*titles, 'bytes on disk', 'bytes of a state'])} |\n|---|---|---|---|---|---|---|---|---|")
        for place in filter(None, (f"{folder}/rows.db", options.postgres)):
            rows(place)
        queries(folder)
        errors(folder)


if __name__ == "__main__":
    main()
