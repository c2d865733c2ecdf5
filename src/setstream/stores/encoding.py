"""Elements of many sets as states, in few passes of the encoder."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from setstream.errors import SetstreamError, ShapeError
from setstream.states.state import State

if TYPE_CHECKING:
    from setstream.stores.store import StateStore


def encode_all(store: StateStore, parts: Sequence[Tensor | State | str]) -> list[State | str | SetstreamError]:
    """Elements as states, those of one shape and type in one update; an error for those that cannot be encoded."""
    encoded: dict[int, State | SetstreamError] = {}
    groups: dict[tuple[object, ...], dict[int, Tensor]] = {}
    for place, part in enumerate(parts):
        if isinstance(part, Tensor) and len(part):
            groups.setdefault((part.dtype, part.shape[1:]), {})[place] = part
        elif isinstance(part, Tensor):
            encoded[place] = store.encoder.empty(1)
    for group in groups.values():
        states = _encode(store, list(group.values()))
        if isinstance(states[0], SetstreamError):  # at least one of them is bad
            states = [_encode(store, [tensor])[0] for tensor in group.values()]
        encoded |= zip(group, states, strict=True)
    return [part if not isinstance(part, Tensor) else encoded[place] for place, part in enumerate(parts)]


@torch.no_grad()
def _encode(store: StateStore, tensors: list[Tensor]) -> Sequence[State | SetstreamError]:
    """A state for each tensor, or one error."""
    device = store.encoder.device
    try:
        return list(store.encoder.update(None, [tensor.to(device) if device else tensor for tensor in tensors]))
    except SetstreamError as error:
        return [error]
    except (RuntimeError, IndexError, ValueError, TypeError) as error:  # phi cannot read the elements
        shape, kind = tuple(tensors[0].shape[1:]), str(tensors[0].dtype).removeprefix("torch.")
        reason = str(error).partition("\n")[0]
        return [ShapeError(f"the model cannot read elements of shape {shape} and type {kind}: {reason}")]
