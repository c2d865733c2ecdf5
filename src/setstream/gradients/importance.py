"""importance: the gradient through the pool is exact, through phi it is sampled by importance.

    g_j = ∂L/∂φ_j                       exact for every element, once all features are known: the pool is cheap
    π_j = min(1, c w_j),  Σ_j π_j = m   w_j = |g_j| + floor · mean|g|;  0 where g_j = 0
    ∂L/∂θ ≈ Σ_{j drawn} g_j / π_j · ∂φ_j/∂θ,     each j drawn with probability π_j: unbiased for any positive π

Slots and projections get their exact gradient; only phi, the expensive part, is sampled. The draw is
systematic: a uniform offset, then one element for each unit of the cumulated π in random order. So m elements are drawn, none
twice, and those with π_j = 1 always. Where few elements have a gradient at all (a max pool), the result is exact.

Among estimators that know |g_j| only, w_j = |g_j| has the least variance if all ∂φ_j/∂θ are of one size; the floor bounds the
variance where they are not: no weight g_j/π_j exceeds |g_j| by more than a factor N (1 + floor) / (m floor).
"""

import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from setstream.errors import ConfigurationError
from setstream.gradients.base import Forward, GradientSums, Name, Pass, drawing, draws_numbers, forward_size
from setstream.gradients.protocol import Batch, Options
from setstream.models.encoder import SetEncoder
from setstream.sets.layout import Packed
from setstream.states.state import State

FLOOR = 0.1


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


