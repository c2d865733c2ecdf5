"""Sets, models and tables of the tests of bulk encoding."""

import random

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch import nn

import setstream as ss
from setstream.data import ArraySource, ParquetSets, SetDataset

SIZES = {"a": 300, "b": 1, "c": 0, "d": 47, "e": 120}


def make(seed=0, passes=1):
    torch.manual_seed(seed)
    phi, pool = nn.Sequential(nn.Linear(4, 8), nn.ReLU()), ss.UMBC(8, num_slots=2, heads=2)
    later = [ss.UMBC(8, num_slots=2, slots="given", activation="slot-softmax") for _ in range(1, passes)]
    pool = ss.MultiPass([pool, *later], between=[nn.Linear(8, 8) for _ in later]) if later else pool
    return ss.SetModel(ss.SetEncoder(phi, pool), nn.Linear(8, 3)).eval()


def arrays():
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(size, 4, generator=generator) for name, size in SIZES.items()}


def files():
    return SetDataset([ArraySource(x, id=name) for name, x in arrays().items()])


def write_table(folder, parts=2, prefix=""):
    """The same sets, rows of all mixed, over several files and row groups. Empty sets have no rows."""
    folder.mkdir(exist_ok=True)
    rows = [(prefix + name, row) for name, x in arrays().items() for row in x.numpy()]
    random.Random(0).shuffle(rows)
    for number in range(parts):
        part = rows[number::parts]
        features = pa.FixedSizeListArray.from_arrays(pa.array(np.concatenate([row for _, row in part])), 4)
        pq.write_table(
            pa.table({"set_id": [n for n, _ in part], "features": features}),
            folder / f"{prefix}{number}.parquet",
            row_group_size=33,
        )
    return ParquetSets(folder)


def rows_of(path):
    return {row["id"]: row for row in pq.read_table(path).to_pylist()}


def assert_right(rows, names=tuple(SIZES), passes=1):
    model = make(passes=passes)
    assert set(rows) == set(names)
    for name in names:
        z = model.encoder([arrays()[name]])
        assert rows[name]["count"] == SIZES[name]
        np.testing.assert_allclose(rows[name]["z"], z.flatten().detach().numpy(), rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(rows[name]["y"], model.head(z).flatten().detach().numpy(), rtol=1e-4, atol=1e-5)


def write_bad_table(folder):
    """Sets a, d, e in three files of two row groups each: NaN in d; in the third, one row group's features are damaged."""
    folder.mkdir()
    for number, name in enumerate(("a", "d", "e")):
        x = arrays()[name].clone()
        if name == "d":
            x[30] = float("nan")
        features = pa.FixedSizeListArray.from_arrays(pa.array(x.numpy().ravel()), 4)
        path = folder / f"{number}.parquet"
        options = {"use_dictionary": ["set_id"], "compression": "NONE", "write_statistics": False}
        pq.write_table(
            pa.table({"set_id": [name] * len(x), "features": features}), path, row_group_size=(len(x) + 1) // 2, **options
        )
    start = pq.ParquetFile(path).metadata.row_group(1).column(1).data_page_offset
    content = bytearray(path.read_bytes())
    content[start : start + 8] = b"\xff" * 8  # the header of a page
    path.write_bytes(content)
    (folder / "3.parquet").write_bytes(b"PAR1 cut off")
    return ParquetSets(folder)


def bad_files():
    x = arrays()
    bad = x["d"].clone()
    bad[30] = float("nan")
    return SetDataset([ArraySource(x["a"], id="a"), ArraySource(bad, id="d")])
