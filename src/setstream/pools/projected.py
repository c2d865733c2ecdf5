"""A pool behind a module of its own.

    z = pool({ module(φ_j) })          the module looks at one element at a time

Beside other pools in a `Parallel`, it gives each its own view of the features: a linear layer and a maximum are the instance
stream of multiple instance learning, max_j (w·φ_j + b).
"""

from typing import Any

import torch
from torch import Tensor, nn

from setstream.pools.base import Context, Pool
from setstream.states.accumulators import Accumulator
from setstream.states.state import State


class Projected(Pool):
    """module(features), element by element, then `pool`.

    >>> import torch, setstream as ss
    >>> pool = ss.Projected(torch.nn.Linear(16, 1), ss.DeepSets("max"))
    >>> pool(torch.randn(2, 100, 16)).shape
    torch.Size([2, 1])
    """

    def __init__(self, module: nn.Module, pool: Pool, in_dim: int | None = None) -> None:
        super().__init__()
        self.module, self.pool = module, pool
        self.in_dim = getattr(module, "in_features", None) if in_dim is None else in_dim
        self.consistent = pool.consistent

    def empty_accumulators(self, batch: int, device: torch.device, width: int | None = None) -> dict[str, Accumulator]:
        """Those of the pool, as wide as what the module gives, where it tells."""
        return self.pool.empty_accumulators(batch, device, getattr(self.module, "out_features", None))

    def draw_accumulators(self, batch: int, device: torch.device, generator: torch.Generator | None) -> dict[str, Accumulator]:
        """Those of the pool."""
        return self.pool.draw_accumulators(batch, device, generator)

    def prepare(self, state: State) -> Context:
        """What the pool prepares."""
        return self.pool.prepare(state)

    def accumulate(self, context: Context, features: Tensor, mask: Tensor | None) -> dict[str, Accumulator]:
        """The pool's parts of the projected features."""
        return self.pool.accumulate(context, self.module(features), mask)

    def chunks_seen(self, state: State) -> Tensor | None:
        """Those of the pool."""
        return self.pool.chunks_seen(state)

    def finalize(self, state: State) -> Any:
        """The pool's z."""
        return self.pool.finalize(state)
