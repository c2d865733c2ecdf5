"""Bulk encoding on Ray Data: partial states for each share of the elements, one commutative sum for each set id.

    shares --map, any worker--> (id, state of a share) --group by id, sum--> (id, state of the set)

A set may span any number of shares and machines. Ray repeats the work of a lost worker; the result stays the same. The sums go
from Ray's blocks into the journal one by one: this process never holds all of them.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from setstream._utils.optional import need
from setstream.bulk import EncodeOptions, Progress
from setstream.bulk.partial import Journal, encode_share
from setstream.data.collection import SetCollection, Share
from setstream.models.encoder import SetEncoder
from setstream.states.state import State

SHARE = 2**18  # elements in a share of a set that has a file of its own; of a table, a row group is a share
ROUND = 4096  # shares between two commits


class _Worker:
    """The state of a Ray worker: the encoder and the collection, loaded once."""

    def __init__(self, encoder: SetEncoder, data: SetCollection, chunk_size: int) -> None:
        torch.set_num_threads(1)
        self.encoder, self.data, self.chunk_size = encoder.eval(), data, chunk_size

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        """From shares to rows of (id, state, problem), of which either the state or the problem is empty."""
        rows: list[tuple[str, bytes, str]] = []
        for share in batch["share"]:
            states, problems = encode_share(self.encoder, self.data, share, self.chunk_size)
            rows += [(name, state.to_bytes(), "") for name, state in states.items()]
            rows += [(name, b"", problem) for name, problem in problems.items()]
        return {column: [row[number] for row in rows] for number, column in enumerate(("id", "state", "problem"))}


def _add(a: bytes, b: bytes) -> bytes:
    return (State.from_bytes(a) + State.from_bytes(b)).to_bytes() if a and b else a or b


@contextmanager
def cluster(address: str | None = None, workers: int | None = None) -> Iterator[int]:
    """A Ray cluster for as long as it is needed: a local one, or the one at `address`. Yields the number of workers."""
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
    encoder: SetEncoder, data: SetCollection, shares: list[Share], workers: int, chunk_size: int = 4096
) -> Iterator[tuple[str, State | None, str]]:
    """The sets of some shares one by one, summed on the cluster: id, state (None if it cannot be encoded), and the reason."""
    ray_data = need("ray.data", "ray", "the engine ray")
    aggregate = need("ray.data.aggregate", "ray", "the engine ray")
    table = ray_data.from_items([{"share": share} for share in shares], override_num_blocks=min(len(shares), 4 * workers))
    pool = ray_data.ActorPoolStrategy(size=workers)
    partial = table.map_batches(_Worker, fn_constructor_args=(encoder, data, chunk_size), batch_size=1, compute=pool)
    states = aggregate.AggregateFn(lambda _: b"", _add, "state", lambda total, row: _add(total, row["state"]))
    problems = aggregate.AggregateFn(lambda _: "", lambda a, b: a or b, "problem", lambda total, row: total or row["problem"])
    groups = partial.groupby("id", num_partitions=4 * workers)  # a partition is a task: not 200, the default
    for row in groups.aggregate(states, problems).iter_rows():
        yield row["id"], None if row["problem"] else State.from_bytes(row["state"]), row["problem"]


def encode_on_ray(encoder: SetEncoder, data: SetCollection, journal: Journal, options: EncodeOptions, show: Progress) -> None:
    """Encode all shares, in rounds. What a round adds is committed at once, so a killed run goes on after its last round."""
    shares = data.shares(SHARE, journal.skip)
    if journal.position < len(shares):
        with cluster(options.ray_address, options.workers) as workers:
            for start in range(journal.position, len(shares), ROUND):
                stop = min(start + ROUND, len(shares))
                states = ray_states(encoder, data, shares[start:stop], workers, options.chunk_size)
                journal.commit(_added(states, journal), stop)
                done = shares[:stop]
                show(sum(share.elements for share in done), sum(share.units for share in done))
    journal.arrange(data.output_order)


def _added(states: Iterator[tuple[str, State | None, str]], journal: Journal) -> Iterator[tuple[str, State]]:
    """The states of a round, added to those in the journal; sets with a problem are skipped."""
    for name, state, problem in states:
        if state is None:
            journal.skip(name, problem)
        else:
            before = journal.state(name)
            yield name, state if before is None else before + state