def importance(encoder: SetEncoder, sets: Batch, options: Options, norm: float = 2.0) -> Any:
    """z, with the exact gradient through the pool and a sampled one through phi.

    norm: of g_j; Euclidean is the default. docs/results/gradients.md has measurements of it and of the floor.
    """
    if draws_numbers(encoder, sets.sample):
        raise ConfigurationError(
            "phi draws random numbers (a dropout in training mode), and 'importance' recomputes single elements, whose masks "
            "cannot be drawn again. Put dropout into the head, set phi.eval(), or use gradient='exact' or 'unbiased'."
        )
    run = Pass(encoder, sets, options)
    cache = open_cache(options.features, run)
    size = forward_size(encoder, sets, options)
    if not cache.keeps_graphs:  # a block has a graph through the pool, which takes several times its memory
        size = max(options.chunk_size * len(sets), size // 4)
    blocks = sets.blocks(size)
    with torch.no_grad():
        forward = run.forward(blocks, cache.absorb)
    return run.encode(forward, ImportanceSampling(run, forward, blocks, cache, norm))


class ImportanceSampling:
    """The backward pass: exact through the pool for all elements, through phi for the drawn ones."""

    def __init__(self, run: Pass, forward: Forward, blocks: Iterable[Packed], cache: RecomputedFeatures, norm: float) -> None:
        self.run, self.forward, self.blocks, self.cache, self.norm = run, forward, blocks, cache, norm

    def __call__(self, cotangents: dict[Name, Tensor]) -> list[Tensor | None]:
        """The gradients of all inputs, given those of the state."""
        sums, learned = self.run.leaves.sums(), self.run.learned
        to_elements = None if learned is None else torch.zeros_like(learned)
        kept: dict[int, Tensor] = {}
        norms: dict[int, Tensor] = {}
        lengths: list[list[int]] = []
        for index, block in enumerate(self.blocks):
            for g in self._through_pool(index, block, cotangents, sums):
                norms[index] = torch.linalg.vector_norm(g, self.norm, dim=1)
                lengths.append(block.lengths)
                if self.cache.keeps_graphs:
                    kept[index] = g
        drawn = self._draw(norms, lengths) if norms else {}
        rows, weighted, positions = [], [], []
        for index, block in enumerate(self.blocks if drawn else ()):
            chosen, weights = drawn.get(index, (None, None))
            if chosen is not None and weights is not None:
                (g,) = [kept[index]] if index in kept else self._through_pool(index, block, cotangents, GradientSums([]))
                rows.append(block.elements[chosen])
                weighted.append(g[chosen] * weights[:, None].to(g.dtype))
                if learned is not None:
                    positions.append(torch.arange(len(learned), device=learned.device)[block.positions][chosen])
        if rows:  # they are few: one graph for all of them, and one gradient of each weight
            elements = torch.cat(rows).detach().requires_grad_(learned is not None)
            with torch.enable_grad(), self.run.autocast():
                features = self.run.leaves.module.features(elements)
            extra = sums.add([features], [torch.cat(weighted)], () if learned is None else (elements,))
            if to_elements is not None and extra[0] is not None:
                to_elements[torch.cat(positions)] += extra[0]
        return self.run.gradients(sums, to_elements)

    def _through_pool(self, index: int, block: Packed, cotangents: dict[Name, Tensor], sums: GradientSums) -> list[Tensor]:
        """[g] of a block's elements, or [] where nothing before the pool learns. The gradients of leaves go into `sums`."""
        features, chunk = self.cache.graph(index, block)
        parts = self.forward.contributions(index, chunk)
        extra = (features,) if self.run.learns_phi else ()
        gradients = sums.add(parts.values(), [cotangents[name] for name in parts], extra, again=self.cache.keeps_graphs)
        return [g for g in gradients if g is not None]

    def _draw(self, norms: dict[int, Tensor], lengths: list[list[int]]) -> dict[int, tuple[Tensor, Tensor]]:
        """For each block with drawn elements: their positions in it, and 1/π of each."""
        sets, options = len(self.run.empty), self.run.options
        # On the CPU, in float64, which not every device has: a few numbers for each element.
        owner = torch.arange(sets).repeat(len(lengths)).repeat_interleave(torch.tensor(lengths).flatten())
        size = torch.cat(list(norms.values())).cpu().double()
        mean = sum_by(owner, size, sets) / torch.bincount(owner, minlength=sets).clamp(min=1)
        weights = torch.where(size > 0, size + options.floor * mean[owner], 0.0)
        probabilities = inclusion_probabilities(weights, owner, sets, options.grad_chunks * options.chunk_size)
        with drawing:
            chosen = systematic_draw(probabilities, owner, sets, options.generator).sort().values
        drawn: dict[int, tuple[Tensor, Tensor]] = {}
        start = 0
        for index, block_norms in norms.items():
            low, high = torch.searchsorted(chosen, torch.tensor([start, start + len(block_norms)])).tolist()
            if high > low:
                of_block, device = chosen[low:high], block_norms.device
                drawn[index] = (of_block - start).to(device), probabilities[of_block].reciprocal().float().to(device)
            start += len(block_norms)
        return drawn


def sum_by(owner: Tensor, values: Tensor, sets: int) -> Tensor:
    """The sum of each set's values: (sets,)."""
    return torch.zeros(sets, dtype=values.dtype, device=values.device).index_add_(0, owner, values)


def inclusion_probabilities(weights: Tensor, owner: Tensor, sets: int, wanted: int) -> Tensor:
    """π = min(1, c w) with Σ π = wanted over each set, zero where w is; one where a set has no more than `wanted` positive w.

    owner: the set that each element belongs to.

    >>> import torch
    >>> inclusion_probabilities(torch.tensor([8.0, 1.0, 1.0, 0.0, 5.0]), torch.tensor([0, 0, 0, 0, 1]), sets=2, wanted=2)
    tensor([1.0000, 0.5000, 0.5000, 0.0000, 1.0000])
    """
    positive = weights > 0
    few = torch.bincount(owner[positive], minlength=sets) <= wanted
    certain = positive & few[owner] if bool(few.any()) else torch.zeros_like(positive)
    left, unsure = torch.full((sets,), wanted).to(weights), weights
    while True:  # each round fixes at least one more element at probability one
        if bool(certain.any()):
            left = wanted - torch.bincount(owner[certain], minlength=sets)
            unsure = weights.masked_fill(certain, 0.0)
        total = sum_by(owner, unsure, sets)
        probabilities = unsure * (left / total.masked_fill(total == 0, 1.0))[owner]
        over = probabilities >= 1.0
        if not bool(over.any()):
            return probabilities.masked_fill_(certain, 1.0)
        certain |= over


def systematic_draw(probabilities: Tensor, owner: Tensor, sets: int, generator: torch.Generator | None) -> Tensor:
    """Positions drawn with exactly the given inclusion probabilities, each at most once; a draw of its own for each set."""
    order = torch.randperm(len(probabilities), generator=generator).to(owner.device)
    order = order.index_select(0, owner.index_select(0, order).argsort(stable=True))  # set by set, in random order within each
    offset = torch.rand(sets, generator=generator, dtype=torch.float64).to(owner.device)
    steps = probabilities.index_select(0, order).double().cumsum(0)
    counts = torch.bincount(owner, minlength=sets)
    starts = counts.cumsum(0) - counts
    before = torch.cat([steps.new_zeros(1), steps])[starts]  # what the sets before have taken
    floors = steps.add_((offset - before).repeat_interleave(counts)).floor_()
    previous = floors.roll(1)
    previous[starts[counts > 0]] = 0.0
    return order[floors > previous]
