"""exact: the full gradient in the memory of one chunk.

∂L/∂θ = Σ_blocks ∂L/∂state · ∂absorb(phi(block))/∂θ          every block recomputed in the backward pass, with factor one

With several passes over a set, the backward pass of the first comes last: it goes through phi for the sum of what all want.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from setstream.gradients.base import Forward, Name, Pass, PoolGradient, through_pools
from setstream.gradients.protocol import Batch, Options
from setstream.models.encoder import SetEncoder
from setstream.sets.layout import Packed
from setstream.sets.partition import Carriers
from setstream.states.accumulators import align


def exact(encoder: SetEncoder, sets: Batch, options: Options) -> Any:
    """z, with the gradient of all blocks."""
    run = Pass(encoder, sets, options)
    random = run.draws_numbers(sets.sample)
    first: Recomputation | None = None if random else run.first_pass()  # each pass has random numbers of its own
    if first is None:
        carriers: Carriers = AllBlocks(sets.blocks(min(options.chunk_size * len(sets), run.reader.block_size(sets.sample))))
    else:
        carriers = first.carriers
    apart = run.owned or random
    with torch.no_grad():
        forward = run.forward((block for _, block, _ in carriers) if apart else sets.blocks(run.forward_size(sets)))
    recomputation = Recomputation(run, forward, carriers, first)
    run.show_next_pass(first or recomputation)
    return run.encode(forward, recomputation)


class AllBlocks:
    """All blocks as carriers of the gradient."""

    def __init__(self, blocks: Iterable[Packed]) -> None:
        self.blocks = blocks

    def __iter__(self) -> Iterator[tuple[int, Packed, None]]:
        return ((index, block, None) for index, block in enumerate(self.blocks))


class Recomputation:
    """The backward pass in which carriers are recomputed one after another."""

    def __init__(self, run: Pass, forward: Forward, carriers: Carriers, first: Recomputation | None = None) -> None:
        self.run, self.forward, self.carriers, self.first = run, forward, carriers, first
        #: The gradients of the later passes, by pass: each backward pass replaces its own.
        self.later: dict[Recomputation, PoolGradient] = {}

    def __call__(self, cotangents: dict[Name, Tensor]) -> list[Tensor | None]:
        """The gradients of all inputs, given those of the state."""
        run, later, self.later = self.run, [*self.later.values()], {}
        to_elements = None if run.learned is None else torch.zeros_like(run.learned)
        sums = run.leaves.sums()
        own = PoolGradient(run, self.forward, cotangents)
        if self.first is not None:  # the pool alone; the first pass goes through phi
            for index, block, _ in self.carriers:
                with torch.no_grad():
                    features = run.features(index, block.elements, again=True)
                own.to_features(index, block, features, sums, None)
            own.add_context(sums)
            self.first.later[self] = own
            return run.gradients(sums, None)
        way_back = own.way_back
        for index, block, factor in self.carriers:
            elements = block.elements.detach().requires_grad_(to_elements is not None)
            extra = () if to_elements is None else (elements,)
            if later:
                features = run.recompute_features(index, elements)
                rows = features.detach()
                g = own.to_features(index, block, rows, sums, "rows" if run.learns_phi else None)
                bars = [] if g is None else [g + through_pools(later, index, block, rows)]
                gradients = sums.add([features][: len(bars)], bars, extra)
            elif way_back is None:
                parts = self.forward.contributions(index, run.recompute(index, block, elements))
                weighted = [
                    cotangents[name] if factor is None else cotangents[name] * align(factor.to(part), part)
                    for name, part in parts.items()
                ]
                gradients = sums.add(parts.values(), weighted, extra)
            else:
                features = run.recompute_features(index, elements)
                rows = way_back(block, features.detach(), "rows" if run.learns_phi else None, factor)
                gradients = sums.add([features], [rows], extra)
            if to_elements is not None and gradients[0] is not None:
                to_elements[block.positions] += gradients[0]
        own.add_context(sums)
        return run.gradients(sums, to_elements)
