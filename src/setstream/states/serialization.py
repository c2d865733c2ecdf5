"""A state as bytes: one safetensors blob.

    header  __metadata__: {"setstream.state": JSON of version, fingerprint, parts (accumulators: name -> kind), checksum}
    body    the tensors, named <accumulator>.<tensor>, and `count`

The checksum covers names, dtypes, shapes and bytes of all tensors and the rest of the metadata: safetensors itself
notices a short file, but not a flipped bit. It guards against damage, not against forgery.

The states of one encoder differ in their checksum and in their tensors' bytes only. So safetensors writes and reads the first
of them, and what the others have in common with it (a `_Layout`) is kept: they cost a hash and a copy.
"""

import hashlib
import json
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor

from setstream.errors import StateFormatError
from setstream.states.accumulators import Accumulator
from setstream.states.digest import tensor_bytes
from setstream.states.fingerprint import Origin

Parsed: TypeAlias = tuple[dict[str, Accumulator], Tensor, Origin | None]  # accumulators, count and origin
FORMAT = "setstream.state"
# 1: with `spent` in weighted sums, and plain sums of total and mass. 2: with `error`.
VERSION = 2
BEFORE_CHECKSUM = rb"\"checksum\": \""


class _Layout(NamedTuple):
    """What the bytes of many states have in common."""

    head: bytes  # up to the checksum
    tail: bytes  # from there to the tensors' bytes
    size: int  # of the tensors' bytes
    metadata: dict[str, Any]
    hasher: "hashlib.blake2b"  # has seen the metadata
    tensors: list[tuple[str, bytes, torch.dtype, torch.Size, slice]]  # by name; what is hashed before each, and its place

    def checksum(self, body: memoryview) -> str:
        """The checksum of tensors, from their bytes."""
        hasher = self.hasher.copy()
        for _, title, _, _, place in self.tensors:
            hasher.update(title)
            hasher.update(body[place])
        return hasher.hexdigest()


# The layouts that were seen lately, by what a state consists of, and by (head, tail).
_layouts: dict[Hashable, _Layout] = {}
MOST_LAYOUTS = 256


def header_of(data: bytes) -> bytes:
    """The header of a state's bytes. States with equal headers are equal: it holds the checksum."""
    return data[: 8 + int.from_bytes(data[:8], "little")]


def _split(data: bytes) -> tuple[bytes, str, bytes, int]:
    """The header around its checksum, the checksum, and where the header ends; for any bytes."""
    start = len(header_of(data))
    first = min(start, data.find(BEFORE_CHECKSUM, 0, start) + len(BEFORE_CHECKSUM))
    return data[:first], data[first : first + 32].decode("ascii", "replace"), data[first + 32 : start], start


def _learn(key: Hashable, data: bytes, tensors: dict[str, Tensor], metadata: dict[str, Any]) -> _Layout:
    """The layout of a state that safetensors wrote or read."""
    head, _, tail, start = _split(data)
    header = json.loads(data[8:start])
    entries = []
    for name, tensor in sorted(tensors.items()):
        title = json.dumps([name, str(tensor.dtype), list(tensor.shape)]).encode()
        entries.append((name, title, tensor.dtype, tensor.shape, slice(*header[name]["data_offsets"])))
    hasher = hashlib.blake2b(json.dumps(metadata, sort_keys=True).encode(), digest_size=16)
    if len(_layouts) >= MOST_LAYOUTS:
        _layouts.clear()
    return _layouts.setdefault(key, _Layout(head, tail, len(data) - start, metadata, hasher, entries))


def dump(accumulators: dict[str, Accumulator], count: Tensor, fingerprint: str | None) -> bytes:
    """The bytes of a state: equal states give equal bytes."""
    (data,) = _dump(accumulators, count, fingerprint, 1, len(count))
    return data


def dump_all(accumulators: dict[str, Accumulator], count: Tensor, fingerprint: str | None) -> list[bytes]:
    """The bytes of each set of a batch, as a state of one set."""
    return _dump(accumulators, count, fingerprint, len(count), 1) if len(count) else []


def _dump(accumulators: dict[str, Accumulator], count: Tensor, fingerprint: str | None, blobs: int, sets: int) -> list[bytes]:
    """The batch as `blobs` states of `sets` sets each."""
    tensors = {"count": count}
    for name, accumulator in accumulators.items():
        tensors |= {f"{name}.{key}": tensor for key, tensor in accumulator.to_tensors().items()}
    kinds = {name: accumulator.kind for name, accumulator in accumulators.items()}
    # A state that was edited may have tensors with another number of rows: its shapes are its own.
    shapes = {n: tensor.shape if blobs == 1 else (sets, *tensor.shape[1:]) for n, tensor in tensors.items()}
    key = fingerprint, *kinds.items(), *[(name, tensor.dtype, shapes[name]) for name, tensor in tensors.items()]
    layout = _layouts.get(key)
    if layout is None:
        # safetensors refuses views of one storage: each tensor gets its own memory.
        one = {n: t if blobs == 1 else t[:sets] for n, t in tensors.items()}
        copies = {n: t.detach().to("cpu").clone(memory_format=torch.contiguous_format) for n, t in one.items()}
        metadata: dict[str, Any] = {"version": VERSION, "fingerprint": fingerprint, "parts": kinds}
        blank = json.dumps({**metadata, "checksum": "0" * 32})
        layout = _learn(key, safetensors.torch.save(copies, {FORMAT: blank}), copies, metadata)
    rows = np.empty((blobs, layout.size), np.uint8)
    for name, *_, place in layout.tensors:
        rows[:, place] = np.frombuffer(tensor_bytes(tensors[name]), np.uint8).reshape(blobs, -1)
    bodies = [row.data for row in rows]
    return [b"".join([layout.head, layout.checksum(body).encode(), layout.tail, body]) for body in bodies]


