"""Several pools over one pass of phi.

    z = {a: pool_a(Φ), b: pool_b(Φ), ...}          Φ computed once; each pool keeps its own parts of the state

A slide classifier reads its patches through UMBC and through a maximum at once; phi, a deep network, runs once.
"""

import torch
from torch import Tensor, nn

from setstream.errors import ConfigurationError
from setstream.pools.base import Context, Pool
from setstream.states.accumulators import Accumulator
from setstream.states.state import State


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
        widths = {name: pool.in_dim for name, pool in pools.items() if pool.in_dim is not None}
        if len(set(widths.values())) > 1:
            raise ConfigurationError(f"the pools of a Parallel read the same features, so in_dim must agree; got {widths}")
        self.pools = nn.ModuleDict(pools)
        self.in_dim = next(iter(widths.values()), None)
        self.consistent = all(pool.consistent for pool in pools.values())

    def empty_accumulators(self, batch: int, device: torch.device, width: int | None = None) -> dict[str, Accumulator]:
        """The parts of all, under the name of each."""
        return {
            f"{name}/{key}": part
            for name, pool in self._all()
            for key, part in pool.empty_accumulators(batch, device, width).items()
        }

    def draw_accumulators(self, batch: int, device: torch.device, generator: torch.Generator | None) -> dict[str, Accumulator]:
        """What each draws."""
        return {
            f"{name}/{key}": part
            for name, pool in self._all()
            for key, part in pool.draw_accumulators(batch, device, generator).items()
        }

    def prepare(self, state: State) -> Context:
        """The contexts of all."""
        return {f"{name}/{key}": t for name, pool in self._all() for key, t in pool.prepare(state.select(name)).items()}

    def accumulate(self, context: Context, features: Tensor, mask: Tensor | None) -> dict[str, Accumulator]:
        """The same features through each."""
        parts: dict[str, Accumulator] = {}
        for name, pool in self._all():
            start = name + "/"
            own = {key.removeprefix(start): tensor for key, tensor in context.items() if key.startswith(start)}
            parts |= {start + key: part for key, part in pool.accumulate(own, features, mask).items()}
        return parts

    def finalize(self, state: State) -> dict[str, Tensor]:
        """The result of each, by name."""
        return {name: pool.finalize(state.select(name)) for name, pool in self._all()}

    def chunks_seen(self, state: State) -> Tensor | None:
        """The most of any member."""
        seen = [own for name, pool in self._all() if (own := pool.chunks_seen(state.select(name))) is not None]
        return torch.stack(seen).amax(0) if seen else None

    def attention(self, features: Tensor, state: State, mask: Tensor | None = None) -> dict[str, Tensor]:
        """The weights of every member that has some, by name."""
        return {
            name: weigh(features, state.select(name), mask)
            for name, pool in self._all()
            if (weigh := getattr(pool, "attention", None)) is not None
        }

    def _all(self) -> list[tuple[str, Pool]]:
        return [(name, pool) for name, pool in self.pools.items() if isinstance(pool, Pool)]
