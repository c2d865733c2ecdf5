"""Elements from the body of a request: JSON, an .npy file, an Arrow IPC stream.

    application/json                       {"elements": [[0.1, 0.2], [0.3, null]]}: null is NaN, a missing value
    application/x-npy                      what np.save writes, (n, ...)
    application/vnd.apache.arrow.stream    one list column of numbers, or numeric columns, one row per element

Bodies are not trusted: a header that declares more than the body holds, compressed buffers that expand to gigabytes, pickled
objects and missing values of Arrow raise DataError, which says what was expected.
"""

import io
import json
import math
import re
from itertools import chain
from tokenize import TokenError
from types import NoneType
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from setstream._utils.optional import need
from setstream.data.formats.arrow import check_stream
from setstream.data.formats.table import row_features
from setstream.errors import DataError
from setstream.serve.answers import TooManyElements

JSON, NPY, ARROW = "application/json", "application/x-npy", "application/vnd.apache.arrow.stream"
MOST_AXES = 8
# Bytes of JSON that are parsed at a time: some milliseconds in which no other thread runs.
PIECE = 2**14
ONE_LIST, OPENED = re.compile(rb'\s*\{\s*"elements"\s*:\s*\['), re.compile(rb"[\s\[]*")
# NaN, null and Infinity are accepted here: the encoder raises NonFiniteError for them, unless phi takes missing values.
IN_NUMBERS = b"0123456789+-.eE,[] \t\r\nNaInfinityul"


def parse_elements(kind: str, body: bytes, most: int = 2**31) -> Tensor:
    """The elements (n, ...) in a body of one of the three kinds, at most `most`; DataError says what is wrong with it."""
    elements = _from_json(body, most) if kind == JSON else {NPY: _from_npy, ARROW: _from_arrow}[kind](body)
    if len(elements) > most:
        raise TooManyElements(f"a request has at most {most} elements; this one has {len(elements)}")
    return elements


def _from_json(body: bytes, most: int) -> Tensor:
    """Parsed in pieces: lists of Python numbers take much memory, and block the interpreter while they are parsed."""
    opened = ONE_LIST.match(body)
    first, last = opened.end() if opened else 0, body.rfind(b"]")
    if opened is None or last < first or body[last + 1 :].strip() != b"}":
        raise DataError('the body is not valid JSON: expected an object with one list, {"elements": [[0.1], [0.2]]}')
    if body[first:last].translate(None, IN_NUMBERS):
        raise DataError("elements must be lists of numbers; the list holds other things")
    axes = 1 + OPENED.match(body, first)[0].count(b"[")  # type: ignore[index]  # it matches nothing, too
    if axes > MOST_AXES:
        raise DataError(f"elements are lists of numbers, at most {MOST_AXES} deep; got {axes}")
    between = re.compile(rb"\]\s*" * (axes - 1) + rb",")
    arrays: list[np.ndarray[Any, Any]] = []
    count, cut = 0, cast("re.Match[bytes] | None", opened)
    while cut is not None:
        cut = between.search(body, min(first + PIECE, last), last)
        text = body[first : cut.end() - 1 if cut else last]
        if arrays and not text.strip():
            raise DataError("the body is not valid JSON: the list ends in a comma")
        arrays.append(_array(text))
        count += len(arrays[-1])
        if count > most:
            raise TooManyElements(f"a request has at most {most} elements; this one has {count} or more")
        first = cut.end() if cut else last
    if len({array.shape[1:] for array in arrays}) > 1:
        raise DataError("elements must be lists of numbers, all of one shape")
    return _tensor(np.concatenate(arrays))


def _array(text: bytes) -> np.ndarray[Any, Any]:
    """Elements between commas: numbers, or lists of one shape."""
    try:
        level = json.loads(b"[%s]" % text)
    except (ValueError, RecursionError) as error:
        raise DataError(f"the body is not valid JSON: {error}") from None
    shape = [len(level)]
    while (kinds := set(map(type, level))) == {list}:
        lengths = set(map(len, level))
        if len(lengths) > 1:
            raise DataError(f"elements must be lists of numbers, all of one shape; the lengths are {sorted(lengths)[:5]}")
        shape += lengths
        level = list(chain.from_iterable(level))
    if not kinds <= {int, float, NoneType}:
        raise DataError("elements must be lists of numbers, all of one shape; some are lists where others are numbers")
    try:
        return np.array(level, np.int64 if kinds == {int} else np.float64).reshape(shape)
    except OverflowError:
        raise DataError("elements must be lists of numbers of 64 bits; some are larger") from None


def _from_npy(body: bytes) -> Tensor:
    file = io.BytesIO(body)
    try:
        version = np.lib.format.read_magic(file)
        read = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}[version]
        shape, by_columns, kind = read(file)
    except (ValueError, KeyError, EOFError, TypeError, SyntaxError, TokenError, RecursionError, MemoryError) as error:
        raise DataError(f"the body is not an .npy file of version 1 or 2: {error}") from None
    if kind.hasobject or kind.kind not in "fiu":
        raise DataError(f"elements are numbers; the .npy file holds {kind}")
    if len(shape) > MOST_AXES or not all(type(length) is int and 0 <= length < 2**31 for length in shape):
        raise DataError(f"the .npy file declares {str(shape)[:99]}; expected at most {MOST_AXES} axes, each shorter than 2**31")
    size = kind.itemsize * math.prod(shape)
    if size != len(body) - file.tell() or math.prod(filter(None, shape)) >= 2**31:
        raise DataError(f"the .npy file declares {shape} of {kind}, {size} bytes, but holds {len(body) - file.tell()}")
    array = np.frombuffer(body, kind, offset=file.tell())
    return _tensor(array.reshape(shape, order="F" if by_columns else "C"))


def _from_arrow(body: bytes) -> Tensor:
    arrow, ipc, types = need("pyarrow"), need("pyarrow.ipc"), need("pyarrow.types")
    check_stream(body, "the body")
    parts = []
    try:
        stream = ipc.open_stream(body)
        for field in stream.schema:  # no other column types: views, unions, runs
            lists = types.is_list(field.type) or types.is_large_list(field.type) or types.is_fixed_size_list(field.type)
            values = field.type.value_type if lists else field.type
            if not (types.is_floating(values) or types.is_integer(values)):
                raise DataError(f"expected columns of numbers, or of lists of numbers; {field.name!r} holds {field.type}")
        for batch in stream:
            batch.validate(full=True)
            parts.append(row_features(batch, list(stream.schema.names), "the Arrow stream"))
    except (arrow.ArrowException, OSError, ValueError, TypeError, IndexError, KeyError, RuntimeError) as error:
        if isinstance(error, DataError):
            raise
        raise DataError(f"the body is not an Arrow IPC stream of numbers: {error}") from None
    if not parts:
        raise DataError("the Arrow stream holds no record batch")
    if len({part.shape[1:] for part in parts}) > 1:
        raise DataError("the record batches of the Arrow stream have rows of different widths")
    return torch.cat(parts)


def _tensor(array: np.ndarray[Any, Any]) -> Tensor:
    if array.ndim < 1:
        raise DataError("expected a list of elements; got a single number")
    if array.dtype.kind == "f" and array.dtype.itemsize > 8:
        raise DataError(f"elements are kept in 64 bits at most; got {array.dtype}")
    native = np.require(array, array.dtype.newbyteorder("="), ("C", "W", "O"))
    return torch.from_numpy(native if array.size else native.astype(np.float32))
