"""A pool that passes elements to another, with computation before or after it."""

from typing import Any

import torch
from torch import Tensor

from setstream.pools.base import Context, Cotangents, Pool, Want
from setstream.states.accumulators import Accumulator
from setstream.states.state import State


class Wrapper(Pool):
    """A pool whose state is that of its `inner` pool."""

    @property
    def inner(self) -> Pool:
        """The pool that has the state."""
        raise NotImplementedError

    def empty_accumulators(self, batch: int, device: torch.device, width: int | None = None) -> dict[str, Accumulator]:
        return self.inner.empty_accumulators(batch, device, width)

    def draw_accumulators(self, batch: int, device: torch.device, generator: torch.Generator | None) -> dict[str, Accumulator]:
        return self.inner.draw_accumulators(batch, device, generator)

    def prepare(self, state: State) -> Context:
        return self.inner.prepare(state)

    def accumulate(self, context: Context, features: Tensor, mask: Tensor | None) -> dict[str, Accumulator]:
        return self.inner.accumulate(context, features, mask)

    @property
    def takes_slots(self) -> bool:  # type: ignore[override]
        """As the inner pool."""
        return self.inner.takes_slots

    def own_slots(self, state: State) -> Tensor:
        return self.inner.own_slots(state)

    @property
    def width(self) -> int:
        return self.inner.width

    @property
    def sums_only(self) -> bool:
        return type(self).accumulate is Wrapper.accumulate and self.inner.sums_only

    @property
    def cuts_blocks(self) -> bool:
        return type(self).accumulate is Wrapper.accumulate and self.inner.cuts_blocks

    @property
    def has_pull_back(self) -> bool:
        return type(self).accumulate is Wrapper.accumulate and self.inner.has_pull_back

    def pull_back(
        self, context: Context, features: Tensor, mask: Tensor | None, whole: Cotangents, want: Want
    ) -> tuple[Tensor | None, Context]:
        return self.inner.pull_back(context, features, mask, whole, want)

    def chunks_seen(self, state: State) -> Tensor | None:
        return self.inner.chunks_seen(state)

    def finalize(self, state: State) -> Any:
        return self.inner.finalize(state)
