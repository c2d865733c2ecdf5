"""Bulk encoding on Ray Data: partial states for each block of elements, one commutative sum for each set id.

    shares --map, any worker--> (id, state of a share) --group by id, sum--> (id, state of the set)

A set may span any number of blocks and machines. Work of a lost worker is done again by Ray; sums do not depend on who made
their terms, so nothing changes in the result.
"""

from __future__ import annotations

from typing import Any

import torch

from setstream.data.dataset import SetDataset
from setstream.data.files import need
from setstream.data.parquet import ParquetSets
from setstream.encoder import SetEncoder
from setstream.scale.partial import Share, absorb, shares
from setstream.state import State


class _Worker:
    """What each Ray worker holds: the encoder, loaded once."""

    def __init__(self, encoder: SetEncoder, sets: ParquetSets | None, chunk_size: int) -> None:
        self.encoder = encoder.eval()
        torch.set_num_threads(1)
        self.sets, self.chunk_size = sets, chunk_size

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        """From shares to rows of (id, state)."""
        ids: list[str] = []
        states: list[bytes] = []
        for share in batch["share"]:
            for name, state in absorb(self.encoder, share, self.chunk_size, self.sets):
                ids.append(name)
                states.append(state.to_bytes())
        return {"id": ids, "state": states}


def _add(a: bytes | None, b: bytes | None) -> bytes | None:
    if a is None or b is None:
        return b if a is None else a
    return (State.from_bytes(a) + State.from_bytes(b)).to_bytes()


def ray_states(
    encoder: SetEncoder,
    data: SetDataset | ParquetSets,
    chunk_size: int = 4096,
    address: str | None = None,
    workers: int | None = None,
    share_size: int | None = None,
) -> dict[str, State]:
    """The state of every set, computed by a Ray cluster: a local one, or the one at `address`."""
    ray = need("ray", "ray")
    ray_data = need("ray.data", "ray")
    aggregate = need("ray.data.aggregate", "ray")
    started = not ray.is_initialized()
    if started:
        ray.init(address=address, num_cpus=None if address else workers, include_dashboard=False, log_to_driver=False)
    try:
        sets = data if isinstance(data, ParquetSets) else None
        work: list[Share] = shares(data) if share_size is None else shares(data, share_size)
        blocks = min(len(work), 4 * max(1, workers or int(ray.cluster_resources().get("CPU", 1))))
        table = ray_data.from_items([{"share": share} for share in work], override_num_blocks=blocks)
        partial = table.map_batches(
            _Worker,
            fn_constructor_args=(encoder, sets, chunk_size),
            batch_size=1,
            compute=ray_data.ActorPoolStrategy(size=workers or max(1, int(ray.cluster_resources().get("CPU", 2)) - 1)),
        )
        summed = partial.groupby("id").aggregate(
            aggregate.AggregateFn(
                init=lambda _: None,
                accumulate_row=lambda total, row: _add(total, row["state"]),
                merge=_add,
                name="state",
            )
        )
        found = {row["id"]: State.from_bytes(row["state"]) for row in summed.iter_rows()}
    finally:
        if started:
            ray.shutdown()
    return {name: found[name] for name in (sorted(found) if isinstance(data, ParquetSets) else data.ids)}
