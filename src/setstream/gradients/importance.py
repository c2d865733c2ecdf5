"""The gradient through the pool exact, through phi sampled by importance.

    g_j = ∂L/∂φ_j                       exact for every element, once all features are known: the pool is cheap
    π_j = min(1, c w_j),  Σ_j π_j = m   w_j = |g_j| + floor · mean|g|;  0 where g_j = 0
    ∂L/∂θ ≈ Σ_{j drawn} g_j / π_j · ∂φ_j/∂θ,     each j drawn with probability π_j: unbiased for any positive π

Slots and projections get their exact gradient; only phi, the expensive part, is sampled, most where it matters. The draw
is systematic: a uniform offset, then one element for each unit of the cumulated π in random order. So m elements are drawn,
none twice, and those with π_j = 1 always. Where few elements have a gradient at all (a max pool), it is exact.

Among estimators that know |g_j| only, w_j = |g_j| has the least variance if all ∂φ_j/∂θ are of one size; the floor bounds the
damage where they are not: no weight g_j/π_j exceeds |g_j| by more than a factor N (1 + floor) / (m floor).

The features of all elements are kept between the two directions: in memory ("cache", with what the pool itself needs to go
back: for a folded UMBC one weight an element and slot), in files under a folder (a path), or not at all ("recompute": two more
forward passes of phi without a graph).
"""

import tempfile
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from setstream.errors import ConfigurationError
from setstream.gradients.exact import Block, Pass, derivatives, draws_numbers
from setstream.models.encoder import SetEncoder
from setstream.pools.base import Context
from setstream.states.reduce import Group
from setstream.states.state import State

FLOOR = 0.1


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


