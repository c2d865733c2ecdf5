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

from __future__ import annotations

import tempfile
from collections.abc import Iterable
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from setstream.errors import ConfigurationError
from setstream.gradients.base import Forward, Name, Pass, PoolGradient, drawing, through_pools
from setstream.gradients.protocol import Batch, Options
from setstream.models.encoder import SetEncoder
from setstream.pools.base import Want
from setstream.pools.kernels.cheap_layers import CheapLayers
from setstream.sets.layout import Packed

FLOOR = 0.1
Cut = tuple[int, list[int]]  # of a block: its first set, and how many elements of each it has


class RecomputedFeatures:
    """Nothing is kept: another forward pass of phi without a graph. The base of the other caches."""

    def __init__(self, run: Pass) -> None:
        self.run = run

    def keep(self, index: int, features: Tensor) -> None:
        """Keep the features of a block in the forward pass."""

    def features(self, index: int, block: Packed) -> Tensor:
        """The features of a block in the backward pass, without a graph; until the next call, which may overwrite them."""
        if self.layers is None or torch.is_autocast_enabled(block.elements.device.type):
            return self.run.features(index, block.elements, again=True)
        return self.run.reader.read(block.elements, self.layers, self.run.encoder.cast_input)

    @cached_property
    def layers(self) -> CheapLayers | None:
        """phi as cheap layers, if it is a chain of them."""
        run, layers = self.run, self.run.reader.layers
        kept = run.autocast_dtype is not None or not run.encoder.pool.sums_only  # others may keep a view of a feature
        return None if layers is None or kept else CheapLayers(layers)


class FeaturesInFiles(RecomputedFeatures):
    """Features in files of a temporary folder below a given one."""

    def __init__(self, run: Pass, folder: str | Path) -> None:
        super().__init__(run)
        if not Path(folder).is_dir():
            raise ConfigurationError(f"features must be 'cache', 'recompute' or an existing folder; got {str(folder)!r}")
        self.folder = tempfile.TemporaryDirectory(prefix="setstream-features-", dir=folder)

    def keep(self, index: int, features: Tensor) -> None:
        kept = features.detach().cpu()
        np.save(self._path(index), (kept if kept.dtype == torch.float64 else kept.float()).numpy())

    def features(self, index: int, block: Packed) -> Tensor:
        return torch.from_numpy(np.load(self._path(index))).to(self.run.empty.device)

    def _path(self, index: int) -> Path:
        return Path(self.folder.name) / f"{index}.npy"


class FeaturesInMemory(RecomputedFeatures):
    """Features in memory."""

    def __init__(self, run: Pass) -> None:
        super().__init__(run)
        self.kept: dict[int, Tensor] = {}

    def keep(self, index: int, features: Tensor) -> None:
        self.kept[index] = features.detach()

    def features(self, index: int, block: Packed) -> Tensor:
        return self.kept[index]


def open_cache(features: str | Path, run: Pass) -> RecomputedFeatures:
    """The cache that the option `features` names; cheap layers are computed again sooner than read from memory."""
    if features == "recompute" or (features == "cache" and CheapLayers.of(run.encoder.phi) is not None):
        return RecomputedFeatures(run)
    return FeaturesInMemory(run) if features == "cache" else FeaturesInFiles(run, features)


def importance(encoder: SetEncoder, sets: Batch, options: Options) -> Any:
    """z, with the exact gradient through the pool and a sampled one through phi."""
    run = Pass(encoder, sets, options)
    if run.draws_numbers(sets.sample):
        raise ConfigurationError(
            "phi draws random numbers (a dropout in training mode), and 'importance' recomputes single elements, whose masks "
            "cannot be drawn again. Put dropout into the head, set phi.eval(), or use gradient='exact' or 'unbiased'."
        )
    first: ImportanceSampling | None = run.first_pass()
    if first is not None:
        cache, blocks = first.cache, first.blocks
    else:
        cache = open_cache(options.features, run)
        blocks = sets.blocks(max(options.chunk_size * len(sets), run.reader.block_size(sets.sample)))
    apart = run.owned or type(cache) is not RecomputedFeatures
    with torch.no_grad():
        if not apart:
            forward = run.forward(sets.blocks(run.forward_size(sets)))
        else:
            forward = run.forward(blocks, cache.keep) if first is None else run.forward(blocks, known=cache.features)
    sampling = ImportanceSampling(run, forward, blocks, cache, first)
    run.show_next_pass(first or sampling)
    return run.encode(forward, sampling)