def _metadata(data: bytes) -> dict[str, Any]:
    """Our part of the header of a safetensors blob: eight bytes of length, then JSON."""
    try:
        header = json.loads(header_of(data)[8:])
        metadata = json.loads(header["__metadata__"][FORMAT])
        version = metadata["version"]
    except (ValueError, LookupError, TypeError, OverflowError, RecursionError) as error:
        raise StateFormatError(
            f"these {len(data)} bytes are not a setstream state, or a damaged one: no safetensors header that says so "
            f"({type(error).__name__}: {error}). Expected what State.to_bytes() or State.save() wrote."
        ) from None
    if version not in range(1, VERSION + 1):
        came = f"this state has format version {version!r}; this setstream reads versions 1 to {VERSION}"
        raise StateFormatError(f"{came}. Update setstream, or save the state again with the version that reads it.")
    return metadata


def _layout_of(data: bytes) -> _Layout:
    """The layout of a state; safetensors reads the first that has it."""
    head, _, tail, start = _split(data)
    layout = _layouts.get((head, tail))
    if layout is None or layout.size != len(data) - start:
        metadata = _metadata(data)
        try:
            loaded: dict[str, Tensor] = safetensors.torch.load(data)
        except (SafetensorError, ValueError, KeyError, RuntimeError) as error:
            raise StateFormatError(f"the state is damaged or truncated ({len(data)} bytes): {error}") from None
        layout = _learn((head, tail), data, loaded, {key: value for key, value in metadata.items() if key != "checksum"})
    return layout


def parse(data: bytes) -> Parsed:
    """Accumulators, count and origin of the state in `data`."""
    if not isinstance(data, bytes | bytearray | memoryview):
        raise StateFormatError(f"a state is read from bytes; got {type(data).__name__}")
    data = bytes(data)
    return _read(_layout_of(data), [data])


def parse_all(data: Sequence[bytes]) -> Parsed | None:
    """The states of single sets in several blobs, as one batch; None unless they differ in their contents only.

    Much faster than to parse each of them: the tensors of all are made together.
    """
    layout, size = _layout_of(data[0]), len(data[0])
    first = len(layout.head) + 32  # after the checksum
    alike = (len(x) == size and x.startswith(layout.head) and x.startswith(layout.tail, first) for x in data)
    single = (shape[:1] == (1,) for *_, shape, _ in layout.tensors)
    return _read(layout, data) if all(single) and all(alike) else None


def _read(layout: _Layout, data: Sequence[bytes]) -> Parsed:
    """The state in a blob of this layout, or the states of single sets in several."""
    first, bodies = len(layout.head), [memoryview(one)[len(one) - layout.size :] for one in data]
    for one, body in zip(data, bodies, strict=True):
        if one[first : first + 32] != layout.checksum(body).encode():
            raise StateFormatError("the state is damaged: its checksum does not match its contents. Load another copy of it.")
    rows = torch.from_numpy(np.frombuffer(bytearray(b"".join(bodies)), np.uint8)).view(len(data), -1)
    tensors = {}
    for name, _, dtype, shape, place in layout.tensors:
        sizes = shape if len(data) == 1 else (len(data), *shape[1:])
        tensors[name] = rows[:, place].flatten().clone().view(dtype).view(sizes)  # flat: a tensor may be empty
    return _assemble(layout.metadata, tensors)


def _assemble(metadata: Mapping[str, Any], tensors: dict[str, Tensor]) -> Parsed:
    """Accumulators, count and origin from the metadata and the tensors of a state, or of a batch of them."""
    count, kinds, fingerprint = tensors.pop("count", None), metadata.get("parts"), metadata.get("fingerprint")
    if count is None or not isinstance(kinds, dict) or not isinstance(fingerprint, str | None):
        raise StateFormatError("the state lacks its count, its parts or its fingerprint: it was edited")
    if count.dtype != torch.int64 or count.dim() != 1 or any(t.shape[:1] != count.shape for t in tensors.values()):
        raise StateFormatError("the state's tensors are not of one batch, with a count for each set: it was edited")
    accumulators: dict[str, Accumulator] = {}
    for name, kind in kinds.items():
        named = {key.removeprefix(f"{name}."): t for key, t in tensors.items() if key.startswith(f"{name}.")}
        try:
            accumulators[name] = Accumulator.of_kind(kind).from_tensors(named, metadata["version"])
        except (KeyError, TypeError) as error:
            message = f"the accumulator {name!r} cannot be read, it was edited ({type(error).__name__}: {error})"
            raise StateFormatError(message) from None
    return accumulators, count, None if fingerprint is None else Origin(None, fingerprint)