class ImportancePass(Pass):
    """A pass whose way back is exact for the pool and sampled by importance for phi."""

    #: The norm of a cotangent: Euclidean. Measured in docs/results/gradients.md, with the floor.
    order: float = 2.0
    RANDOM = (
        "phi draws random numbers (a dropout in training mode), and 'importance' recomputes single elements, whose masks "
        "cannot be drawn again. Put dropout into the head, set phi.eval(), or use gradient='exact' or 'unbiased'."
    )

    def __init__(
        self,
        encoder: SetEncoder,
        blocks: Iterable[Block],
        empty: State,
        context: Context,
        group: Group | None,
        *,
        sample: Tensor,
        wanted: int,
        floor: float,
        features: str | Path,
        generator: torch.Generator | None,
    ) -> None:
        """sample: elements, to try whether phi draws random numbers."""
        super().__init__(encoder, blocks, empty, context, group)
        if draws_numbers(encoder, sample.to(empty.device)):
            raise ConfigurationError(self.RANDOM)
        if not floor > 0:
            raise ConfigurationError(f"floor must be positive, so that every element that matters can be drawn; got {floor}")
        self.seed = None
        self.wanted, self.floor, self.generator = wanted, floor, generator
        self.keep = features
        self.cache: dict[int, Path] = {}
        self.graphs: dict[int, tuple[Tensor, State]] = {}  # features and what the pool made of them
        self.folder: tempfile.TemporaryDirectory[str] | None = None
        if features not in ("cache", "recompute"):
            if not Path(features).is_dir():
                raise ConfigurationError(f"features is 'cache', 'recompute' or a folder that exists; got {str(features)!r}")
            self.folder = tempfile.TemporaryDirectory(prefix="setstream-features-", dir=features)

    def absorb(self, block: Block, features: Tensor) -> State:
        """The block's part of the state; features that are kept in memory keep the pool's graph with them."""
        if self.folder is not None:
            path = Path(self.folder.name) / f"{block.index}.npy"
            kept = features.detach().cpu()
            np.save(path, (kept if kept.dtype == torch.float64 else kept.float()).numpy())
            self.cache[block.index] = path
        if self.keep != "cache":
            return super().absorb(block, features)
        with self.leaves() as (_, context), torch.enable_grad():
            features = features.detach().requires_grad_(self.through_phi)
            chunk = self.encoder.absorb(self.empty, context, block.packed, features)
        self.graphs[block.index] = features, chunk
        return chunk.detach()

    def _features(self, block: Block) -> Tensor:
        if block.index in self.cache:
            return torch.from_numpy(np.load(self.cache[block.index])).to(self.empty.device)
        with torch.no_grad(), self._autocast():
            return self.encoder.features(block.packed.elements)

    @property
    def through_phi(self) -> bool:
        """Whether anything before the pool learns."""
        return self.phi_learns or self.elements is not None

    def pull_back(self, cotangents: dict[str, dict[str, Tensor]]) -> list[Tensor | None]:
        """Exact through the pool for all elements; through phi for the drawn ones."""
        to_elements = None if self.elements is None else torch.zeros_like(self.elements)
        found: dict[int, Tensor] = {}
        norms: dict[int, Tensor] = {}
        lengths: dict[int, list[int]] = {}
        with self.leaves() as (gradients, context):
            for block in self.blocks:
                if self.keep == "cache":
                    features, chunk = self.graphs[block.index]
                    outputs, cots = self.shares(block, chunk, cotangents)
                else:
                    features = self._features(block).detach().requires_grad_(self.through_phi)
                    outputs, cots = self.outputs(block, context, features, cotangents)
                g = gradients.add(outputs, cots, [features] if self.through_phi else [], again=self.keep == "cache")
                if g and g[0] is not None:
                    lengths[block.index] = block.packed.lengths
                    norms[block.index] = torch.linalg.vector_norm(g[0], self.order, dim=1)
                    if self.keep == "cache":
                        found[block.index] = g[0]
            drawn = self._draw(norms, lengths)
            rows, wanted, places = [], [], []
            for block in self.blocks if drawn else ():
                if block.index in drawn:
                    positions, scale = drawn[block.index]
                    g_block = found[block.index] if self.keep == "cache" else self._cotangent(block, context, cotangents)
                    rows.append(block.packed.elements[positions])
                    wanted.append(g_block[positions] * scale[:, None].to(g_block.dtype))
                    if to_elements is not None:
                        place = block.positions
                        assert place is not None  # elements that learn lie in memory
                        places.append(positions + place.start if isinstance(place, slice) else place[positions])
            if rows:  # they are few: one graph for all of them, and one gradient of each weight
                elements = torch.cat(rows).detach().requires_grad_(to_elements is not None)
                with torch.enable_grad(), self._autocast():
                    features = self.encoder.features(elements)
                back = gradients.add([features], [torch.cat(wanted)], [] if to_elements is None else [elements])
                if to_elements is not None and back[0] is not None:
                    to_elements[torch.cat(places)] += back[0]
        return self.finish(gradients, to_elements)

    def _cotangent(self, block: Block, context: Context, cotangents: dict[str, dict[str, Tensor]]) -> Tensor:
        """g of every element of a block, again."""
        features = self._features(block).detach().requires_grad_()
        outputs, cots = self.outputs(block, context, features, cotangents)
        (g,) = derivatives(outputs, cots, [features])
        assert g is not None  # elements of this block were drawn for the size of theirs
        return g

    def _draw(self, norms: dict[int, Tensor], lengths: dict[int, list[int]]) -> dict[int, tuple[Tensor, Tensor]]:
        """For each block with drawn elements: their positions in it, and 1/π of each."""
        if not norms:
            return {}
        device = next(iter(norms.values())).device
        sets = len(self.empty)
        # On the CPU, in float64, which not every device has: a few numbers for each element.
        owner = torch.cat([_set_of_each(lengths[index]) for index in norms])
        size = torch.cat(list(norms.values())).cpu().double()
        mean = sum_by(owner, size, sets) / torch.bincount(owner, minlength=sets).clamp(min=1)
        weights = torch.where(size > 0, size + self.floor * mean[owner], 0.0)
        probabilities = inclusion_probabilities(weights, owner, sets, self.wanted)
        chosen = systematic_draw(probabilities, owner, sets, self.generator).sort().values
        drawn: dict[int, tuple[Tensor, Tensor]] = {}
        start = 0
        for index, own in norms.items():
            low, high = torch.searchsorted(chosen, torch.tensor([start, start + len(own)])).tolist()
            if high > low:
                mine = chosen[low:high]
                drawn[index] = (mine - start).to(device), probabilities[mine].reciprocal().float().to(device)
            start += len(own)
        return drawn


def _set_of_each(lengths: list[int]) -> Tensor:
    """Which set each element of a packed block belongs to."""
    return torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