class ImportanceSampling:
    """The backward pass: exact through the pool for all elements, through phi for the drawn ones.

    With several passes over a set, the backward pass of the first comes last: it samples phi for the sum of what all want.
    """

    def __init__(
        self,
        run: Pass,
        forward: Forward,
        blocks: Iterable[Packed],
        cache: RecomputedFeatures,
        first: ImportanceSampling | None = None,
    ) -> None:
        self.run, self.forward, self.blocks, self.cache, self.first = run, forward, blocks, cache, first
        #: The gradients of the later passes, by pass: each backward pass replaces its own.
        self.later: dict[ImportanceSampling, PoolGradient] = {}

    def __call__(self, cotangents: dict[Name, Tensor]) -> list[Tensor | None]:
        """The gradients of all inputs, given those of the state."""
        run, learned = self.run, self.run.learned
        sums = run.leaves.sums()
        own = PoolGradient(run, self.forward, cotangents)
        if self.first is not None:
            for index, block in enumerate(self.blocks):
                own.to_features(index, block, self.cache.features(index, block), sums, None)
            own.add_context(sums)
            self.first.later[self] = own
            return run.gradients(sums, None)
        later, self.later = [*self.later.values()], {}
        exact = [own, *later]
        recomputable = all(one.way_back is not None for one in exact)
        keeping = isinstance(self.cache, FeaturesInMemory) and not recomputable
        want: Want = None
        if run.learns_phi:
            want = "rows" if later or keeping else "norms"
        kept: dict[int, Tensor] = {}
        norms: list[Tensor] = []
        cuts: list[Cut] = []
        for index, block in enumerate(self.blocks):
            features = self.cache.features(index, block)
            g = own.to_features(index, block, features, sums, want)
            if g is None or want is None:
                continue
            if later:
                g = g + through_pools(later, index, block, features)
            if keeping:
                kept[index] = g
            norms.append(g if g.dim() == 1 else torch.linalg.vector_norm(g, dim=1))
            cuts.append((block.first, block.lengths))
        own.add_context(sums)
        drawn = self._draw(norms, cuts) if norms else {}
        rows, weighted, positions, owner = [], [], [], []
        for index, block in enumerate(self.blocks if drawn else ()):
            if index not in drawn:
                continue
            chosen, weights, sets = drawn[index]
            rows.append(block.elements[chosen])
            owner.append(sets)
            weights = weights.unsqueeze(1)
            if not recomputable:
                g = kept[index] if index in kept else through_pools(exact, index, block, self.cache.features(index, block))
                weights = g[chosen] * weights.to(g.dtype)
            weighted.append(weights)
            if learned is not None:
                positions.append(torch.arange(len(learned), device=learned.device)[block.positions][chosen])
        to_elements = None if learned is None else torch.zeros_like(learned)
        if rows:  # they are few: one graph for all of them, and one gradient of each weight
            order = torch.cat(owner).argsort(stable=True)  # set by set
            elements = torch.cat(rows)[order.to(rows[0].device)].detach().requires_grad_(learned is not None)
            with torch.enable_grad(), run.autocast():
                features = run.leaves.module.features(elements, known=True, reader=run.reader)
            bars = torch.cat(weighted)[order.to(features.device)]
            if recomputable:
                lengths = torch.bincount(torch.cat(owner), minlength=len(run.empty)).tolist()
                g = through_pools(exact, 0, Packed(elements, lengths), features.detach())
                bars = g * bars.to(features.dtype)
            extra = sums.add([features], [bars], () if learned is None else (elements,))
            if to_elements is not None and extra[0] is not None:
                to_elements[torch.cat(positions)[order.to(to_elements.device)]] += extra[0]
        return run.gradients(sums, to_elements)

    def _draw(self, norms: list[Tensor], cuts: list[Cut]) -> dict[int, tuple[Tensor, Tensor, Tensor]]:
        """For each block with drawn elements: their positions in it, 1/π of each, and its set."""
        options = self.run.options
        counts = np.zeros(len(self.run.empty), np.int64)
        for first, lengths in cuts:
            counts[first : first + len(lengths)] += lengths
        if not counts.any():
            return {}
        # In float64, which not every device has, and by NumPy, which starts its operations faster.
        size, by_set = torch.cat(norms).cpu().double().numpy(), None
        if any(first + len(lengths) - 1 > after for (first, lengths), (after, _) in pairwise(cuts)):
            owner = np.concatenate([np.arange(first, first + len(lengths)).repeat(lengths) for first, lengths in cuts])
            by_set = owner.astype(np.min_scalar_type(len(counts))).argsort(kind="stable")  # 16 bits are sorted fastest
            size = size[by_set]
        sets = counts.nonzero()[0]
        counts = counts[sets]
        ends = counts.cumsum()
        mean = np.add.reduceat(size, ends - counts) / counts
        weights = np.where(size > 0, size + (options.floor * mean).repeat(counts), 0.0)
        probabilities = inclusion_probabilities(weights, counts, options.grad_chunks * options.chunk_size)
        with drawing:
            chosen = systematic_draw(probabilities, counts, options.generator)
        places = chosen if by_set is None else by_set[chosen]
        order = places.argsort()
        chosen, places = chosen[order], places[order]
        inverse, owner = 1.0 / probabilities[chosen], sets[ends.searchsorted(chosen, "right")]
        drawn = {}
        start = 0
        for index, of_block in enumerate(norms):
            low, high = places.searchsorted([start, start + len(of_block)])
            if high > low:
                here, device = slice(low, high), of_block.device
                positions = torch.from_numpy(places[here] - start).to(device)
                drawn[index] = positions, torch.from_numpy(inverse[here]).float().to(device), torch.from_numpy(owner[here])
            start += len(of_block)
        return drawn


