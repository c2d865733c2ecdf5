"""Where a pass gets its blocks from, and the pass of which only drawn blocks go back.

    state = Σ_blocks absorb(phi(block)),       gradient: Σ_{drawn} C/m' · ∂ absorb(phi(block))

Blocks lie in memory, as pieces of packed elements, or are served by a source whose length is known only after its first
reading: then the draw waits until the way back.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from setstream.gradients.exact import Block, Name, Pass
from setstream.sets.layout import Packed
from setstream.sets.partition import Chunks, Piece, draw_counts, factor


class InMemory:
    """Pieces of packed elements, as blocks that can be gone through again and again."""

    def __init__(self, packed: Packed, pieces: list[Piece]) -> None:
        self.packed, self.pieces = packed, pieces

    def __iter__(self) -> Iterator[Block]:
        for index, piece in enumerate(self.pieces):
            yield Block(index, piece.of(self.packed.elements), piece.positions)


class Served:
    """The chunks of a source as blocks; counts, on the way, how many chunks each set has."""

    def __init__(self, source: Chunks, home: torch.device | None) -> None:
        self.source, self.home = source, home
        self.present: list[list[int]] = []

    def __iter__(self) -> Iterator[Block]:
        for index, packed in enumerate(self.source):
            if index == len(self.present):
                self.present.append([int(length > 0) for length in packed.lengths])
            yield Block(index, packed if self.home is None else Packed(packed.elements.to(self.home), packed.lengths))


class DrawnPass(Pass):
    """A pass of which only drawn blocks go back: those of a partition in memory, drawn before it, or chunks of a source.

    The way forward need not meet the drawn blocks one by one: it goes through memory in its order, and through views. Unless
    the way back must know which block did what: where phi draws random numbers, or a part of the state is one element's alone.
    """

    carriers: list[Block] | None = None
    known: list[Tensor] | None = None
    wanted: int = 1
    replacement: bool = False
    generator: torch.Generator | None = None

    def tie(self, tensors: dict[Name, Tensor]) -> dict[Name, Tensor]:
        """Values of the whole; gradients of the drawn blocks' ordinary graphs. Ranks must exchange theirs, on the way back."""
        if self.group is not None:
            return super().tie(tensors)
        ones: dict[str, dict[str, Tensor]] = {}
        for (part, key), tensor in tensors.items():
            ones.setdefault(part, {})[key] = torch.ones_like(tensor)
        names = list(tensors)
        for block, factors in self.factors():
            with self._replay(block):
                features = self.encoder.features(block.packed.elements)
            outputs, weights = self.outputs(block, self.prepared, features, ones, factors)
            for name, out, weight in zip(names, outputs, weights, strict=True):
                tensors[name] = tensors[name] + (out - out.detach()) * weight
        return tensors

    def factors(self) -> Iterator[tuple[Block, Tensor | None]]:
        """The drawn blocks with their factors."""
        if self.carriers is not None and self.known is not None:
            yield from zip(self.carriers, (factor.to(self.empty.device) for factor in self.known), strict=True)
            return
        factors = self._draw_served()
        last = max(factors, default=-1)
        for block in self.blocks:
            if block.index in factors:
                yield block, factors[block.index].to(self.empty.device)
            if block.index >= last:
                return

    def _draw_served(self) -> dict[int, Tensor]:
        """Now that the source has been read once, its length is known: draw for each set among its own chunks."""
        assert isinstance(self.blocks, Served)
        present = torch.tensor(self.blocks.present)  # (C, B)
        factors: dict[int, Tensor] = {}
        for index in range(present.shape[1]):
            own = present[:, index].nonzero().flatten()
            for chunk, times in draw_counts(len(own), self.wanted, self.replacement, self.generator).items():
                row = factors.setdefault(int(own[chunk]), torch.zeros(present.shape[1]))
                row[index] = factor(len(own), self.wanted, times)
        return factors
