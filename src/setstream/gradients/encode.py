"""encode(): one line of an ordinary training loop, for sets of any size.

z is the encoding of the full set in every mode but `subset`; the modes differ in the gradient::

    full         ordinary autograd                                           memory O(N)
    exact        the same gradient; chunks recomputed in the backward pass   memory O(chunk)
    unbiased     only m' drawn chunks carry it, their state's cotangent      memory O(m' chunks)
                 times C/m'  (Willette et al. 2023, corrected)
    importance   exact through the pool, phi only for elements drawn by      memory O(m' chunks) + features
                 the size of their gradient: unbiased, far less noise
    subset       encode the drawn chunks and nothing else: biased, cheap     memory O(m' chunks)
    none         inference                                                   memory O(chunk)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from setstream.errors import ConfigurationError
from setstream.gradients.exact import exact
from setstream.gradients.full import full
from setstream.gradients.importance import FLOOR, importance
from setstream.gradients.none import none
from setstream.gradients.protocol import Batch, Options
from setstream.gradients.subset import subset
from setstream.gradients.unbiased import unbiased
from setstream.models.encoder import SetEncoder
from setstream.sets.chunks import Chunks, Served, Sources
from setstream.sets.layout import Sets, pack
from setstream.sets.partition import Given, InMemory
from setstream.sets.source import SetSource
from setstream.states.reduce import Group
from setstream.states.state import State

MODES = {"full": full, "exact": exact, "unbiased": unbiased, "importance": importance, "subset": subset, "none": none}
GRADIENTS = tuple(MODES)
PARTITIONS = ("random", "contiguous")


def encode(
    encoder: SetEncoder,
    sets: Sets | SetSource | Sequence[SetSource] | Chunks,
    mask: Tensor | None = None,
    chunk_size: int = 256,
    gradient: str = "unbiased",
    grad_chunks: int = 1,
    replacement: bool = False,
    generator: torch.Generator | None = None,
    group: Group | None = None,
    *,
    partition: str | Given | None = None,
    features: str | Path | None = None,
    floor: float | None = None,
    chunks: str | None = None,
) -> Any:
    """Encode sets of any size in constant memory, with a gradient of your choice.

    Args:
        encoder: The encoder.
        sets: (B, N, ...) with an optional mask, a list of tensors, or a pair (x, ptr); an `ss.data.SetSource` or a list of
            them, which are read in chunks; or `ss.Chunks`, which serves all sets together.
        mask: True for real elements, for sets (B, N, ...).
        chunk_size: How many elements of a set have a graph at a time.
        gradient: full, exact, unbiased, importance, subset or none. Under torch.no_grad every mode, even subset, gives the
            value of the whole set.
        grad_chunks: m', the number of chunks of each set that carry the gradient. With as many as a set has, or more, it is
            the full gradient.
        replacement: For unbiased: draw chunks with replacement, as the paper does (a chunk drawn twice counts twice in the
            gradient). Without it the noise is smaller. An error for pools with a maximum or minimum, where it is biased.
        generator: Makes partition and draw reproducible.
        group: A torch.distributed group whose ranks each hold a part of every set. All ranks get z and gradients of the whole.
        partition: For sets in memory: random (the default in training mode), contiguous (otherwise), or a list of index lists
            for each set. Sources are read in contiguous blocks, in training mode in random order.
        features: For importance: keep all features in memory ("cache", the default), in files below a folder (its path), or
            "recompute" them.
        floor: For importance: every element with a gradient is drawn at least as often as one whose gradient is this share
            of the mean (0.1).
        chunks: "average" lets a pool that is not consistent encode sets in several chunks, as the mean over them. Without it
            that is a ConsistencyError.

    Returns:
        z of every set, (B, num_slots, out_dim) for a pool with slots.

    Raises:
        ConfigurationError: An option is invalid, or the chosen mode does not use it.

    Example:
        >>> import torch, setstream as ss
        >>> encoder = ss.SetEncoder(torch.nn.Linear(3, 16), ss.UMBC(16, num_slots=4))
        >>> head = torch.nn.Linear(16, 2)
        >>> x = torch.randn(8, 1000, 3)
        >>> z = ss.encode(encoder, x, chunk_size=100, gradient="unbiased")
        >>> head(z).square().mean().backward()            # an ordinary training loop: nothing else changes
        >>> torch.allclose(z, encoder(x), atol=1e-5)      # the value is that of the full set
        True
    """
    one_chunk = encoder.pool.refuse_chunks(chunks)
    sampling = (features or "cache", FLOOR if floor is None else floor)
    options = Options(chunk_size, grad_chunks, replacement, generator, group, *sampling, one_chunk)
    _check(encoder, gradient, options, features=features, floor=floor, partition=partition)
    if not torch.is_grad_enabled() and (encoder.pool.consistent or gradient != "full"):
        gradient = "none"
    batch = _open(encoder, sets, mask, gradient, options, partition)
    result = MODES[gradient](encoder, batch, options)
    while isinstance(result, State):  # with which the next pass begins
        result = MODES[gradient](encoder, batch, replace(options, begun=result))
    return result


def _check(encoder: SetEncoder, gradient: str, options: Options, **given: Any) -> None:
    """Raise ConfigurationError for options that are invalid, or that the mode does not use."""
    if gradient not in MODES:
        raise ConfigurationError(f"unknown gradient {gradient!r}: choose one of {', '.join(MODES)}")
    for name in ("chunk_size", "grad_chunks"):
        if getattr(options, name) < 1:
            raise ConfigurationError(f"{name} must be at least 1; got {getattr(options, name)}")
    partition = given["partition"]
    if isinstance(partition, str) and partition not in PARTITIONS:
        raise ConfigurationError(f"unknown partition {partition!r}: choose one of {', '.join(PARTITIONS)}, or give index lists")
    uses = {"replacement": "unbiased", "features": "importance", "floor": "importance"}
    for name, mode in uses.items():
        if gradient != mode and (options.replacement if name == "replacement" else given[name] is not None):
            raise ConfigurationError(f"{name} is an option of gradient={mode!r}, and {gradient!r} ignores it: leave it out")
    if options.replacement:
        accumulators = encoder.pool.empty_accumulators(1, torch.device("cpu"))
        if any(accumulator.owned_by_one_element for accumulator in accumulators.values()):
            raise ConfigurationError(
                "drawing chunks with replacement is biased for a maximum or minimum: the chunk that holds it is included with "
                "probability 1 - (1 - 1/C)^m', not m'/C. Leave replacement=False."
            )
    if not options.floor > 0:
        raise ConfigurationError(
            f"floor must be positive, so that every element with a gradient can be drawn; got {options.floor}"
        )
    if options.one_chunk and options.group is not None and dist.get_world_size(options.group) > 1:
        raise encoder.pool.inconsistent()


def _open(
    encoder: SetEncoder, sets: Any, mask: Tensor | None, gradient: str, options: Options, partition: str | Given | None
) -> Batch:
    """The `Batch` that provides the blocks of these sets."""
    listed = sets if isinstance(sets, list | tuple) else [sets]
    are_sources = [isinstance(item, SetSource) for item in listed]
    if not isinstance(sets, Chunks) and not any(are_sources):
        if partition is None:
            partition = "random" if encoder.training else "contiguous"
        chunks_matter = not encoder.pool.consistent or not isinstance(partition, str)
        return InMemory(pack(sets, mask), options.chunk_size, partition, options.generator, chunks_matter)
    if mask is not None:
        raise ConfigurationError("a source of chunks has no mask: leave it out, and serve lists of tensors")
    if partition is not None:
        raise ConfigurationError(
            "a source is cut where it is read, and partition is for sets in memory: leave it out, or choose it with "
            "ss.data.SourceChunks(sources, chunk_size, partition)"
        )
    if isinstance(sets, Chunks):
        return Served(sets, encoder.device, options.generator)
    if not all(are_sources):
        source, other = are_sources.index(True), are_sources.index(False)
        raise ConfigurationError(
            f"a list holds sources or tensors, not both: item {source} is a source ({type(listed[source]).__name__}), item "
            f"{other} a {type(listed[other]).__name__}. Wrap tensors, ss.data.ArraySource(x), or read sources, source.tensor()"
        )
    in_blocks = encoder.training and gradient not in ("full", "subset")
    kind = "blocks" if in_blocks else "contiguous"
    return Sources(listed, options.chunk_size, kind, options.generator, encoder.device)
