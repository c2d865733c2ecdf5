"""Elements by tile of time: tile k holds the elements with k·tile <= t < (k + 1)·tile."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import torch
from torch import Tensor

from setstream.errors import ConfigurationError, ShapeError
from setstream.sets.layout import Packed, Sets, pack
from setstream.states.state import State

if TYPE_CHECKING:
    from setstream.models.encoder import SetEncoder

#: One time for all elements of a chunk, or one for each, in the layout of the chunk.
Times: TypeAlias = "float | Sets"


def tile_numbers(time: Times, tile: float, packed: Packed, mask: Tensor | None = None) -> Tensor:
    """The number of the tile of each packed element, int64, from the times of the elements; `mask` as for the elements."""
    count = len(packed.elements)
    if isinstance(time, int | float):
        times = torch.full((count,), float(time), dtype=torch.float64)
    else:
        if isinstance(time, Tensor | np.ndarray) and time.ndim == 1 and len(packed) == 1:
            time = time[None]
        times = pack(time, mask).elements
        if times.dim() != 1 or len(times) != count:
            raise ShapeError(f"one time for each of {count} elements is needed, in their layout; got {tuple(times.shape)}")
        if times.dtype in (torch.float32, torch.float16, torch.bfloat16):
            raise ConfigurationError(
                f"times are float64 or integers; got {times.dtype}, which rounds the seconds since 1970 to minutes"
            )
    numbers = (times.double() / tile).floor_()
    if not bool((numbers.abs() < 2**53).all()):  # NaN, too
        raise ConfigurationError(f"times must be finite, and fewer than 2**53 tiles of {tile:g}; got {times[:3].tolist()}")
    return numbers.long()


def tile_number(time: float, tile: float) -> int:
    """The number of the tile that a time is in."""
    return int(tile_numbers(time, tile, Packed(torch.zeros(1), [1])))


def states_by_tile(encoder: SetEncoder, packed: Packed, numbers: Tensor) -> dict[int, State]:
    """The state of the elements of each tile, in rising order; all are encoded together."""
    distinct, which = numbers.unique(return_inverse=True)
    if len(distinct) == 1:
        return {int(distinct): encoder.update(None, packed)}  # type: ignore[arg-type]  # the layout that all others become
    batch = len(packed)
    group = which * batch + torch.arange(batch).repeat_interleave(torch.tensor(packed.lengths))
    lengths = group.bincount(minlength=batch * len(distinct)).tolist()
    elements = packed.elements[group.argsort(stable=True).to(packed.elements.device)]
    state = encoder.update(None, Packed(elements, lengths))  # type: ignore[arg-type]
    rows = torch.arange(len(state), device=state.device).split(batch)
    return {tile: state[some] for tile, some in zip(distinct.tolist(), rows, strict=True)}  # copies: no tile keeps others alive
