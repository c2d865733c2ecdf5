"""The features of all elements between the two directions of `importance`: in memory, in files, or computed again."""

import tempfile
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from setstream.errors import ConfigurationError
from setstream.gradients.base import Pass
from setstream.sets.layout import Packed
from setstream.states.state import State


class RecomputedFeatures:
    """Nothing is kept: two more forward passes of phi without a graph. The base of the other caches."""

    #: Whether `graph` gives the graphs of the forward pass, which other backward passes need as well.
    keeps_graphs = False

    def __init__(self, run: Pass) -> None:
        self.run = run

    def absorb(self, index: int, block: Packed, features: Tensor) -> State:
        """The state of a block in the forward pass."""
        return self.run.encoder.absorb(self.run.empty, self.run.prepared, block, features)

    def features(self, index: int, block: Packed) -> Tensor:
        """The features of a block in the backward pass, without a graph."""
        return self.run.features(index, block.elements)

    def graph(self, index: int, block: Packed) -> tuple[Tensor, State]:
        """The features of a block as a leaf, and its state as a function of them."""
        features = self.features(index, block).detach().requires_grad_(self.run.learns_phi)
        return features, self.run.absorb(block, features)


class FeaturesInFiles(RecomputedFeatures):
    """Features in files of a temporary folder below a given one."""

    def __init__(self, run: Pass, folder: str | Path) -> None:
        super().__init__(run)
        if not Path(folder).is_dir():
            raise ConfigurationError(f"features must be 'cache', 'recompute' or an existing folder; got {str(folder)!r}")
        self.folder = tempfile.TemporaryDirectory(prefix="setstream-features-", dir=folder)

    def absorb(self, index: int, block: Packed, features: Tensor) -> State:
        kept = features.detach().cpu()
        np.save(self._path(index), (kept if kept.dtype == torch.float64 else kept.float()).numpy())
        return super().absorb(index, block, features)

    def features(self, index: int, block: Packed) -> Tensor:
        return torch.from_numpy(np.load(self._path(index))).to(self.run.empty.device)

    def _path(self, index: int) -> Path:
        return Path(self.folder.name) / f"{index}.npy"


class FeaturesInMemory(RecomputedFeatures):
    """Features and the pool's graph in memory: for a folded UMBC one weight per element and slot."""

    keeps_graphs = True

    def __init__(self, run: Pass) -> None:
        super().__init__(run)
        self.graphs: dict[int, tuple[Tensor, State]] = {}

    def absorb(self, index: int, block: Packed, features: Tensor) -> State:
        features = features.detach().requires_grad_(self.run.learns_phi)
        chunk = self.run.absorb(block, features)
        self.graphs[index] = features, chunk
        return chunk.detach()

    def graph(self, index: int, block: Packed) -> tuple[Tensor, State]:
        return self.graphs[index]


def open_cache(features: str | Path, run: Pass) -> RecomputedFeatures:
    """The cache that the option `features` names."""
    if features == "cache":
        return FeaturesInMemory(run)
    return RecomputedFeatures(run) if features == "recompute" else FeaturesInFiles(run, features)
