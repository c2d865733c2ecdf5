"""Bulk encoding on Ray: the states of each share of the elements, added up here.

    shares --any worker--> (ids, states of a share) --in order--> the journal

A set may span any number of shares and machines. The states of a share travel as one state, with one tensor for all of its
sets. Ray repeats the work of a lost worker; the result stays the same.
"""

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from setstream._utils.optional import need
from setstream.bulk import EncodeOptions
from setstream.bulk.journal import Engine, Journal, Step
from setstream.bulk.partial import Encoded, SetStates, encode_share
from setstream.data.collection import SetCollection, Share
from setstream.errors import DataError
from setstream.models.encoder import SetEncoder
from setstream.states.state import State

SHARE = 2**18  # elements in a share of sets that have files of their own; of a table, a row group is a share
# Shares that a worker has at a time, one of them waiting; results per worker that may wait; repetitions of a share.
AT_A_TIME, RESULTS, REPEATED = 2, 16, 3
Begun = tuple[list[str], State | None] | None  # in a later pass, the sets of a share and the states that they begin with


class Worker:
    """A process of the cluster: the encoder and the collection, loaded once."""

    def __init__(self, encoder: SetEncoder, data: SetCollection, chunk_size: int, tile: float | None) -> None:
        torch.set_num_threads(1)
        self.encoder, self.data, self.chunk_size, self.tile = encoder.eval(), data, chunk_size, tile

    def encode(self, share: Share, begun: Begun) -> Encoded:
        if begun is None:
            return encode_share(self.encoder, self.data, share, self.chunk_size, tile=self.tile)
        known, state = begun
        if state is not None:
            self.encoder.check_state(state)
        rows = {name: row for row, name in enumerate(known)}

        def begin(names: Sequence[str]) -> State:
            missing = [name for name in names if name not in rows]
            if missing or state is None:
                raise DataError(f"the data have changed: {missing[:5]} had no elements in the pass before")
            return state[[rows[name] for name in names]]

        return encode_share(self.encoder, self.data, share, self.chunk_size, begin)


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


@contextmanager
def started(workers: int, *given: Any) -> Iterator[list[Any]]:
    """Workers on the cluster, which are started again if they are lost."""
    ray = need("ray", "ray", "the engine ray")
    stored = [ray.put(one) for one in given]

    class Actor(Worker):
        def __init__(self) -> None:
            super().__init__(*ray.get(stored))

    remote = ray.remote(num_cpus=1, max_restarts=-1, max_task_retries=REPEATED)(Actor)
    actors = [remote.remote() for _ in range(workers)]
    try:
        yield actors
    finally:
        for one in actors:
            ray.kill(one)  # at once: another run may wait for its place


def in_order(workers: list[Any], tasks: Iterable[tuple[Share, Begun]]) -> Iterator[Encoded]:
    """What the workers make of the tasks, in the order of the tasks; whoever is done gets the next one."""
    ray = need("ray", "ray", "the engine ray")
    left, running, results = iter(tasks), dict[Any, Any](), deque[Any]()

    def hand_out(worker: Any) -> None:
        for task in left:
            results.append(worker.encode.remote(*task))
            running[results[-1]] = worker
            return

    for worker in workers * AT_A_TIME:
        hand_out(worker)
    while results:
        if results[0] in running:
            wait_for = list(running) if len(results) < RESULTS * len(workers) else [results[0]]
            (done, *_), _ = ray.wait(wait_for)
            hand_out(running.pop(done))
        else:
            yield ray.get(results.popleft())


@contextmanager
def ray_engine(encoder: SetEncoder, data: SetCollection, options: EncodeOptions) -> Iterator[Engine]:
    """The engine whose workers are processes of a Ray cluster."""
    given = encoder, data, options.chunk_size, options.tile
    with cluster(options.ray_address, options.workers) as size, started(size, *given) as workers:

        def read(journal: Journal, states: SetStates) -> Iterator[Step]:
            shares, first = data.shares(SHARE, journal.skip), journal.position

            def begun(share: Share) -> Begun:
                if journal.number == 1:
                    return None
                names = [name for name in data.share_ids(share) if name not in journal.skipped]
                return names, journal.begun(names) if names else None

            units = sum(share.units for share in shares[:first])
            results = in_order(workers, ((share, begun(share)) for share in shares[first:]))
            for number, (share, encoded) in enumerate(zip(shares[first:], results, strict=True), first + 1):
                for name, problem in encoded.problems.items():
                    journal.skip(name, problem)
                if encoded.state is not None:
                    states.add(encoded.names, encoded.state.to(encoder.device or torch.device("cpu")))
                units += share.units
                yield Step(share.elements, number, units)

        yield read
