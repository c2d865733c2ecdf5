"""Bulk encoding on Ray Data: partial states for each block of elements, one commutative sum for each set id.

    shares --map, any worker--> (id, state of a share) --group by id, sum--> (id, state of the set)

A set may span any number of blocks and machines. Work of a lost worker is done again by Ray; sums do not depend on who made
their terms, so nothing changes in the result. The sums go from Ray's blocks into the job's journal one by one: this process
never holds all of them.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import accumulate
from typing import Any

import torch

from setstream._utils.optional import need
from setstream.bulk.journal import Journal, Skips
from setstream.bulk.partial import Problem, Progress, Range, Share, Skip, absorb, shares
from setstream.data.dataset import SetDataset
from setstream.data.parquet import ParquetSets
from setstream.models.encoder import SetEncoder
from setstream.states.state import State

# Shares between two commits: a set of 2^18 elements, or a row group, is one share.
ROUND = 4096


class _Worker:
    """What each Ray worker holds: the encoder, loaded once."""

    def __init__(self, encoder: SetEncoder, sets: ParquetSets | None, chunk_size: int) -> None:
        self.encoder = encoder.eval()
        torch.set_num_threads(1)
        self.sets, self.chunk_size = sets, chunk_size

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        """From shares to rows of (id, state, problem): one of the two is empty."""
        rows: dict[str, list[Any]] = {"id": [], "state": [], "problem": []}
        for share in batch["share"]:
            for name, found in absorb(self.encoder, share, self.chunk_size, self.sets):
                rows["id"].append(name)
                rows["state"].append(b"" if isinstance(found, Problem) else found.to_bytes())
                rows["problem"].append(found.text if isinstance(found, Problem) else "")
        return rows


def _add(a: bytes, b: bytes) -> bytes:
    return (State.from_bytes(a) + State.from_bytes(b)).to_bytes() if a and b else a or b


@contextmanager
def cluster(address: str | None = None, workers: int | None = None) -> Iterator[int]:
    """A Ray cluster for as long as it is needed: a local one, or the one at `address`. Gives the number of workers."""
    ray = need("ray", "ray", "the engine ray")
    started = not ray.is_initialized()
    if started:
        ray.init(address=address, num_cpus=None if address else workers, include_dashboard=False, log_to_driver=False)
    try:
        yield workers or max(1, int(ray.cluster_resources().get("CPU", 2)) - 1)
    finally:
        if started:
            ray.shutdown()


def ray_states(
    encoder: SetEncoder, data: SetDataset | ParquetSets, work: list[Share], workers: int, chunk_size: int = 4096
) -> Iterator[tuple[str, State | Problem]]:
    """The states of the sets that some shares touch, one by one: summed on the cluster, and kept there until asked for."""
    ray_data = need("ray.data", "ray", "the engine ray")
    aggregate = need("ray.data.aggregate", "ray", "the engine ray")
    sets = data if isinstance(data, ParquetSets) else None
    table = ray_data.from_items([{"share": share} for share in work], override_num_blocks=min(len(work), 4 * workers))
    partial = table.map_batches(
        _Worker,
        fn_constructor_args=(encoder, sets, chunk_size),
        batch_size=1,
        compute=ray_data.ActorPoolStrategy(size=workers),
    )
    summed = partial.groupby("id", num_partitions=4 * workers).aggregate(  # a partition is a task: not 200, the default
        aggregate.AggregateFn(
            init=lambda _: b"",
            accumulate_row=lambda total, row: _add(total, row["state"]),
            merge=_add,
            name="state",
        ),
        aggregate.AggregateFn(
            init=lambda _: "",
            accumulate_row=lambda total, row: total or row["problem"],
            merge=lambda a, b: a or b,
            name="problem",
        ),
    )
    for row in summed.iter_rows():
        yield row["id"], Problem(row["problem"]) if row["problem"] else State.from_bytes(row["state"])


def work_on_ray(
    encoder: SetEncoder,
    data: SetDataset | ParquetSets,
    skips: Skips,
    chunk_size: int,
    address: str | None = None,
    workers: int | None = None,
    progress: Progress | None = None,
) -> None:
    """All shares, in rounds; what a round adds goes into the journal at once, so a job that was killed goes on after it."""
    journal = skips.journal
    work = shares(data, skip=skips, files=skips.files())
    ends = list(accumulate(_size(share) for share in work))
    if journal.position < len(work):
        with cluster(address, workers) as size:
            for start in range(journal.position, len(work), ROUND):
                part = work[start : start + ROUND]
                found = ray_states(encoder, data, part, size, chunk_size)
                skips.commit(_good(found, journal, skips), start + len(part))
                if progress is not None:
                    elements = ends[start + len(part) - 1]
                    sets_done = len({share.source.id for share in work[: start + len(part)] if isinstance(share, Range)})
                    progress(elements, elements if isinstance(data, ParquetSets) else sets_done)
    journal.arrange(journal.names() if isinstance(data, ParquetSets) else data.ids)


def _size(share: Share) -> int:
    return share.stop - share.start if isinstance(share, Range) else share.rows


def _good(found: Iterator[tuple[str, State | Problem]], journal: Journal, skip: Skip) -> Iterator[tuple[str, State]]:
    """What a round found, added to what is known; sets with a problem are left out."""
    for name, state in found:
        if isinstance(state, Problem):
            skip(name, state.text)
            continue
        before = journal.state(name)
        yield name, state if before is None else before + state
