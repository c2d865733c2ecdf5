"""Elements from bodies: what comes in is what was sent, and nothing that lies gets through."""

import contextlib
import json
import struct
import subprocess
import sys
import tracemalloc

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from setstream.errors import DataError
from setstream.serve.answers import TooManyElements
from setstream.serve.bodies import ARROW, JSON, NPY, parse_elements
from tests.serve.mutations import X, arrow, listed, npy, without_schema


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        (JSON, json.dumps({"elements": X.tolist()}).encode()),
        (NPY, npy(X)),
        (NPY, npy(np.asfortranarray(X))),
        (NPY, npy(X.astype(">f8"))),
        (ARROW, arrow(listed(X))),
        (ARROW, arrow(pa.table({"a": X[:, 0], "b": X[:, 1], "c": X[:, 2]}))),
        (ARROW, arrow(pa.table({"features": X.tolist()}))),
    ],
    ids=["json", "npy", "npy by columns", "npy big-endian", "arrow", "arrow columns", "arrow lists"],
)
def test_every_kind_gives_the_same_elements(kind, body):
    np.testing.assert_array_equal(parse_elements(kind, body).float().numpy(), X)


def test_no_elements_and_whole_numbers():
    assert parse_elements(JSON, b'{"elements": []}').shape[0] == 0
    assert parse_elements(JSON, b'{"elements": [1, 2]}').dtype == torch.int64
    assert parse_elements(NPY, npy(np.zeros((0, 3)))).shape == (0, 3)


def test_json_is_read_in_pieces_as_it_is_whole():
    draw = np.random.default_rng(1)
    for shape in [(9000,), (5000, 3), (700, 2, 5)]:
        for values in (draw.integers(-(2**62), 2**62, shape), draw.standard_normal(shape), np.zeros(shape, int)):
            for indent in (None, 1):
                body = json.dumps({"elements": values.tolist()}, indent=indent).encode()
                found = parse_elements(JSON, body).numpy()
                np.testing.assert_array_equal(found, values)
                assert found.dtype == values.dtype
    mixed = parse_elements(JSON, b'{"elements": [%s, 0.5]}' % b",".join([b"1"] * 20_000))
    assert mixed.dtype == torch.float64
    assert mixed.sum() == 20_000.5


def test_text_among_numbers_takes_no_memory():
    body = json.dumps({"elements": ["a" * 20_000, *[0] * 25_000]}).encode()
    tracemalloc.start()
    try:
        with pytest.raises(DataError, match="numbers"):
            parse_elements(JSON, body)
        assert tracemalloc.get_traced_memory()[1] < 2**20
    finally:
        tracemalloc.stop()


def test_a_body_of_many_short_lists_is_parsed_in_little_memory():
    body = b'{"elements": [%s]}' % b",".join([b"[1]"] * 50_000)
    tracemalloc.start()
    try:
        assert parse_elements(JSON, body).shape == (50_000, 1)
        with pytest.raises(TooManyElements, match="at most 10 elements; this one has 4"):  # of the first piece: no more is read
            parse_elements(JSON, body, 10)
        assert tracemalloc.get_traced_memory()[1] < 10 * len(body)
    finally:
        tracemalloc.stop()


def promised(shape, data=b""):
    """An .npy file of version 2 whose header says that it has this shape."""
    header = f"{{'descr': '<f4', 'fortran_order': False, 'shape': {shape}, }}\n".encode()
    return b"\x93NUMPY\x02\x00" + struct.pack("<I", len(header)) + header + data


def lying_npy():
    body = npy(X)
    return body.replace(b"(10, 3)", b"(99, 3)")


