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
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from setstream.errors import ConfigurationError
from setstream.gradients.base import Forward, Name, Pass, PoolGradient, drawing, draws_numbers, through_pools
from setstream.gradients.protocol import Batch, Options
from setstream.models.encoder import SetEncoder
from setstream.pools.base import Want
from setstream.pools.kernels.cheap_layers import CheapLayers
from setstream.sets.layout import Packed

FLOOR = 0.1


class RecomputedFeatures:
    """Nothing is kept: another forward pass of phi without a graph. The base of the other caches."""

    def __init__(self, run: Pass) -> None:
        self.run = run

    def keep(self, index: int, features: Tensor) -> None:
        """Keep the features of a block in the forward pass."""

    def features(self, index: int, block: Packed) -> Tensor:
        """The features of a block in the backward pass, without a graph."""
        return self.run.features(index, block.elements, again=True)


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
    if draws_numbers(encoder, sets.sample):
        raise ConfigurationError(
            "phi draws random numbers (a dropout in training mode), and 'importance' recomputes single elements, whose masks "
            "cannot be drawn again. Put dropout into the head, set phi.eval(), or use gradient='exact' or 'unbiased'."
        )
    run = Pass(encoder, sets, options)
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
        own.add_context(sums)
        drawn = self._draw(norms) if norms else {}
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

    def _draw(self, norms: list[Tensor]) -> dict[int, tuple[Tensor, Tensor, Tensor]]:
        """For each block with drawn elements: their positions in it, 1/π of each, and its set."""
        sets, options = len(self.run.empty), self.run.options
        owners = [
            torch.arange(block.first, block.first + len(block)).repeat_interleave(torch.tensor(block.lengths))
            for block in self.blocks
        ]
        owner = torch.cat(owners)
        # On the CPU, in float64, which not every device has: a few numbers for each element.
        size = torch.cat(norms).cpu().double()
        mean = sum_by(owner, size, sets) / torch.bincount(owner, minlength=sets).clamp(min=1)
        weights = torch.where(size > 0, size + options.floor * mean[owner], 0.0)
        probabilities = inclusion_probabilities(weights, owner, sets, options.grad_chunks * options.chunk_size)
        with drawing:
            chosen = systematic_draw(probabilities, owner, sets, options.generator).sort().values
        drawn = {}
        start = 0
        for index, of_block in enumerate(norms):
            low, high = torch.searchsorted(chosen, torch.tensor([start, start + len(of_block)])).tolist()
            if high > low:
                here, device = chosen[low:high], of_block.device
                inverse = probabilities[here].reciprocal().float().to(device)
                drawn[index] = (here - start).to(device), inverse, owner[here]
            start += len(of_block)
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
