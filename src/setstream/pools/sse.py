"""The Slot Set Encoder, as compositions of UMBC.

    SSE               z = pool_i UMBC(X)_i              slots of one shared Gaussian, slot-sigmoid, pooling over slots optional
    hierarchical SSE  z = SSE_L(... SSE_2(SSE_1(X)))    the first reads the set, each next one reads the slots before it

Bruno et al., "Mini-Batch Consistent Slot Set Encoder for Scalable Set Encoding", NeurIPS 2021. Only the first layer sees
elements, so only it has a state; the rest happens in `finalize`, on a handful of slots.

slot-sigmoid has no division by the weights' sum over the set in the paper's table, and one in its released code: `normalise`
chooses, the table is the default. In eval mode the mean of the shared Gaussian would make all slots equal and the attention
flat, so SSE keeps one fixed draw for it (`eval_slots="mean"` is the other choice).
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from setstream.errors import ConfigurationError
from setstream.pools.activations import Activation
from setstream.pools.base import Context, Pool
from setstream.pools.deepsets import POOLS
from setstream.pools.umbc import UMBC
from setstream.states.accumulators import Accumulator
from setstream.states.state import State


def pool_slots(z: Tensor, pool: str | None) -> Tensor:
    """Pool z (B, K, D) over its slots to (B, D); None leaves it as it is."""
    if pool is None:
        return z
    if pool in ("max", "min"):
        return z.amax(1) if pool == "max" else z.amin(1)
    return z.mean(1) if pool == "mean" else z.sum(1)


class HierarchicalSSE(Pool):
    """Slot set encoders on top of each other; num_slots has one entry a layer: (B, N, in_dim) to (B, num_slots[-1], out_dim).

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
        if not num_slots:
            raise ConfigurationError("num_slots needs one entry for each layer; got none")
        if pool not in (None, *POOLS):
            raise ConfigurationError(f"unknown pool {pool!r} over the slots: choose one of {', '.join(POOLS)}, or None")
        self.in_dim, self.pool = in_dim, pool
        width = in_dim if out_dim is None else out_dim
        self.layers = nn.ModuleList(
            UMBC(
                width if depth else in_dim,
                count,
                slot_dim,
                width,
                heads,
                activation=activation,
                slots=slots,
                eval_slots=eval_slots,
                **options,
            )
            for depth, count in enumerate(num_slots)
        )

    @property
    def first(self) -> UMBC:
        """The layer that reads the elements."""
        layer = self.layers[0]
        assert isinstance(layer, UMBC)
        return layer

    @property
    def num_slots(self) -> int:
        """Of the last layer."""
        return [self.first, *self._later()][-1].num_slots

    def _later(self) -> list[UMBC]:
        return [layer for layer in self.layers[1:] if isinstance(layer, UMBC)]

    def configuration(self) -> dict[str, Any]:
        """The pooling over the slots; the layers speak for themselves."""
        return {"pool": self.pool}

    def empty_accumulators(self, batch: int, device: torch.device, width: int | None = None) -> dict[str, Accumulator]:
        """Those of the first layer."""
        return self.first.empty_accumulators(batch, device, width)

    def draw_accumulators(self, batch: int, device: torch.device, generator: torch.Generator | None) -> dict[str, Accumulator]:
        """The slots of all layers."""
        parts = self.first.draw_accumulators(batch, device, generator)
        for depth, layer in enumerate(self._later(), start=1):
            parts |= {f"{name}-{depth}": part for name, part in layer.draw_accumulators(batch, device, generator).items()}
        return parts

    def prepare(self, state: State) -> Context:
        """The first layer's queries."""
        return self.first.prepare(state)

    def accumulate(self, context: Context, features: Tensor, mask: Tensor | None) -> dict[str, Accumulator]:
        """The first layer's sums."""
        return self.first.accumulate(context, features, mask)

    def finalize(self, state: State) -> Tensor:
        """The slots of the last layer, or their pool."""
        z = self.first.finalize(state)
        for depth, layer in enumerate(self._later(), start=1):
            own = State(
                {"draw": state.accumulators[f"draw-{depth}"]} if f"draw-{depth}" in state.accumulators else {}, state.count
            )
            seen = (state.count > 0).unsqueeze(1).expand(z.shape[:2])  # an empty set stays empty
            parts = layer.accumulate(layer.prepare(own), z, seen)
            z = layer.finalize(State(own.accumulators | parts, state.count))
        return pool_slots(z, self.pool)

    def attention(self, features: Tensor, state: State, mask: Tensor | None = None) -> Tensor:
        """The weights of the first layer, which alone sees the elements."""
        return self.first.attention(features, state, mask)

    def permute_slots_(self, order: Tensor) -> None:
        """Reorder the slots of the last layer."""
        [self.first, *self._later()][-1].permute_slots_(order)


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
