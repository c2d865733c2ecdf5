"""Several pools over one pass of phi::

    z = {a: pool_a(Φ), b: pool_b(Φ), ...}          Φ computed once; each pool keeps its own accumulators

A slide classifier reads its patches through UMBC and through a maximum at once; phi, a deep network, runs once.
"""

from typing import TypeVar

import torch
from torch import Tensor, nn

from setstream.errors import ConfigurationError
from setstream.pools.base import Context, Pool
from setstream.states.accumulators import Accumulator
from setstream.states.state import State

T = TypeVar("T")


class Parallel(Pool):
    """Named pools side by side: features (B, N, D) to a dict with the result of each.

    >>> import torch, setstream as ss
    >>> pool = ss.Parallel(bag=ss.UMBC(8, num_slots=4), most=ss.DeepSets("max"))
    >>> {name: tuple(z.shape) for name, z in pool(torch.randn(2, 10, 8)).items()}
    {'bag': (2, 4, 8), 'most': (2, 8)}
    """

    def __init__(self, **pools: Pool) -> None:
        super().__init__()
        if not pools:
            raise ConfigurationError("Parallel needs at least one pool, as in Parallel(bag=UMBC(...), most=DeepSets('max'))")
        for name, pool in pools.items():
            if not isinstance(pool, Pool):
                raise ConfigurationError(f"Parallel takes pools; {name} is a {type(pool).__name__}")
            if pool.passes > 1:
                came = f"{name}, a {type(pool).__name__}, needs {pool.passes} passes"
                raise ConfigurationError(f"Parallel reads a set once; {came}")
        widths = {name: pool.in_dim for name, pool in pools.items() if pool.in_dim is not None}
        if len(set(widths.values())) > 1:
            raise ConfigurationError(f"the pools of a Parallel read the same features, so in_dim must agree; got {widths}")
        self.pools = nn.ModuleDict(pools)
        self.in_dim = next(iter(widths.values()), None)
        self.consistent = all(pool.consistent for pool in pools.values())

    @property
    def width(self) -> int:
        return max(pool.width for _, pool in self._all())

    @property
    def cuts_blocks(self) -> bool:
        return all(pool.cuts_blocks for _, pool in self._all())

    @property
    def sums_only(self) -> bool:
        return any(pool.sums_only for _, pool in self._all())

    def empty_accumulators(self, batch: int, device: torch.device, width: int | None = None) -> dict[str, Accumulator]:
        return self._named({name: pool.empty_accumulators(batch, device, width) for name, pool in self._all()})

    def draw_accumulators(self, batch: int, device: torch.device, generator: torch.Generator | None) -> dict[str, Accumulator]:
        return self._named({name: pool.draw_accumulators(batch, device, generator) for name, pool in self._all()})

    def prepare(self, state: State) -> Context:
        return self._named({name: pool.prepare(state.select(name)) for name, pool in self._all()})

    def accumulate(self, context: Context, features: Tensor, mask: Tensor | None) -> dict[str, Accumulator]:
        by_pool: dict[str, Context] = {name: {} for name in self.pools}
        for place, tensor in context.items():
            name, _, key = place.partition("/")
            by_pool[name][key] = tensor
        return self._named({name: pool.accumulate(by_pool[name], features, mask) for name, pool in self._all()})

    def finalize(self, state: State) -> dict[str, Tensor]:
        return {name: pool.finalize(state.select(name)) for name, pool in self._all()}

    def chunks_seen(self, state: State) -> Tensor | None:
        members = [pool.chunks_seen(state.select(name)) for name, pool in self._all()]
        known = [chunks for chunks in members if chunks is not None]
        return torch.stack(known).amax(0) if known else None

    def attention(self, features: Tensor, state: State, mask: Tensor | None = None) -> dict[str, Tensor]:
        """The weights of every member that has some, by name."""
        return {
            name: weigh(features, state.select(name), mask)
            for name, pool in self._all()
            if (weigh := getattr(pool, "attention", None)) is not None
        }

    @staticmethod
    def _named(by_pool: dict[str, dict[str, T]]) -> dict[str, T]:
        return {f"{name}/{key}": value for name, values in by_pool.items() for key, value in values.items()}

    def _all(self) -> list[tuple[str, Pool]]:
        return [(name, pool) for name, pool in self.pools.items() if isinstance(pool, Pool)]