@pytest.mark.parametrize(
    ("kind", "body", "message"),
    [
        (JSON, b"", "not valid JSON"),
        (JSON, b"[" * 100_000, "not valid JSON"),
        (JSON, b"[[1, 2]]", "expected an object"),
        (JSON, b'{"elements": [[1], [1, 2]]}', "one shape"),
        (JSON, b'{"elements": [["a"]]}', "numbers"),
        (JSON, b'{"elements": [[nul]]}', "valid JSON"),
        (JSON, b'{"elements": [[true]]}', "numbers"),
        (JSON, b'{"elements": [[%s]]}' % (b"9" * 400), "numbers"),
        (JSON, b'{"elements": [[%s]]}' % (b"9" * 5000), "not valid JSON"),
        (JSON, b'{"elements": %s1%s}' % (b"[" * 70, b"]" * 70), "elements"),
        (JSON, b'{"elements": [], "more": 1}', "expected an object"),
        (JSON, b'{"elements": [1], "elements": [2]}', "numbers"),
        (JSON, b'{"elements": [1 2]}', "not valid JSON"),
        (JSON, b'{"elements": [1, [2]]}', "numbers"),
        (JSON, b'{"elements": [%s]}' % b",".join([b"1"] * 20_000 + [b""]), "not valid JSON"),
        (JSON, b'{"elements": [%s]}' % b",".join([b"[1]"] * 20_000 + [b"[1, 2]"]), "one shape"),
        (JSON, b'{"elements": [9223372036854775808]}', "64 bits"),
        (JSON, '{"elements": [[1.0]]}'.encode("utf-16"), "not valid JSON"),
        (NPY, b"", "not an .npy"),
        (NPY, npy(X)[:-1], "declares"),
        (NPY, npy(X) + b"0", "declares"),
        (NPY, lying_npy(), "declares"),
        (NPY, promised(f"({2**70}, 0)"), "axes"),
        (NPY, promised("(0, 999999, 999999, 999)"), "declares"),
        (NPY, promised(f"({'1,' * 65})", b"1234"), "axes"),
        (NPY, promised("(True, 3)", bytes(12)), "axes"),
        (NPY, promised("(1000000000000, 3)"), "declares"),
        (NPY, npy(np.array([{"a": 1}], dtype=object)), "numbers"),
        (NPY, npy(np.array(["text"])), "numbers"),
        (NPY, npy(np.array([1j])), "numbers"),
        (NPY, npy(np.float32(1.0)), "single number"),
        (ARROW, b"", "expected a schema"),
        (ARROW, b"text that is no Arrow", "Arrow"),
        (ARROW, arrow(listed(X))[:200], "Arrow"),
        (ARROW, arrow(listed(np.zeros((10_000, 3))), compression="zstd"), "compressed"),
        (ARROW, arrow(listed(np.zeros((10_000, 3))), compression="lz4"), "compressed"),
        (ARROW, arrow(pa.table({"a": ["x"]})), "numbers"),
        (ARROW, arrow(pa.table({"a": [1.0, None]})), "empty"),
        (ARROW, arrow(pa.table({"a": pa.array(["x", "x"]).dictionary_encode()})), "dictionary"),
    ],
)
def test_what_cannot_be_read_is_refused_with_a_reason(kind, body, message):
    with pytest.raises(DataError, match=message):
        parse_elements(kind, body)


@given(st.sampled_from([NPY, ARROW]), st.data())
def test_damaged_bodies_never_fail_otherwise(kind, data):
    body = bytearray(npy(X) if kind == NPY else arrow(listed(X)))
    for _ in range(data.draw(st.integers(1, 8))):
        body[data.draw(st.integers(0, len(body) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(DataError):
        parse_elements(kind, bytes(body[: data.draw(st.integers(0, len(body)))]))


def test_a_header_that_ends_in_an_open_bracket_is_refused():
    body = npy(X).replace(b"(10, 3)", b"(10, (\0")
    with pytest.raises(DataError, match=r"not an \.npy file"):
        parse_elements(NPY, body)


def test_a_header_that_promises_terabytes_takes_no_memory():
    body = npy(X).replace(b"(10, 3)", b"(9**9,)")
    with pytest.raises(DataError):
        parse_elements(NPY, body)


def test_no_damaged_body_ends_the_process():
    """A stream that does not begin with its schema was the end of the server (signals 6 and 11)."""
    command = [sys.executable, "-m", "tests.serve.mutations", "3000", ARROW, NPY]
    found = json.loads(subprocess.run(command, capture_output=True, text=True, check=True, timeout=300).stdout)
    assert found["signals"] == []
    assert set(found["became"]) <= {"read", "DataError"}
    assert sum(found["became"].values()) == found["bodies"] == 3000
    assert found["memory"] < 2**30


@pytest.mark.parametrize("first", ["record batch", "dictionary"])
def test_a_stream_that_does_not_begin_with_a_schema(first):
    table = listed(X) if first == "record batch" else pa.table({"a": pa.array(["x", "x"]).dictionary_encode()})
    with pytest.raises(DataError, match=f"expected a schema, got {first}"):
        parse_elements(ARROW, without_schema(arrow(table)))
