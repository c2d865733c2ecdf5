"""The layouts of sets: three for callers, and one packed form.

    dense    x (B, N, ...) with an optional bool mask (B, N), True = real
    ragged   a list of B tensors (N_i, ...)
    packed   a pair (x (ΣN_i, ...), ptr (B+1,)): set i is x[ptr[i]:ptr[i+1]], as in PyG

All become `Packed`: the real elements of all sets one after another, and the length of each set. phi therefore never sees
padding (which may be anything, even NaN), and a set gives the same result in every layout. Pools work on dense blocks:
`sets.tiles` regroups features by size, sets of one length as a view, others padded to less than twice their size.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor

from setstream.errors import MaskError, ShapeError

Array: TypeAlias = "Tensor | np.ndarray"
Sets: TypeAlias = "Array | Sequence[Array] | tuple[Array, Array]"


@dataclass(frozen=True)
class Packed:
    """The elements (ΣN_i, ...) of B sets, one after another, and their lengths.

    If they were cut from others: their `positions` there, and the number of the `first` set.
    """

    elements: Tensor
    lengths: list[int]
    positions: Tensor | slice | None = None
    first: int = 0

    def __len__(self) -> int:
        return len(self.lengths)


def from_array(array: np.ndarray) -> Tensor:
    """A tensor that shares the array's memory; a copy where torch cannot (negative strides, foreign byte order)."""
    if not array.dtype.isnative or any(stride < 0 or stride % array.itemsize for stride in array.strides):
        array = array.astype(array.dtype.newbyteorder("="))
    if array.flags.writeable:
        return torch.from_numpy(array)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")  # elements are only read
        return torch.from_numpy(array)


def _tensor(value: object, what: str) -> Tensor:
    if isinstance(value, Tensor):
        return value
    if hasattr(value, "__array__"):  # NumPy arrays and data frames
        array = np.asarray(value)
        if array.dtype.kind not in "fiubc":
            raise ShapeError(
                f"{what} must hold numbers, not {array.dtype}: convert it (astype(float)), or leave text columns out"
            )
        return from_array(array)
    if hasattr(value, "chunks"):
        raise ShapeError(
            f"{what} is a source ({type(value).__name__}), but a tensor or an array is needed here: source.tensor() reads all "
            "of it; ss.encode(encoder, sources, chunk_size=...) reads sources in chunks"
        )
    raise ShapeError(f"{what} must be a tensor or an array, got {type(value).__name__}")


def pack(sets: Sets | Packed, mask: Array | None = None) -> Packed:
    """Sets of any of the three layouts in packed form; raises ShapeError or MaskError if they are invalid."""
    if isinstance(sets, Packed):
        return sets
    if isinstance(sets, tuple | list) and mask is not None:
        raise MaskError("a mask is for the dense layout (B, N, ...) only: ragged lists and (x, ptr) have no padding")
    if isinstance(sets, tuple):
        return _pack_pointers(sets)
    if isinstance(sets, list):
        return _pack_ragged(sets)
    return _pack_dense(_tensor(sets, "sets"), mask)


def _pack_dense(x: Tensor, mask: Array | None) -> Packed:
    if x.dim() < 2:
        raise ShapeError(
            f"sets must be (B, N, ...): a batch of sets of elements; got shape {tuple(x.shape)}. For one set pass x[None], for "
            "one element x[None, None]"
        )
    batch, size = x.shape[:2]
    if batch == 0:
        raise ShapeError(f"the batch is empty: got shape {tuple(x.shape)}, expected at least one set")
    if mask is None:
        return Packed(x.flatten(0, 1), [size] * batch)
    if isinstance(mask, np.ndarray):
        mask = from_array(mask).to(x.device)
    if not isinstance(mask, Tensor) or mask.dtype != torch.bool:
        kind = mask.dtype if isinstance(mask, Tensor) else type(mask).__name__
        raise MaskError(f"the mask must be a bool tensor or array, True for real elements; got {kind}: convert it to bool")
    if mask.shape != (batch, size):
        raise MaskError(f"the mask must have shape {(batch, size)} like the sets {tuple(x.shape)}; got {tuple(mask.shape)}")
    if mask.device != x.device:
        raise MaskError(f"the mask is on {mask.device}, the sets are on {x.device}: move one of them")
    lengths = mask.sum(1).tolist()
    return Packed(x.flatten(0, 1) if sum(lengths) == batch * size else x[mask], lengths)


def _pack_ragged(sets: Sequence[object]) -> Packed:
    if not sets:
        raise ShapeError("the batch is empty: got an empty list, expected at least one set")
    tensors = [_tensor(item, f"set {index} of the list") for index, item in enumerate(sets)]
    for index, item in enumerate(tensors):
        if item.dim() < 1:
            raise ShapeError(f"set {index} of the list is a single number; expected (N, ...) elements")
        first, shape = tuple(tensors[0].shape[1:]), tuple(item.shape[1:])
        if shape != first:
            raise ShapeError(f"all sets must have elements of one shape: set 0 has {first}, set {index} has {shape}")
    return Packed(tensors[0] if len(tensors) == 1 else torch.cat(tensors), [len(item) for item in tensors])


def _pack_pointers(sets: tuple[object, ...]) -> Packed:
    if len(sets) != 2:
        raise ShapeError(f"a tuple must be the pair (x, ptr); got {len(sets)} items. Give ragged sets as a list.")
    x, ptr = _tensor(sets[0], "x of (x, ptr)"), _tensor(sets[1], "ptr of (x, ptr)")
    if ptr.dtype not in (torch.int64, torch.int32) or ptr.dim() != 1:
        raise ShapeError(
            f"ptr must be (B + 1,) integers that start at 0 and end at len(x); got {ptr.dtype} of shape {tuple(ptr.shape)}. "
            "Give ragged sets as a list, not as a tuple."
        )
    bounds = ptr.tolist()
    if len(bounds) < 2:
        raise ShapeError(f"the batch is empty: ptr has {len(bounds)} entries, expected at least two")
    lengths = [end - start for start, end in pairwise(bounds)]
    if bounds[0] != 0 or x.dim() < 1 or bounds[-1] != len(x) or min(lengths) < 0:
        came = f"{bounds[:8]}{'...' if len(bounds) > 8 else ''}"
        raise ShapeError(f"ptr must rise from 0 to len(x) = {len(x) if x.dim() else 0}; got {came}")
    return Packed(x, lengths)
