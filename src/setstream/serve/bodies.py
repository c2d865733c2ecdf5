"""Elements from the body of a request: JSON, an .npy file, an Arrow IPC stream.

    application/json                       {"elements": [[0.1, 0.2], [0.3, 0.4]]}
    application/x-npy                      what np.save writes, (n, ...)
    application/vnd.apache.arrow.stream    one list column of numbers, or numeric columns, a row an element

Nothing is believed: a header that promises more than the body holds, compressed buffers that unfold to gigabytes, pickled
objects and missing values are refused with what was expected.
"""

from __future__ import annotations

import io
import json
import struct
from tokenize import TokenError
from typing import Any

import numpy as np
import torch
from torch import Tensor

from setstream.data.files import need
from setstream.data.tables import row_features
from setstream.errors import DataError

JSON, NPY, ARROW = "application/json", "application/x-npy", "application/vnd.apache.arrow.stream"


def parse_elements(kind: str, body: bytes) -> Tensor:
    """The elements (n, ...) in a body of one of the three kinds; DataError says what is wrong with it."""
    return {JSON: _from_json, NPY: _from_npy, ARROW: _from_arrow}[kind](body)


def _from_json(body: bytes) -> Tensor:
    try:
        found = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise DataError(f"the body is no JSON: {error}") from None
    if not isinstance(found, dict) or set(found) != {"elements"} or not isinstance(found["elements"], list):
        raise DataError('expected an object with one list: {"elements": [[0.1, 0.2], [0.3, 0.4]]}')
    try:
        array = np.asarray(found["elements"])
    except (ValueError, OverflowError, RecursionError) as error:
        raise DataError(f"elements must be lists of numbers, all of one shape: {error}") from None
    return _tensor(array)


def _from_npy(body: bytes) -> Tensor:
    file = io.BytesIO(body)
    try:
        version = np.lib.format.read_magic(file)
        read = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}[version]
        shape, by_columns, kind = read(file)
    except (ValueError, KeyError, EOFError, TypeError, SyntaxError, TokenError, RecursionError, MemoryError) as error:
        raise DataError(f"the body is no .npy file of version 1 or 2: {error}") from None
    if kind.hasobject or kind.kind not in "fiu":
        raise DataError(f"elements are numbers; the .npy file holds {kind}")
    size = kind.itemsize
    for length in shape:  # Python's own numbers: no product overflows
        size *= length
    if min(shape, default=0) < 0 or size != len(body) - file.tell():
        raise DataError(f"the .npy file promises {shape} of {kind}, {size} bytes, and holds {len(body) - file.tell()}")
    array = np.frombuffer(body, kind, offset=file.tell())
    return _tensor(array.reshape(shape, order="F" if by_columns else "C"))


def _from_arrow(body: bytes) -> Tensor:
    arrow, ipc = need("pyarrow"), need("pyarrow.ipc")
    parts = []
    try:
        messages = iter(ipc.MessageReader.open_stream(arrow.BufferReader(body)))
        schema = ipc.read_schema(next(messages))
        for message in messages:
            if message.type != "record batch":
                raise DataError(f"expected record batches of numbers; the stream holds a {message.type}")
            if _compressed(message.metadata.to_pybytes()):
                raise DataError("the stream is compressed: write it without (IpcWriteOptions(compression=None))")
            batch = ipc.read_record_batch(message, schema)
            batch.validate(full=True)
            parts.append(row_features(batch, list(schema.names), "the Arrow stream"))
    except StopIteration:
        raise DataError("the body is empty; expected an Arrow IPC stream") from None
    except (arrow.ArrowException, OSError, ValueError, TypeError, IndexError, KeyError, RuntimeError, struct.error) as error:
        if isinstance(error, DataError):
            raise
        raise DataError(f"the body is no Arrow IPC stream of numbers: {error}") from None
    if not parts:
        raise DataError("the Arrow stream holds no record batch")
    if len({part.shape[1:] for part in parts}) > 1:
        raise DataError("the record batches of the Arrow stream have rows of different widths")
    return _checked(torch.cat(parts))


def _compressed(metadata: bytes) -> bool:
    """Whether a record batch says that its buffers are compressed: field 3 of the table that field 2 of the message is."""
    if metadata[:4] == b"\xff\xff\xff\xff":
        metadata = metadata[8:]
    (message,) = struct.unpack_from("<I", metadata, 0)
    header = _field(metadata, message, 2)
    if header is None:
        return False
    (offset,) = struct.unpack_from("<I", metadata, header)
    return _field(metadata, header + offset, 3) is not None


def _field(data: bytes, table: int, number: int) -> int | None:
    """Where a field of a flatbuffers table lies; None if it is not there."""
    (back,) = struct.unpack_from("<i", data, table)
    size, _ = struct.unpack_from("<HH", data, table - back)
    if 4 + 2 * number >= size:
        return None
    (offset,) = struct.unpack_from("<H", data, table - back + 4 + 2 * number)
    return table + offset if offset else None


def _tensor(array: np.ndarray[Any, Any]) -> Tensor:
    if array.dtype.kind not in "fiu" and array.size:
        raise DataError("elements must be lists of numbers, all of one shape; some are no numbers")
    if array.dtype.kind == "f" and array.dtype.itemsize > 8:
        raise DataError(f"elements are kept in 64 bits at most; got {array.dtype}")
    native = np.require(array, array.dtype.newbyteorder("="), ("C", "W", "O"))
    return _checked(torch.from_numpy(native if array.size else native.astype(np.float32)))


def _checked(elements: Tensor) -> Tensor:
    if elements.dim() < 1:
        raise DataError("expected a list of elements; got a single number")
    return elements
