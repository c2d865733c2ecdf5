"""Damaged bodies, read in child processes so that a crash is seen: `python -m tests.serve.mutations 60000`.

Prints one JSON object: how many bodies were read, which signals ended a child and at which seeds, what became of the others,
the slowest of them in seconds and the largest child in bytes.
"""

import collections
import io
import json
import multiprocessing
import random
import resource
import sys
import time

import numpy as np
import pyarrow as pa

import setstream  # noqa: F401  once, before the children are made
from setstream.errors import SetstreamError
from setstream.serve.bodies import ARROW, JSON, NPY, parse_elements

X = np.random.default_rng(0).standard_normal((10, 3)).astype(np.float32)
NUMBERS = [0, 1, 2, 3, 4, 5, 8, 200, 2**15, 2**31 - 1, 2**31, 2**32 - 1]
SHARE = 2000


def npy(array):
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


def arrow(table, **options):
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema, options=pa.ipc.IpcWriteOptions(**options)) as writer:
        writer.write_table(table, max_chunksize=4)
    return sink.getvalue().to_pybytes()


def listed(array):
    return pa.table({"features": pa.FixedSizeListArray.from_arrays(pa.array(array.ravel()), array.shape[1])})


def without_schema(stream):
    return stream[8 + int.from_bytes(stream[4:8], "little") :]


def whole_bodies():
    """Bodies to begin with: most can be read."""
    columns = pa.table({"a": X[:, 0], "b": X[:, 1]})
    tables = [listed(X), columns, pa.table({"features": X.tolist()}), pa.table({"a": pa.array(["x", "y"]).dictionary_encode()})]
    found = [(ARROW, arrow(table)) for table in tables]
    found += [(ARROW, arrow(listed(X), compression=own)) for own in ("zstd", "lz4")]
    found += [(ARROW, without_schema(arrow(listed(X)))), (ARROW, arrow(listed(X), use_legacy_format=True))]
    found += [(NPY, npy(X)), (NPY, npy(X.astype(">f8"))), (JSON, json.dumps({"elements": X.tolist()}).encode())]
    return found


def mutate(body, draw):
    """A body with some bytes or words changed, cut out, put in or copied."""
    data = bytearray(body)
    for _ in range(draw.choice([1, 1, 1, 2, 3, 8])):
        place = draw.randrange(len(data) if draw.random() < 0.5 else min(len(data), 400))
        size = draw.choice([1, 4, 8, 16, 64])
        change = draw.choice(["byte", "byte", "word", "word", "cut", "put", "copy"])
        if change == "byte":
            data[place] = draw.choice([*range(6), 127, 128, 255, draw.randrange(256)])
        elif change == "word":
            data[place & ~3 : (place & ~3) + 4] = draw.choice([*NUMBERS, draw.randrange(2**32)]).to_bytes(4, "little")
        elif change == "cut":
            del data[place : place + size]
        elif change == "put":
            data[place:place] = draw.randbytes(size)
        else:
            other = draw.randrange(len(data))
            data[place : place + size] = data[other : other + size]
        data = data or bytearray(1)
    return bytes(data)


def read(seeds, kinds, pipe):
    """In a child: read the bodies of some seeds, and report each."""
    bodies = [own for own in whole_bodies() if own[0] in kinds]
    for seed in seeds:
        pipe.send((seed, None, 0.0, 0))
        draw = random.Random(seed)
        kind, body = draw.choice(bodies)
        body, began = mutate(body, draw), time.perf_counter()
        try:
            parse_elements(kind, body)
            became = "read"
        except SetstreamError as error:
            became = type(error).__name__
        except Exception as error:
            became = f"not ours: {error!r}"
        memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        pipe.send((seed, became, time.perf_counter() - began, memory))
    pipe.send(None)


def attack(count, kinds=(ARROW, NPY, JSON)):
    """Read so many damaged bodies."""
    became, signals, slowest, memory = collections.Counter(), [], 0.0, 0
    context = multiprocessing.get_context("fork")
    begin = 0
    while begin < count:
        here, there = context.Pipe(duplex=False)
        child = context.Process(target=read, args=(range(begin, min(count, begin + SHARE)), kinds, there))
        child.start()
        there.close()
        seed = begin
        try:
            while (told := here.recv()) is not None:
                seed = told[0]
                if told[1] is not None:
                    became[told[1]] += 1
                    slowest, memory = max(slowest, told[2]), max(memory, told[3])
        except EOFError:  # it died
            child.join()
            signals.append((seed, -child.exitcode))
        child.join()
        begin = seed + 1
    return {"bodies": count, "signals": signals, "became": became, "slowest": slowest, "memory": memory}


if __name__ == "__main__":
    print(json.dumps(attack(int(sys.argv[1]), sys.argv[2:] or (ARROW, NPY, JSON))))
