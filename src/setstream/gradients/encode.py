"""encode(): one line of an ordinary training loop, for sets of any size.

z = encode(encoder, sets, gradient=...)          z is the full set's encoding in every mode but `subset`

full         ordinary autograd                                           memory O(N)
exact        the same gradient; each chunk recomputed on the way back    memory O(chunk)
unbiased     only m' drawn chunks on the way back, their state's         memory O(m' chunks)
             cotangent times C/m'  (Willette et al. 2023, corrected)
importance   exact through the pool, phi only for elements drawn by      memory O(m' chunks) + features
             the size of their gradient: unbiased, far less noise
subset       encode the drawn chunks and nothing else: biased, cheap     memory O(m' chunks)
none         inference                                                   memory O(chunk)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from setstream.errors import ConfigurationError, ShapeError
from setstream.gradients.exact import Pass, differentiable, draws_numbers
from setstream.gradients.importance import FLOOR, ImportancePass
from setstream.gradients.unbiased import DrawnPass, InMemory, Served
from setstream.models.encoder import SetEncoder
from setstream.pools.base import Context, Pool
from setstream.sets.layout import Packed, Sets, pack
from setstream.sets.partition import Chunks, Given, columns, cut, draw, even_cut, in_order
from setstream.sets.served import SourceChunks
from setstream.sets.source import SetSource, are_sources
from setstream.states import reduce
from setstream.states.accumulators import Accumulator
from setstream.states.state import State

GRADIENTS = ("full", "exact", "unbiased", "importance", "subset", "none")
PARTITIONS = ("random", "contiguous")

# Chunks that carry no graph may be larger than chunk_size: as many elements as keep about this many numbers in memory.
FORWARD_NUMBERS = 2**22


def encode(
    encoder: SetEncoder,
    sets: Sets | SetSource | Sequence[SetSource] | Chunks,
    mask: Tensor | None = None,
    chunk_size: int = 256,
    gradient: str = "unbiased",
    grad_chunks: int = 1,
    replacement: bool = False,
    generator: torch.Generator | None = None,
    group: reduce.Group | None = None,
    *,
    partition: str | Given | None = None,
    features: str | Path | None = None,
    floor: float | None = None,
    chunks: str | None = None,
) -> Any:
    """Encode sets of any size in constant memory, with a gradient of your choice.

    sets:         (B, N, ...) with an optional mask, a list of tensors, a pair (x, ptr); an `ss.data.SetSource` or a
                  list of them, which are read in chunks; or `ss.Chunks` that serves all sets together.
    chunk_size:   elements of a set that have a graph at a time.
    gradient:     full, exact, unbiased, importance, subset or none: see the table in `setstream/gradients/encode.py`. Under
                  torch.no_grad each of them, subset too, gives the value of the whole set.
    grad_chunks:  m', the chunks of each set that carry the gradient; as many as there are means all: the full gradient.
    replacement:  draw chunks as the paper writes it, with replacement (a chunk drawn twice counts twice in the gradient).
                  Without it the noise is smaller. Refused for pools with a maximum or minimum, where it would be biased.
    generator:    makes partition and draw reproducible.
    group:        a torch.distributed group whose ranks each hold a part of every set; all get z and gradients of the whole.
    partition:    of sets in memory: random (while training), contiguous (otherwise), or your own: for each set a list of index
                  lists. Sources are read in blocks in random order (while training), or in order.
    features:     for importance: keep all features in memory ("cache", the default), in files under a folder (its path), or
                  "recompute" them.
    floor:        for importance: no element is drawn less often than one of this share of the mean gradient would be (0.1).
    chunks:       "average" lets a pool that is not consistent encode sets in several chunks, as the mean over them. Without it
                  that is a ConsistencyError.

    An option that the chosen mode does not use is a ConfigurationError.

    >>> import torch, setstream as ss
    >>> encoder = ss.SetEncoder(torch.nn.Linear(3, 16), ss.UMBC(16, num_slots=4))
    >>> head = torch.nn.Linear(16, 2)
    >>> x = torch.randn(8, 1000, 3)
    >>> z = ss.encode(encoder, x, chunk_size=100, gradient="unbiased")
    >>> head(z).square().mean().backward()            # an ordinary training loop: nothing else changes
    >>> torch.allclose(z, encoder(x), atol=1e-5)      # the value is that of the full set
    True
    """
    if gradient not in GRADIENTS:
        raise ConfigurationError(f"unknown gradient {gradient!r}: choose one of {', '.join(GRADIENTS)}")
    if chunk_size < 1:
        raise ConfigurationError(f"chunk_size must be at least 1; got {chunk_size}")
    if grad_chunks < 1:
        raise ConfigurationError(f"grad_chunks must be at least 1; got {grad_chunks}")
    if isinstance(partition, str) and partition not in PARTITIONS:
        raise ConfigurationError(f"unknown partition {partition!r}: choose one of {', '.join(PARTITIONS)}, or give index lists")
    if (
        replacement
        and gradient in ("unbiased", "subset")
        and _has_extremum(encoder.pool.empty_accumulators(1, torch.device("cpu")))
    ):
        raise ConfigurationError(
            "drawing chunks with replacement is biased for a maximum or minimum: the chunk that holds it is included with "
            "probability 1 - (1 - 1/C)^m', not m'/C. Leave replacement=False."
        )
    unused = {
        "replacement": replacement and gradient != "unbiased",
        "features": features is not None and gradient != "importance",
        "floor": floor is not None and gradient != "importance",
    }
    for name in (name for name, given in unused.items() if given):
        raise ConfigurationError(
            f"{name} is an option of another mode than gradient={gradient!r}, which ignores it: leave it out"
        )
    features, floor = features or "cache", FLOOR if floor is None else floor
    one_chunk = encoder.pool.refuse_chunks(chunks)
    if one_chunk and group is not None and dist.get_world_size(group) > 1:
        raise encoder.pool.inconsistent()
    if not torch.is_grad_enabled() and (encoder.pool.consistent or gradient != "full"):
        gradient = "none"
    sources: Any = [sets] if isinstance(sets, SetSource) else sets
    if isinstance(sources, Chunks) or are_sources(sources):
        if mask is not None:
            raise ConfigurationError("a source of chunks brings its own sizes: leave the mask out and serve lists of tensors")
        if partition is not None:
            raise ConfigurationError(
                "a source is cut where it is read, and partition is for sets in memory: leave it out, or choose it with "
                "ss.data.SourceChunks(sources, chunk_size, partition)"
            )
        if are_sources(sources):
            sources = _read(encoder, sources, gradient, chunk_size, grad_chunks, generator)
        if isinstance(sources, Chunks):
            served = _OneChunkEach(sources, encoder.pool) if one_chunk else sources
            return _encode_served(
                encoder,
                served,
                gradient,
                chunk_size,
                grad_chunks,
                replacement,
                generator,
                group,
                features=features,
                floor=floor,
            )
        gradient = "full"  # of the elements that were read
    if partition is None:
        partition = "random" if encoder.training else "contiguous"
    packed = pack(sources, mask)
    if gradient == "full" and group is None:
        return encoder(sources, mask)
    if one_chunk and gradient not in ("full", "subset") and _several_chunks(packed.lengths, chunk_size, partition):
        raise encoder.pool.inconsistent()

    if gradient == "subset":
        cuts = cut(packed.lengths, chunk_size, partition, generator)
        drawn = draw(cuts, packed.lengths, grad_chunks, False, generator)
        packed = drawn.pieces[0].of(packed.elements)
        if group is None:
            return encoder.finalize(encoder.update(None, _as_sets(packed)))

    empty, context = _begin(encoder, len(packed), packed.elements.device, group)
    size = chunk_size * len(packed)
    forward_size = max(size, FORWARD_NUMBERS // _numbers_each(packed.elements, encoder))
    chunks_matter = not encoder.pool.consistent or (gradient in ("exact", "none") and not isinstance(partition, str))
    job: Pass
    if gradient == "unbiased":
        cuts = cut(packed.lengths, chunk_size, partition, generator)
        drawn = draw(cuts, packed.lengths, grad_chunks, replacement, generator, apart=chunks_matter)
        if chunks_matter or _has_extremum(empty.accumulators) or draws_numbers(encoder, packed.elements):
            rest = drawn.rest()
            if not chunks_matter:
                rest = [even_cut(own.order, max(1, forward_size // len(packed))) for own in rest]
            pieces = [*drawn.pieces, *columns(rest, packed.lengths)]
        else:
            pieces = in_order(packed.lengths, forward_size)
        job = DrawnPass(encoder, InMemory(packed, pieces), empty, context, group)
        job.carriers, job.known = list(InMemory(packed, drawn.pieces)), drawn.factors
    else:
        if chunks_matter:
            own_partition = partition if gradient != "subset" else "contiguous"
            pieces = columns(cut(packed.lengths, chunk_size, own_partition, generator), packed.lengths)
        else:
            if gradient == "none" or (gradient == "importance" and features == "cache"):
                size = forward_size
            elif gradient == "importance":  # a piece has a graph through the pool, which takes some times the memory
                size = max(size, forward_size // 4)
            pieces = in_order(packed.lengths, size)
        blocks = InMemory(packed, pieces)
        if gradient == "none":
            with torch.no_grad():
                return encoder.finalize_unchecked(Pass(encoder, blocks, empty, context, group).run())
        if gradient == "importance":
            job = ImportancePass(
                *(encoder, blocks, empty, context, group),
                sample=packed.elements[:1],
                wanted=grad_chunks * chunk_size,
                floor=floor,
                features=features,
                generator=generator,
            )
        else:  # exact; or full and subset across ranks, whose graph must not cross them
            job = Pass(encoder, blocks, empty, context, group)
    if packed.elements.requires_grad:
        job.elements = packed.elements
    return encoder.finalize_unchecked(differentiable(job))


def _read(
    encoder: SetEncoder,
    sources: Sequence[SetSource],
    gradient: str,
    chunk_size: int,
    grad_chunks: int,
    generator: torch.Generator | None,
) -> list[Tensor] | Chunks:
    """What a mode reads of sources: all at once, a random subset, or chunk by chunk."""
    home = encoder.device
    if gradient == "full":
        return [source.tensor().to(home) for source in sources]
    if gradient == "subset":  # what is not drawn is not read
        size = chunk_size * grad_chunks
        drawn = [torch.randperm(len(source), generator=generator)[:size].sort().values for source in sources]
        return [source.take(own).to(home) for source, own in zip(sources, drawn, strict=True)]
    return SourceChunks(sources, chunk_size, "blocks" if encoder.training else "contiguous", generator)


class _OneChunkEach(Chunks):
    """Chunks of which no set may come in more than one: the pool's answer would depend on where it is cut."""

    def __init__(self, chunks: Chunks, pool: Pool) -> None:
        super().__init__(chunks.source)
        self.pool = pool

    def __iter__(self) -> Iterator[Packed]:
        seen: set[int] = set()
        for packed in super().__iter__():
            present = {number for number, length in enumerate(packed.lengths) if length}
            if seen & present:
                raise self.pool.inconsistent()
            seen |= present
            yield packed


