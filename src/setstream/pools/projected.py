"""A pool after its own module.

    z = pool({ module(φ_j) })          the module looks at one element at a time

Beside other pools in a `Parallel`, it gives each its own view of the features: a linear layer and a maximum are the instance
stream of multiple instance learning, max_j (w·φ_j + b).
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from setstream.errors import ConfigurationError
from setstream.pools.base import Context, Pool
from setstream.pools.wrapper import Wrapper
from setstream.states.accumulators import Accumulator


class Projected(Wrapper):
    """module(features), element by element, then `pool`.

    >>> import torch, setstream as ss
    >>> pool = ss.Projected(torch.nn.Linear(16, 1), ss.DeepSets("max"))
    >>> pool(torch.randn(2, 100, 16)).shape
    torch.Size([2, 1])
    """

    def __init__(self, module: nn.Module, pool: Pool, in_dim: int | None = None) -> None:
        super().__init__()
        if pool.passes > 1:
            came = f"{type(pool).__name__} needs {pool.passes} passes"
            raise ConfigurationError(f"it reads a set once, {came}: put the module into phi, or a Projected into each pass")
        self.module, self.pool = module, pool
        self.in_dim = getattr(module, "in_features", None) if in_dim is None else in_dim
        self.consistent = pool.consistent

    @property
    def inner(self) -> Pool:
        return self.pool

    def empty_accumulators(self, batch: int, device: torch.device, width: int | None = None) -> dict[str, Accumulator]:
        return self.pool.empty_accumulators(batch, device, getattr(self.module, "out_features", None))

    def accumulate(self, context: Context, features: Tensor, mask: Tensor | None) -> dict[str, Accumulator]:
        return self.pool.accumulate(context, self.module(features), mask)

    @property
    def attention(self) -> Callable[..., Any] | None:
        """The weights of a chunk's features, as those of the inner pool; None if it has none."""
        weigh = getattr(self.pool, "attention", None)
        return weigh and (lambda features, state, mask=None: weigh(self.module(features), state, mask))
