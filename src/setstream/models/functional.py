"""The methods of an encoder as pure functions on plain tensors, for compilers and exporters::

    tensors = empty(encoder, batch, elements)      {"pooled.numerator": (B, ...), ..., "count": (B,)}
    tensors = update(encoder, tensors, chunk)      chunk (B, n, ...), n > 0, dense
    tensors = merge(encoder, a, b)
    z       = finalize(encoder, tensors)

Nothing here looks at numbers: no check for NaN, no fingerprint, no comparison of draws. `torch.compile(update, fullgraph=True)`
is one graph, and so is `torch.export`. `to_tensors` and `to_state` convert a `State` to its tensors and back.
"""

from typing import Any

import torch
from torch import Tensor

from setstream.errors import ShapeError
from setstream.models.encoder import SetEncoder
from setstream.pools.base import cast, parameter_dtype
from setstream.states.accumulators import Accumulator, Shared
from setstream.states.fingerprint import Origin
from setstream.states.state import State

Tensors = dict[str, Tensor]


def empty(encoder: SetEncoder, batch: int, elements: Tensor, *, chunks: str | None = None) -> Tensors:
    """The tensors of `batch` sets without elements.

    Args:
        elements: (M, ...), an example of elements; one is enough.
        chunks: "average" accepts a pool that is not consistent, whose chunks are averaged; otherwise a ConsistencyError.

    Example:
        >>> import torch, setstream as ss
        >>> encoder = ss.SetEncoder(torch.nn.Linear(2, 8), ss.UMBC(8, num_slots=4)).eval()
        >>> list(empty(encoder, 3, torch.zeros(1, 2)))
        ['pooled.numerator', 'pooled.normaliser', 'pooled.shift', 'pooled.error', 'count']
    """
    _check_consistent(encoder, chunks)
    with torch.no_grad():
        features = encoder.phi(encoder.cast(elements[:1]))
        nothing = encoder.pool.empty(batch, features.device)
        # A pool may not know the width of its parts before it has seen an element.
        seen = encoder.pool.accumulate(encoder.pool.prepare(nothing), features.expand(batch, *features.shape), None)
        merged = {name: part.merge(seen[name]) if name in seen else part for name, part in nothing.accumulators.items()}
    return {
        f"{name}.{key}": tensor.expand(merged[name][key].shape).contiguous().to(merged[name][key].dtype)
        for name, part in nothing.accumulators.items()
        for key, tensor in part.tensors.items()
    } | {"count": nothing.count}


def update(
    encoder: SetEncoder, tensors: Tensors, chunk: Tensor, mask: Tensor | None = None, *, chunks: str | None = None
) -> Tensors:
    """The tensors after the elements of a dense chunk (B, n, ...), n > 0, have been added; mask (B, n), True = real.

    >>> import torch, setstream as ss
    >>> encoder = ss.SetEncoder(torch.nn.Linear(2, 8), ss.UMBC(8, num_slots=4)).eval()
    >>> x = torch.randn(3, 10, 2)
    >>> tensors = empty(encoder, 3, x[0])
    >>> for chunk in x.split(4, dim=1):
    ...     tensors = update(encoder, tensors, chunk)
    >>> torch.allclose(finalize(encoder, tensors), encoder(x), atol=1e-5)
    True
    """
    _check_consistent(encoder, chunks)
    state = _state(encoder, tensors)
    batch, size = chunk.shape[:2]
    features = encoder.phi(encoder.cast(chunk.flatten(0, 1))).unflatten(0, (batch, size))
    if mask is not None:  # padding may be anything, even NaN
        features = features.masked_fill(~mask.unsqueeze(-1), 0.0)
    parts = encoder.pool.accumulate(encoder.pool.prepare(state), features, mask)
    seen = torch.full_like(state.count, size) if mask is None else mask.sum(1)
    return _merged(state, parts, seen)


def merge(encoder: SetEncoder, a: Tensors, b: Tensors, *, chunks: str | None = None) -> Tensors:
    """The tensors of both together. Both must have the same random draw of a training pass, which is not checked."""
    _check_consistent(encoder, chunks)
    other = _state(encoder, b)
    return _merged(_state(encoder, a), other.accumulators, other.count)


def finalize(encoder: SetEncoder, tensors: Tensors) -> Any:
    """z of the sets."""
    z = encoder.pool.finalize(_state(encoder, tensors))
    dtype = parameter_dtype(encoder.pool) or parameter_dtype(encoder.phi)
    return z if dtype is None else cast(z, dtype)


def to_tensors(state: State) -> Tensors:
    """The tensors of a state."""
    return state.tensors() | {"count": state.count}


def to_state(encoder: SetEncoder, tensors: Tensors) -> State:
    """The state of the encoder with these tensors, to save, merge or continue."""
    if "count" not in tensors:
        raise ShapeError(f"the tensors of a state have a 'count'; these are {', '.join(tensors) or 'none'}")
    state = State(_state(encoder, tensors).accumulators, tensors["count"], Origin(None, encoder.origin.fingerprint))
    encoder.check_state(state)
    return state.checked()


def _check_consistent(encoder: SetEncoder, chunks: str | None) -> None:
    encoder.check_one_pass("ss.pure")
    if encoder.pool.refuse_chunks(chunks):
        raise encoder.pool.inconsistent()


def _state(encoder: SetEncoder, tensors: Tensors) -> State:
    """The tensors as accumulators: those that elements fill, and `Shared` ones for what was drawn."""
    kinds = {name: type(part) for name, part in encoder.pool.empty_accumulators(1, torch.device("cpu")).items()}
    parts: dict[str, dict[str, Tensor]] = {}
    for full_name, tensor in tensors.items():
        name, _, key = full_name.rpartition(".")
        if name:
            parts.setdefault(name, {})[key] = tensor
    return State({name: kinds.get(name, Shared)(**members) for name, members in parts.items()}, tensors["count"])


def _merged(state: State, parts: dict[str, Accumulator], count: Tensor) -> Tensors:
    merged = {n: a.merge(parts[n]) if n in parts and not a.shared else a for n, a in state.accumulators.items()}
    tensors = to_tensors(State(merged, state.count + count))
    return {name: tensors[name] for name in to_tensors(state)}  # in the original order
