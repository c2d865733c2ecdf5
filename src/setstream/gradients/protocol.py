"""What `encode` passes to a mode: its options, and the source of blocks.

    z = mode(encoder, sets, options)          a mode is a function in a file of its own

`Batch.draw` returns the carriers: the blocks that carry the gradient, with their factor per set.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from setstream.sets.layout import Packed
from setstream.sets.partition import Carriers
from setstream.states.reduce import Group
from setstream.states.state import State


@dataclass(frozen=True)
class Options:
    """The options of `encode`, checked; `one_chunk`: it is an error if a set is given in more than one block."""

    chunk_size: int
    grad_chunks: int
    replacement: bool
    generator: torch.Generator | None
    group: Group | None
    features: str | Path
    floor: float
    one_chunk: bool
    #: The state with which the pass begins, if it is not the first.
    begun: State | None = None
    #: What the passes of one encoding have in common.
    shared: dict[str, Any] = field(default_factory=dict)


class Batch(Protocol):
    """The source of blocks: `sets.partition.InMemory`, or chunks and sources, `sets.chunks.Served`."""

    def __len__(self) -> int: ...

    @property
    def sample(self) -> Tensor:
        """At most one element."""

    @property
    def learned(self) -> Tensor | None:
        """The packed elements, where they require a gradient."""

    def whole(self) -> Packed | None:
        """All elements in one block, where that is possible."""

    def blocks(self, size: int) -> Iterable[Packed]:
        """All elements, in blocks of about `size` elements, which can be iterated any number of times."""

    def subset(self, wanted: int) -> Batch:
        """`wanted` random chunks of each set."""

    def draw(self, wanted: int, replacement: bool, size: int, apart: bool) -> tuple[Iterable[Packed], Carriers]:
        """Blocks for the forward pass, and `wanted` drawn chunks of each set, which carry the gradient."""
