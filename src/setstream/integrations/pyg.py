"""Pools as aggregations of PyG: groups of nodes or edges are sets::

    z_g = pool({ x_i : index_i = g })          (groups, num_slots * out_dim), or (groups, num_slots, out_dim)

Pass them to a `MessagePassing` as aggr=, or use them as a readout of graphs. `index` need not be sorted, groups may be empty.
"""

from typing import Any

import torch
from torch import Tensor, nn

from setstream._utils.optional import need
from setstream.errors import ConfigurationError, ShapeError
from setstream.models.encoder import SetEncoder
from setstream.pools import SSE, UMBC, DeepSets
from setstream.pools.base import Pool, named_tensors

need("torch_geometric", "pyg", "aggregations")

from torch_geometric.nn.aggr import Aggregation  # noqa: E402 - only after the extra is known to be there
from torch_geometric.nn.inits import reset  # noqa: E402

Index = Tensor | None


class PoolAggregation(Aggregation):
    """Any pool as an aggregation; several results (`ss.Parallel`) are concatenated.

    Args:
        flatten: Put the slots of a group into one row, as PyG's layers expect; False keeps (groups, num_slots, out_dim).

    >>> aggregate = PoolAggregation(ss.Parallel(slots=ss.UMBC(8, num_slots=4), most=ss.DeepSets("max")))
    >>> x, index = torch.randn(6, 8), torch.tensor([2, 0, 2, 0, 2, 0])
    >>> aggregate(x, index, dim_size=4).shape             # groups 1 and 3 are empty
    torch.Size([4, 40])
    """

    def __init__(self, pool: Pool, flatten: bool = True) -> None:
        super().__init__()
        if not isinstance(pool, Pool):
            raise ConfigurationError(f"PoolAggregation takes an ss.Pool (UMBC, DeepSets, ...); got {type(pool).__name__}")
        # Values are not looked at: inside a network, a check for NaN would make the device wait.
        self.encoder = SetEncoder(nn.Identity(), pool, check_finite=False)
        self.flatten = flatten

    @property
    def pool(self) -> Pool:
        return self.encoder.pool

    def reset_parameters(self) -> None:
        """Reset the weights of all submodules that have a `reset_parameters`."""
        reset(self.pool)

    def forward(
        self, x: Tensor, index: Index = None, ptr: Index = None, dim_size: int | None = None, dim: int = -2, **_: Any
    ) -> Any:
        """x (N, in_dim) and either index (N,) or ptr (groups + 1,) to one row, or one block of slots, per group."""
        if x.dim() != 2 or dim not in (-2, 0):
            raise ShapeError(f"an aggregation takes x (N, F) and groups its first axis; got {tuple(x.shape)} and dim = {dim}")
        if ptr is None:
            index = torch.zeros(len(x), dtype=torch.int64, device=x.device) if index is None else index
            if index.shape != (len(x),):
                raise ShapeError(f"index has one entry for each of the {len(x)} rows of x; got {tuple(index.shape)}")
            groups = int(index.max()) + 1 if dim_size is None and len(x) else dim_size or 0
            lengths = torch.bincount(index, minlength=groups)
            if len(lengths) > groups:
                raise ShapeError(f"index names group {len(lengths) - 1}, but dim_size is {groups}: it must be larger")
            x = x.index_select(0, index.argsort(stable=True))
            ptr = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
        if len(ptr) < 2:
            raise ShapeError("there are no groups: give dim_size, or at least one row")
        z = self.encoder((x, ptr))
        if isinstance(z, dict) and not self.flatten:
            return z
        rows = [tensor.flatten(1) if self.flatten else tensor for _, tensor in named_tensors(z)]
        return rows[0] if len(rows) == 1 else torch.cat(rows, dim=1)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.pool})"


class UMBCAggregation(PoolAggregation):
    """UMBC with the options of `ss.UMBC`: x (N, in_dim) to (groups, num_slots * out_dim).

    >>> UMBCAggregation(8, num_slots=4, heads=2)(torch.randn(6, 8), torch.tensor([0, 0, 1, 1, 1, 2])).shape
    torch.Size([3, 32])
    """

    def __init__(self, in_dim: int, num_slots: int = 4, *args: Any, flatten: bool = True, **options: Any) -> None:
        super().__init__(UMBC(in_dim, num_slots, *args, **options), flatten)


class SSEAggregation(PoolAggregation):
    """The Slot Set Encoder with the options of `ss.SSE`."""

    def __init__(self, in_dim: int, num_slots: int = 4, *, flatten: bool = True, **options: Any) -> None:
        super().__init__(SSE(in_dim, num_slots, **options), flatten)


class DeepSetsAggregation(PoolAggregation):
    """Mean, sum, max or min, in the accumulators of `ss.DeepSets`."""

    def __init__(self, pool: str = "mean") -> None:
        super().__init__(DeepSets(pool))
