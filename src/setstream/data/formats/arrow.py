"""Arrow IPC: files (.arrow, .feather), where a record batch is a row group, and streams.

The framing of untrusted bytes is checked before pyarrow, which may crash on damaged input, reads them.

    stream    message ...                           the first holds the schema, each other a record batch or a dictionary
    file      ARROW1.. stream  footer  int32 size of the footer  ARROW1
    message   ffffffff  int32 size  flatbuffers table Message of that size  body

A Message names its kind and the length of its body, a record batch the buffers in that body, the footer of a file the
messages in it. Each of these numbers must stay inside the data. The values in the buffers are not checked: call
`validate(full=True)` on every batch before its values are used.
"""

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from setstream._utils.optional import need
from setstream.data.formats.file import reading
from setstream.data.formats.table import TableFile, batch_rows

MAGIC = b"ARROW1"
SCHEMA, DICTIONARY, BATCH = 1, 2, 3
MOST_MESSAGES = 4096  # messages of a stream: each takes some 100 microseconds to check, even with few rows
KINDS = {SCHEMA: "schema", DICTIONARY: "dictionary", BATCH: "record batch", 4: "tensor", 5: "sparse tensor"}
_intact: dict[Path, tuple[int, int]] = {}  # files whose framing was checked, with their size and time at that moment


def check_stream(data: Any, place: str) -> None:
    """Raise DataError unless the bytes are a schema, then record batches that take no more memory: nothing is compressed."""
    data = memoryview(data).cast("B")
    position = messages = 0
    with reading(f"{place}, as Arrow data"):  # an offset outside the data is an error of struct or numpy
        while position < len(data):
            size, start = _frame(data, position)
            if size == 0:
                break
            position = start + size + _check_message(data[start:], size, BATCH if messages else SCHEMA, plain=True)
            messages += 1
            if messages > MOST_MESSAGES:
                raise ValueError(f"it holds more than {MOST_MESSAGES} messages: write larger record batches")
        if not messages:
            raise ValueError("there is no message, expected a schema")


def check_file(data: Any, place: str) -> None:
    """Raise DataError unless the bytes are an Arrow file whose footer names existing messages. Reads no body."""
    data = memoryview(data).cast("B")
    with reading(f"{place}, as Arrow data"):  # an offset outside the data is an error of struct or numpy
        if len(data) < 20 or data[: len(MAGIC)] != MAGIC or data[-len(MAGIC) :] != MAGIC:
            raise ValueError("it does not begin and end with ARROW1, or is truncated")
        end = len(data) - len(MAGIC) - 4
        (size,) = struct.unpack_from("<i", data, end)
        if not 0 < size <= end - 8:
            raise ValueError(f"a footer of {size} bytes in {len(data)}")
        footer = data[end - size : end]
        table = _follow(footer, 0)
        for field, kind in ((2, DICTIONARY), (3, BATCH)):
            for offset, length, body in _structs(footer, _field(footer, table, field), 3):
                length &= 0xFFFFFFFF  # 32 bits, and 32 of padding
                if offset < 0 or body < 0 or offset + length + body > end - size:
                    raise ValueError(f"a {KINDS[kind]} at {offset} of {length} and {body} bytes in {len(data)}")
                message, start = _frame(data, offset)
                if start + message > offset + length or _check_message(data[start:], message, kind) != body:
                    raise ValueError(f"the {KINDS[kind]} at {offset} has another size than the footer says")


def _frame(data: memoryview, position: int) -> tuple[int, int]:
    """The size of a message's table, and where it begins. Before 0.15 there was no ffffffff."""
    if struct.unpack_from("<i", data, position) == (-1,):
        position += 4
    (size,) = struct.unpack_from("<i", data, position)
    position += 4
    if not 0 <= size <= len(data) - position:
        raise ValueError(f"a message of {size} bytes where {len(data) - position} are left")
    return size, position


def _check_message(data: memoryview, size: int, expected: int, plain: bool = False) -> int:
    """The length of a message's body, which follows the table of that size."""
    head = data[:size]
    table = _follow(head, 0)
    kind = _number(head, table, 1, "<B")
    header = _field(head, table, 2)
    if kind != expected or header is None:
        raise ValueError(f"expected a {KINDS[expected]}, got {KINDS.get(kind, 'message of an unknown kind')}")
    body = _number(head, table, 3, "<q")
    if not 0 <= body <= len(data) - size:
        raise ValueError(f"a body of {body} bytes where {len(data) - size} are left")
    if kind == SCHEMA:
        return body
    batch = _follow(head, header)
    if kind == DICTIONARY:
        batch = _follow(head, _field(head, batch, 1) or 0)
    if plain and _field(head, batch, 3) is not None:
        raise ValueError("it is compressed: write it without (IpcWriteOptions(compression=None))")
    rows = _number(head, batch, 0, "<q")
    nodes = _structs(head, _field(head, batch, 1), 2)
    buffers = _structs(head, _field(head, batch, 2), 2)
    outside = (buffers < 0).any() or (buffers[:, 0] > body - buffers[:, 1]).any()
    if rows < 0 or (nodes < 0).any() or (nodes[:, 1] > nodes[:, 0]).any() or outside:
        raise ValueError(f"the columns of a record batch are not inside its {body} bytes")
    return body


def _structs(data: memoryview, field: int | None, width: int) -> np.ndarray[Any, Any]:
    """A flatbuffers vector of structs of `width` 64-bit numbers, (n, width); empty for a missing field."""
    if field is None:
        return np.empty((0, width), np.int64)
    start = _follow(data, field)
    (count,) = struct.unpack_from("<I", data, start)
    return np.frombuffer(data, "<i8", count * width, start + 4).reshape(count, width)


def _number(data: memoryview, table: int, field: int, form: str) -> int:
    place = _field(data, table, field)
    return 0 if place is None else int(struct.unpack_from(form, data, place)[0])


def _follow(data: memoryview, place: int) -> int:
    """The target of the offset at a place."""
    (offset,) = struct.unpack_from("<I", data, place)
    return place + int(offset)


def _field(data: memoryview, table: int, number: int) -> int | None:
    """The position of a field of a flatbuffers table; None if it is missing."""
    (back,) = struct.unpack_from("<i", data, table)
    if not 0 <= table - back < len(data):
        raise ValueError("a table without its list of fields")
    (size,) = struct.unpack_from("<H", data, table - back)
    if 4 + 2 * number >= size:
        return None
    (offset,) = struct.unpack_from("<H", data, table - back + 4 + 2 * number)
    return table + offset if offset else None


class ArrowFile(TableFile):
    """An Arrow IPC file, memory-mapped."""

    suffixes = (".arrow", ".feather")
    mapped = True

    def open(self, dictionaries: list[str]) -> tuple[Any, Any, int]:
        mapped = need("pyarrow").memory_map(str(self.path))
        version = self.path.stat().st_size, self.path.stat().st_mtime_ns
        if _intact.get(self.path) != version:
            check_file(mapped.read_buffer(), str(self.path))
            _intact[self.path] = version
        file = need("pyarrow.ipc").open_file(mapped)
        return file, file.schema, file.num_record_batches

    def rows(self, group: int) -> int:
        return int(self.file.get_batch(group).num_rows)

    def _batches(self, group: int, columns: list[str]) -> Iterator[Any]:
        whole = self.file.get_batch(group).select(columns)
        whole.validate(full=True)  # offsets outside the buffers would be followed
        rows = batch_rows(whole.nbytes, whole.num_rows)
        yield from (whole.slice(start, rows) for start in range(0, whole.num_rows, rows))
