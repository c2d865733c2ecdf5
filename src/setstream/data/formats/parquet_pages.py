"""Headers of Parquet pages, checked before pyarrow, which allocates what they declare, reads the pages.

    column chunk   page ...             dictionary_page_offset or data_page_offset, and total_compressed_size, in the footer
    page           header  content      the content has the header's compressed size
    header         1: type  2: uncompressed size  3: compressed size  ...          a struct in Thrift's compact protocol

A damaged header may declare 2 GiB. A page has about a megabyte, so there are few headers to read.
"""

from contextlib import suppress
from typing import BinaryIO

from setstream.data.formats.file import LARGEST_RATIO, SMALL_BYTES

UNCOMPRESSED_SIZE, COMPRESSED_SIZE = 2, 3
# Bytes that are read for a header: with statistics it may be long. pyarrow allows 16 MiB.
HEADER_BYTES = (2**9, 2**14, 2**24)
# Old writers do not count the header of a dictionary page in the size of the column chunk.
UNCOUNTED = 100
# Thrift's compact types by number.
TRUE, FALSE, BYTE, SHORT, INT, LONG, DOUBLE, BINARY, STRUCT = 1, 2, 3, 4, 5, 6, 7, 8, 12
# Structs in a header lie at most two deep in each other.
DEEPEST = 4


def check_pages(file: BinaryIO, start: int, size: int) -> None:
    """Raise ValueError if a page of the column chunk at `start` declares more bytes than the chunk can hold."""
    position, stop = start, start + size
    while position < stop:
        numbers, position = _header(file, position)
        compressed, uncompressed = (numbers.get(field, -1) for field in (COMPRESSED_SIZE, UNCOMPRESSED_SIZE))
        left = stop + UNCOUNTED - position
        if not 0 <= compressed <= left or not 0 <= uncompressed <= max(SMALL_BYTES, LARGEST_RATIO * compressed):
            raise ValueError(f"a page declares {compressed:,} bytes, {uncompressed:,} uncompressed, where {left:,} are left")
        position += compressed


def _header(file: BinaryIO, position: int) -> tuple[dict[int, int], int]:
    """The numbers of the page header at a position, by their field, and the position after it."""
    for size in HEADER_BYTES:
        file.seek(position)
        data = file.read(size)
        with suppress(IndexError):  # it is longer
            numbers: dict[int, int] = {}
            return numbers, position + _skip_struct(data, 0, numbers, 0)
    raise ValueError("the header of a page is cut off")


def _skip_struct(data: bytes, position: int, numbers: dict[int, int], depth: int) -> int:
    """The position after a struct, whose numbers go into `numbers`."""
    if depth > DEEPEST:
        raise ValueError("the header of a page is damaged: its structs are too deep")
    field = 0
    while head := data[position]:
        position += 1
        step, kind = head >> 4, head & 15
        if step:
            field += step
        else:
            field, position = _number(data, position)
        if kind in (SHORT, INT, LONG):
            numbers[field], position = _number(data, position)
        elif kind in (BYTE, DOUBLE):
            position += 1 if kind == BYTE else 8
        elif kind == BINARY:
            size, position = _varint(data, position)
            position += size
        elif kind == STRUCT:
            position = _skip_struct(data, position, {}, depth + 1)
        elif kind not in (TRUE, FALSE):
            raise ValueError(f"the header of a page is damaged: it has a field of type {kind}")
    return position + 1


def _number(data: bytes, position: int) -> tuple[int, int]:
    """A whole number whose last bit is its sign, and the position after it."""
    value, position = _varint(data, position)
    return (value >> 1) ^ -(value & 1), position


def _varint(data: bytes, position: int) -> tuple[int, int]:
    """Seven bits of each byte, until one has no eighth bit; and the position after it."""
    value = shift = 0
    while data[position] >= 128:
        value |= (data[position] & 127) << shift
        position, shift = position + 1, shift + 7
        if shift > 63:
            raise ValueError("the header of a page is damaged: it has a number of more than 64 bits")
    return value | data[position] << shift, position + 1