def _several_chunks(lengths: list[int], chunk_size: int, partition: str | Given) -> bool:
    """Whether any set is cut."""
    if isinstance(partition, str):
        return any(length > chunk_size for length in lengths)
    return any(sum(len(chunk) > 0 for chunk in own) > 1 for own in partition)


def _encode_served(
    encoder: SetEncoder,
    source: Chunks,
    gradient: str,
    chunk_size: int,
    grad_chunks: int,
    replacement: bool,
    generator: torch.Generator | None,
    group: reduce.Group | None,
    *,
    features: str | Path,
    floor: float,
) -> Any:
    """The same for a source, whose chunks are the partition."""
    if gradient == "subset":
        raise ConfigurationError("'subset' of a source is the source of a subset: serve fewer chunks and use gradient='exact'")
    blocks = Served(source, encoder.device)
    first = next(iter(source), None)
    if first is None:
        raise ShapeError("the source of chunks is empty: at least one chunk is needed, to know how many sets there are")
    empty, context = _begin(encoder, len(first), first.elements.device, group)
    if gradient == "full" and group is None:
        state = empty
        for block in blocks:
            state = state + encoder.absorb(state, context, block.packed, encoder.features(block.packed.elements))
        return encoder.finalize_unchecked(state)
    if gradient == "none":
        with torch.no_grad():
            return encoder.finalize_unchecked(Pass(encoder, blocks, empty, context, group).run())
    job: Pass
    if gradient == "importance":
        job = ImportancePass(
            *(encoder, blocks, empty, context, group),
            sample=first.elements[:1],
            wanted=grad_chunks * chunk_size,
            floor=floor,
            features=features,
            generator=generator,
        )
    elif gradient == "unbiased":
        job = DrawnPass(encoder, blocks, empty, context, group)
        job.wanted, job.replacement, job.generator = grad_chunks, replacement, generator
    else:
        job = Pass(encoder, blocks, empty, context, group)
    return encoder.finalize_unchecked(differentiable(job))


def _begin(encoder: SetEncoder, batch: int, device: torch.device, group: reduce.Group | None) -> tuple[State, Context]:
    """The empty state, with one draw for all ranks, and what the pool prepares once for all chunks.

    No state of `encode` leaves it, so none needs to know its origin.
    """
    empty = encoder.pool.empty(batch, encoder.device or device)
    if group is not None:
        empty = reduce.share_draw(empty, group)
    return empty, encoder.pool.prepare(empty)


def _has_extremum(parts: dict[str, Accumulator]) -> bool:
    return any(part.owned_by_one_element for part in parts.values())


def _numbers_each(elements: Tensor, encoder: SetEncoder) -> int:
    """Roughly how many numbers an element occupies on its way through phi: itself, and four times phi's widest layer."""
    widths = [module.out_features for module in encoder.phi.modules() if isinstance(module, nn.Linear)]
    widths += [module.embedding_dim for module in encoder.phi.modules() if isinstance(module, nn.Embedding)]
    return max(1, elements[:1].numel() + 4 * max(encoder.pool.in_dim or 0, *widths, 0))


def _as_sets(packed: Packed) -> tuple[Tensor, Tensor]:
    return packed.elements, torch.tensor([0, *packed.lengths]).cumsum(0)
