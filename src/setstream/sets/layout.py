"""The layouts of sets: three for callers, and one packed form.

    dense    x (B, N, ...) with an optional bool mask (B, N), True = real
    ragged   a list of B tensors (N_i, ...)
    packed   a pair (x (ΣN_i, ...), ptr (B+1,)): set i is x[ptr[i]:ptr[i+1]], as in PyG

All become `Packed`: the real elements of all sets one after another, and the length of each set. phi therefore never sees
padding (which may be anything, even NaN), and a set gives the same result in every layout. Pools work on dense blocks:
`tiles` cuts them to a size that fits a cache, and regroups features: sets of one length as a view, others padded to less than
twice their size.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import NamedTuple, TypeAlias

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


class Group(NamedTuple):
    """A dense block of features."""

    sets: list[int]  # which of the batch, without empty ones
    where: slice | Tensor  # where its elements are in the tile
    features: Tensor  # (b, m, D)
    mask: Tensor | None  # (b, m), if padded


@dataclass(frozen=True)
class Tile:
    """A slice of packed elements: where it starts, the first of its sets, and how many elements of each it has."""

    start: int
    first: int
    lengths: list[int]

    @property
    def stop(self) -> int:
        """Where it ends."""
        return self.start + sum(self.lengths)

    def groups(self, features: Tensor) -> Iterator[Group]:
        """Its features (n, D) in dense blocks."""
        lengths = self.lengths
        if len(lengths) == 1 or min(lengths) == max(lengths):
            if lengths[0]:
                sets = [*range(self.first, self.first + len(lengths))]
                yield Group(sets, slice(None), features.view(len(lengths), lengths[0], -1), None)
            return
        starts = [0, *accumulate(lengths)]
        buckets: dict[int, list[int]] = {}
        for index, length in enumerate(lengths):
            if length:
                buckets.setdefault((length - 1).bit_length(), []).append(index)
        for rows in buckets.values():
            sets = [self.first + row for row in rows]
            begin, end, length = starts[rows[0]], starts[rows[-1] + 1], lengths[rows[0]]
            if end - begin == length * len(rows) and all(lengths[row] == length for row in rows):
                block = features if end - begin == len(features) else features[begin:end]  # a slice's backward is a copy
                yield Group(sets, slice(begin, end), block.unflatten(0, (len(rows), length)), None)  # contiguous sets
                continue
            sizes = torch.tensor([lengths[row] for row in rows])
            offsets = torch.arange(int(sizes.max()))
            mask = offsets < sizes[:, None]
            # Padding repeats an element of the same set: finite like all features, and masked.
            positions = torch.tensor([starts[row] for row in rows])[:, None] + offsets.minimum(sizes[:, None] - 1)
            # index_select takes a fifth of the time of indexing with positions, and its backward adds rows in order.
            block = features.index_select(0, positions.flatten().to(features.device)).unflatten(0, mask.shape)
            yield Group(sets, positions[mask].to(features.device), block, mask.to(features.device))


def tiles(lengths: list[int], size: int, first_set: int = 0) -> list[Tile]:
    """All elements of sets of these lengths: in one tile if they are at most twice `size`, or in tiles of at most `size`.

    Sets that are longer than a tile are cut evenly.

    >>> [(tile.start, tile.first, tile.lengths) for tile in tiles([2, 1, 0, 9, 3], 4)]
    [(0, 0, [2, 1, 0]), (3, 3, [3]), (6, 3, [3]), (9, 3, [3]), (12, 4, [3])]
    """
    if 0 < sum(lengths) <= 2 * size:
        return [Tile(0, first_set, lengths)]
    cut: list[Tile] = []
    start = first = taken = 0
    for index, length in enumerate(lengths):
        if taken + length > size:
            if taken:
                cut.append(Tile(start, first_set + first, lengths[first:index]))
            start, first, taken = start + taken, index, 0
            if length > size:
                parts = -(-length // size)
                for part in range(parts):
                    low, high = length * part // parts, length * (part + 1) // parts
                    cut.append(Tile(start + low, first_set + index, [high - low]))
                start, first = start + length, index + 1
                continue
        taken += length
    if first < len(lengths) and taken:
        cut.append(Tile(start, first_set + first, lengths[first:]))
    return cut
