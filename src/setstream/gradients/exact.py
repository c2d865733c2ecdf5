"""exact: the full gradient in the memory of one chunk.

∂L/∂θ = Σ_blocks ∂L/∂state · ∂absorb(phi(block))/∂θ          every block recomputed in the backward pass, with factor one
"""

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from setstream.gradients.base import Forward, Name, Pass, draws_numbers
from setstream.gradients.protocol import Batch, Options
from setstream.models.encoder import SetEncoder
from setstream.sets.layout import Packed
from setstream.sets.partition import Carriers
from setstream.states.accumulators import align


def exact(encoder: SetEncoder, sets: Batch, options: Options) -> Any:
    """z, with the gradient of all blocks."""
    run = Pass(encoder, sets, options)
    blocks = sets.blocks(min(options.chunk_size * len(sets), run.reader.block_size(sets.sample)))
    apart = run.owned or draws_numbers(encoder, sets.sample)
    with torch.no_grad():
        forward = run.forward(blocks if apart else sets.blocks(run.forward_size(sets)))
    return run.encode(forward, Recomputation(run, forward, AllBlocks(blocks)))


class AllBlocks:
    """All blocks as carriers of the gradient."""

    def __init__(self, blocks: Iterable[Packed]) -> None:
        self.blocks = blocks

    def __iter__(self) -> Iterator[tuple[int, Packed, None]]:
        return ((index, block, None) for index, block in enumerate(self.blocks))


class Recomputation:
    """The backward pass in which carriers are recomputed one after another."""

    def __init__(self, run: Pass, forward: Forward, carriers: Carriers) -> None:
        self.run, self.forward, self.carriers = run, forward, carriers

    def __call__(self, cotangents: dict[Name, Tensor]) -> list[Tensor | None]:
        """The gradients of all inputs, given those of the state."""
        run = self.run
        to_elements = None if run.learned is None else torch.zeros_like(run.learned)
        sums = run.leaves.sums()
        way_back = run.way_back(self.forward, cotangents)
        for index, block, factor in self.carriers:
            elements = block.elements.detach().requires_grad_(to_elements is not None)
            extra = () if to_elements is None else (elements,)
            if way_back is None:
                parts = self.forward.contributions(index, run.recompute(index, block, elements))
                weighted = [
                    cotangents[name] if factor is None else cotangents[name] * align(factor.to(part), part)
                    for name, part in parts.items()
                ]
                gradients = sums.add(parts.values(), weighted, extra)
            else:
                features = run.recompute_features(index, elements)
                bars = way_back(block, features.detach(), "rows" if run.learns_phi else None, factor)
                gradients = sums.add([features], [bars], extra)
            if to_elements is not None and gradients[0] is not None:
                to_elements[block.positions] += gradients[0]
        if way_back is not None:
            run.leaves.add_context(sums, way_back.bars)
        return run.gradients(sums, to_elements)
