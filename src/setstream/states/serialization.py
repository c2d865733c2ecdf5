"""A state as bytes: one safetensors blob.

    header  __metadata__: {"setstream.state": JSON of version, fingerprint, parts (accumulators: name -> kind), checksum}
    body    the tensors, named <accumulator>.<tensor>, and `count`

The checksum covers names, dtypes, shapes and bytes of all tensors and the rest of the metadata: safetensors itself
notices a short file, but not a flipped bit. It guards against damage, not against forgery.
"""

import hashlib
import json
import struct
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor

from setstream.errors import StateFormatError
from setstream.states.accumulators import Accumulator
from setstream.states.digest import hash_tensors
from setstream.states.fingerprint import Origin

FORMAT = "setstream.state"
# 1: with `spent` in weighted sums, and plain sums of total and mass. 2: with `error`.
VERSION = 2


def _checksum(tensors: dict[str, Tensor], metadata: dict[str, Any]) -> str:
    return hash_tensors(hashlib.blake2b(json.dumps(metadata, sort_keys=True).encode(), digest_size=16), tensors)


def dump(accumulators: dict[str, Accumulator], count: Tensor, fingerprint: str | None) -> bytes:
    """The bytes of a state: equal states give equal bytes."""
    tensors = {"count": count}
    for name, accumulator in accumulators.items():
        tensors |= {f"{name}.{key}": tensor for key, tensor in accumulator.to_tensors().items()}
    # safetensors refuses views of one storage: each tensor gets its own memory.
    tensors = {name: tensor.detach().to("cpu").clone(memory_format=torch.contiguous_format) for name, tensor in tensors.items()}
    kinds = {name: accumulator.kind for name, accumulator in accumulators.items()}
    metadata: dict[str, Any] = {"version": VERSION, "fingerprint": fingerprint, "parts": kinds}
    header = json.dumps({**metadata, "checksum": _checksum(tensors, metadata)})
    return safetensors.torch.save(tensors, {FORMAT: header})


def _metadata(data: bytes) -> dict[str, Any]:
    """Our part of the header of a safetensors blob: eight bytes of length, then JSON."""
    try:
        (length,) = struct.unpack("<Q", data[:8])
        header = json.loads(data[8 : 8 + length])
        metadata = json.loads(header["__metadata__"][FORMAT])
        version = metadata["version"]
    except (struct.error, ValueError, LookupError, TypeError, OverflowError, RecursionError) as error:
        raise StateFormatError(
            f"these {len(data)} bytes are not a setstream state, or a damaged one: no safetensors header that says so "
            f"({type(error).__name__}: {error}). Expected what State.to_bytes() or State.save() wrote."
        ) from None
    if version not in range(1, VERSION + 1):
        came = f"this state has format version {version!r}; this setstream reads versions 1 to {VERSION}"
        raise StateFormatError(f"{came}. Update setstream, or save the state again with the version that reads it.")
    return metadata


def parse(data: bytes) -> tuple[dict[str, Accumulator], Tensor, Origin | None]:
    """Accumulators, count and origin of the state in `data`."""
    if not isinstance(data, bytes | bytearray | memoryview):
        raise StateFormatError(f"a state is read from bytes; got {type(data).__name__}")
    data = bytes(data)
    metadata = _metadata(data)
    try:
        tensors: dict[str, Tensor] = safetensors.torch.load(data)
    except (SafetensorError, ValueError, KeyError, RuntimeError) as error:
        raise StateFormatError(f"the state is damaged or truncated ({len(data)} bytes): {error}") from None
    if metadata.pop("checksum", None) != _checksum(tensors, metadata):
        raise StateFormatError("the state is damaged: its checksum does not match its contents. Load another copy of it.")
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