def inclusion_probabilities(weights: np.ndarray, counts: np.ndarray, wanted: int) -> np.ndarray:
    """π = min(1, c w) with Σ π = wanted over each set, zero where w is; one where a set has no more than `wanted` positive w.

    counts: how many elements each set has, at least one; the elements of a set are next to each other.

    >>> import numpy as np
    >>> inclusion_probabilities(np.array([8.0, 1.0, 1.0, 0.0, 5.0]), np.array([4, 1]), wanted=2)
    array([1. , 0.5, 0.5, 0. , 1. ])
    """
    starts = counts.cumsum() - counts
    positive = weights > 0
    certain = positive & (np.add.reduceat(positive, starts, dtype=np.int64) <= wanted).repeat(counts)
    while True:  # each round fixes at least one more element at probability one
        left = wanted - np.add.reduceat(certain, starts, dtype=np.int64)
        unsure = np.where(certain, 0.0, weights)
        total = np.add.reduceat(unsure, starts)
        probabilities = unsure * (left / np.where(total == 0, 1.0, total)).repeat(counts)
        over = probabilities >= 1.0
        if not over.any():
            return np.where(certain, 1.0, probabilities)
        certain |= over


def systematic_draw(probabilities: np.ndarray, counts: np.ndarray, generator: torch.Generator | None) -> np.ndarray:
    """Positions drawn with exactly the given inclusion probabilities, each at most once; a draw of its own for each set.

    Sets of one size are read in the same random order: it has no part in what is drawn from one set given another.
    """
    orders = {count: torch.randperm(count, generator=generator).numpy() for count in dict.fromkeys(counts.tolist())}
    offset = torch.rand(len(counts), generator=generator, dtype=torch.float64).numpy()
    ends = counts.cumsum()
    order = np.concatenate([orders[count] for count in counts.tolist()]) + (ends - counts).repeat(counts)
    steps = probabilities[order].cumsum()
    last = steps[ends - 1]
    before = np.concatenate([[0.0], last[:-1]])  # what the sets before have taken
    drawn = np.floor(last - before + offset).astype(np.int64)
    number = np.arange(1, drawn.sum() + 1) - (drawn.cumsum() - drawn).repeat(drawn)  # 1, 2, ... in each set
    marks = np.minimum((before - offset).repeat(drawn) + number, last.repeat(drawn))
    return order[np.unique(steps.searchsorted(marks))]
