"""The Slot Set Encoder, as compositions of UMBC::

    SSE               z = pool_i UMBC(X)_i              slots of one shared Gaussian, slot-sigmoid, pooling over slots optional
    hierarchical SSE  z = SSE_L(... SSE_2(SSE_1(X)))    the first reads the set, each other one the previous slots

Bruno et al., "Mini-Batch Consistent Slot Set Encoder for Scalable Set Encoding", NeurIPS 2021. Only the first layer sees
elements, so only it has a state; the others run in `finalize`, on a few slots.

slot-sigmoid has no division by the weights' sum over the set in the paper's table, and one in its released code: `normalise`
chooses, the table is the default. In eval mode the mean of the shared Gaussian would make all slots equal and the attention
flat, so SSE keeps one fixed draw for it (or pass `eval_slots="mean"`).
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from setstream.errors import ConfigurationError
from setstream.pools.activations import Activation
from setstream.pools.deepsets import POOLS
from setstream.pools.umbc import UMBC
from setstream.pools.wrapper import Wrapper
from setstream.states.accumulators import Accumulator
from setstream.states.state import State


def pool_slots(z: Tensor, pool: str | None) -> Tensor:
    """Pool z (B, K, D) over its slots to (B, D); None leaves it as it is."""
    if pool is None:
        return z
    if pool in ("max", "min"):
        return z.amax(1) if pool == "max" else z.amin(1)
    return z.mean(1) if pool == "mean" else z.sum(1)


class HierarchicalSSE(Wrapper):
    """Slot set encoders on top of each other; num_slots has one entry per layer: (B, N, in_dim) to (B, num_slots[-1], out_dim).

    >>> import torch, setstream as ss
    >>> pool = ss.HierarchicalSSE(16, num_slots=(32, 8, 1), out_dim=16)
    >>> pool(torch.randn(2, 100, 16)).shape
    torch.Size([2, 1, 16])
    """

    def __init__(
        self,
        in_dim: int,
        num_slots: Sequence[int],
        slot_dim: int | None = None,
        out_dim: int | None = None,
        heads: int = 1,
        *,
        pool: str | None = None,
        activation: str | Activation = "slot-sigmoid",
        slots: str = "shared-gaussian",
        eval_slots: str = "fixed",
        **options: Any,
    ) -> None:
        super().__init__()
        options |= {"activation": activation, "slots": slots, "eval_slots": eval_slots}
        if not num_slots:
            raise ConfigurationError("num_slots needs one entry for each layer; got none")
        if pool not in (None, *POOLS):
            raise ConfigurationError(f"unknown pool {pool!r} over the slots: choose one of {', '.join(POOLS)}, or None")
        self.in_dim, self.pool = in_dim, pool
        width = in_dim if out_dim is None else out_dim
        self.layers = nn.ModuleList(
            UMBC(width if depth else in_dim, count, slot_dim, width, heads, **options) for depth, count in enumerate(num_slots)
        )

    @property
    def inner(self) -> UMBC:
        return self._umbcs()[0]

    @property
    def first(self) -> UMBC:
        """The layer that reads the elements."""
        return self.inner

    @property
    def num_slots(self) -> int:
        """The number of slots of the last layer."""
        return self._umbcs()[-1].num_slots

    def _umbcs(self) -> list[UMBC]:
        return [layer for layer in self.layers if isinstance(layer, UMBC)]

    def configuration(self) -> dict[str, Any]:
        return {"pool": self.pool}  # the layers have their own configurations

    def draw_accumulators(self, batch: int, device: torch.device, generator: torch.Generator | None) -> dict[str, Accumulator]:
        draws: dict[str, Accumulator] = {}
        for depth, layer in enumerate(self._umbcs()):
            draw = layer.draw_accumulators(batch, device, generator)
            draws |= {f"{name}-{depth}" if depth else name: accumulator for name, accumulator in draw.items()}
        return draws

    def finalize(self, state: State) -> Tensor:
        """The slots of the last layer, or their pool."""
        first, *later = self._umbcs()
        z = first.finalize(state)
        for depth, layer in enumerate(later, start=1):
            draw = state.accumulators.get(f"draw-{depth}")
            draws = {} if draw is None else {"draw": draw}
            seen = (state.count > 0).unsqueeze(1).expand(z.shape[:2])  # an empty set stays empty
            sums = layer.accumulate(layer.prepare(State(draws, state.count)), z, seen)
            z = layer.finalize(State(draws | sums, state.count))
        return pool_slots(z, self.pool)

    def attention(self, features: Tensor, state: State, mask: Tensor | None = None) -> Tensor:
        """The weights of the first layer, which alone sees the elements."""
        return self.first.attention(features, state, mask)

    def permute_slots_(self, order: Tensor) -> None:
        """Reorder the slots of the last layer."""
        self._umbcs()[-1].permute_slots_(order)


class SSE(HierarchicalSSE):
    """The Slot Set Encoder: (B, N, in_dim) to (B, num_slots, out_dim), or to (B, out_dim) with `pool` over the slots.

    Takes the options of `UMBC`, with SSE's defaults: slots="shared-gaussian", activation="slot-sigmoid".

    >>> import torch, setstream as ss
    >>> ss.SSE(16, num_slots=8)(torch.randn(2, 100, 16)).shape
    torch.Size([2, 8, 16])
    >>> ss.SSE(16, num_slots=8, pool="max")(torch.randn(2, 100, 16)).shape
    torch.Size([2, 16])
    """

    def __init__(
        self,
        in_dim: int,
        num_slots: int,
        slot_dim: int | None = None,
        out_dim: int | None = None,
        heads: int = 1,
        **options: Any,
    ) -> None:
        super().__init__(in_dim, (num_slots,), slot_dim, out_dim, heads, **options)
