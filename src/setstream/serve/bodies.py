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
from tokenize import TokenError
from typing import Any

import numpy as np
import torch
from torch import Tensor

from setstream.data.arrow_ipc import check_stream
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
    check_stream(body, "the body", plain=True)
    parts = []
    try:
        stream = ipc.open_stream(body)
        _need_numbers(stream.schema, arrow.types)
        for batch in stream:
            batch.validate(full=True)
            parts.append(row_features(batch, list(stream.schema.names), "the Arrow stream"))
    except (arrow.ArrowException, OSError, ValueError, TypeError, IndexError, KeyError, RuntimeError) as error:
        if isinstance(error, DataError):
            raise
        raise DataError(f"the body is no Arrow IPC stream of numbers: {error}") from None
    if not parts:
        raise DataError("the Arrow stream holds no record batch")
    if len({part.shape[1:] for part in parts}) > 1:
        raise DataError("the record batches of the Arrow stream have rows of different widths")
    return _checked(torch.cat(parts))


def _need_numbers(schema: Any, types: Any) -> None:
    """Only numbers and lists of them: what else a column can be (views, unions, runs) is not read at all."""
    for field in schema:
        lists = types.is_list(field.type) or types.is_large_list(field.type) or types.is_fixed_size_list(field.type)
        values = field.type.value_type if lists else field.type
        if not (types.is_floating(values) or types.is_integer(values)):
            raise DataError(f"expected columns of numbers, or of lists of numbers; {field.name!r} holds {field.type}")


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
