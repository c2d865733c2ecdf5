"""The engine `ray`: the same rows as the local engine, though workers die and sets are bad.

Two runs on a real cluster, which starts once; what needs none runs the engine without it.
"""

import os
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import setstream as ss
from setstream.bulk import encode as bulk
from setstream.bulk import ray
from setstream.bulk.encode import encode_sets
from setstream.bulk.ray import cluster
from setstream.data import NpySource, ParquetSets, SetDataset
from setstream.errors import DataError
from tests.bulk.builders import (
    SIZES,
    assert_right,
    bad_files,
    files,
    make,
    rows_of,
    write_bad_table,
    write_table,
)


@pytest.fixture(scope="module")
def ray_cluster():
    """One cluster for all tests that need a real one: it takes half a minute to start."""
    with cluster(workers=2) as workers:
        yield workers


class Mortal(nn.Module):
    """A phi whose process dies the first time that it is used."""

    def __init__(self, marker):
        super().__init__()
        self.linear, self.marker = nn.Linear(4, 8), str(marker)

    def forward(self, x):
        if not os.path.exists(self.marker):
            Path(self.marker).touch()
            os._exit(1)
        return self.linear(x)


def assert_same(local, on_ray):
    assert list(local) == list(on_ray)
    for name in local:
        assert local[name]["count"] == on_ray[name]["count"]
        np.testing.assert_allclose(local[name]["z"], on_ray[name]["z"], rtol=1e-4, atol=1e-6)


@pytest.mark.xdist_group("ray")
@pytest.mark.usefixtures("ray_cluster")
def test_files_give_the_rows_of_the_local_engine_though_a_worker_dies(tmp_path, monkeypatch):
    monkeypatch.setattr(ray, "SHARE", 64)  # a set is spread over workers
    torch.manual_seed(0)
    encoder = ss.SetEncoder(Mortal(tmp_path / "died"), ss.UMBC(8, num_slots=2, heads=2)).eval()
    options = {"what": "representations", "chunk_size": 32}
    encode_sets(encoder, files(), tmp_path / "ray.parquet", engine="ray", workers=2, **options)
    assert (tmp_path / "died").exists()
    encode_sets(encoder, files(), tmp_path / "local.parquet", **options)
    rows = rows_of(tmp_path / "ray.parquet")
    assert_same(rows_of(tmp_path / "local.parquet"), rows)
    assert {name: row["count"] for name, row in rows.items()} == SIZES
    encode_sets(make(passes=2), files(), tmp_path / "twice.parquet", engine="ray", workers=2)
    assert_right(rows_of(tmp_path / "twice.parquet"), passes=2)


@pytest.mark.xdist_group("ray")
@pytest.mark.usefixtures("ray_cluster")
def test_a_table_gives_the_rows_of_the_local_engine_and_bad_sets_are_named(tmp_path):
    """Good sets scattered over all row groups; NaN in d, a damaged row group of e, and a file that is cut off."""
    write_bad_table(tmp_path / "table")
    write_table(tmp_path / "table", prefix="s-")
    data = ParquetSets(tmp_path / "table")
    local, on_ray = [], []
    encode_sets(make(), data, tmp_path / "local.parquet", chunk_size=32, on_bad=local.append)
    encode_sets(make(), data, tmp_path / "ray.parquet", chunk_size=32, engine="ray", workers=2, on_bad=on_ray.append)
    rows = rows_of(tmp_path / "ray.parquet")
    assert_same(dict(sorted(rows_of(tmp_path / "local.parquet").items())), rows)
    assert set(rows) == {"a", "s-a", "s-b", "s-d", "s-e"}
    assert sorted(on_ray) == sorted(local)
    assert len(on_ray) == 3
    assert any("1.parquet, row group 1, set 'd'" in text and "NaN" in text for text in on_ray)
    assert any("set 'e'" in text and "2.parquet, row group 1" in text for text in on_ray)


@pytest.mark.usefixtures("without_cluster")
@pytest.mark.parametrize("passes", [1, 2])
@pytest.mark.parametrize("kind", ["files", "table"])
def test_a_killed_ray_job_goes_on_after_its_last_commit(tmp_path, monkeypatch, kind, passes):
    """It is cut off after three shares of its last pass."""
    asked, whole = [], ray.in_order

    def cut_off(workers, tasks):
        tasks = list(tasks)
        asked.append(len(tasks))
        yield from whole(workers, tasks[:3] if len(asked) == passes else tasks)
        if len(asked) == passes:
            raise KeyboardInterrupt

    monkeypatch.setattr(ray, "in_order", cut_off)
    monkeypatch.setattr(bulk, "COMMIT_SECONDS", 0)
    monkeypatch.setattr(ray, "SHARE", 64)
    data = write_table(tmp_path / "table") if kind == "table" else files()
    with pytest.raises(KeyboardInterrupt):
        encode_sets(make(passes=passes), data, tmp_path / "out.parquet", engine="ray")
    encode_sets(make(passes=passes), data, tmp_path / "out.parquet", engine="ray")
    assert asked == [asked[0]] * passes + [asked[0] - 3]  # what was committed is not done again
    rows = rows_of(tmp_path / "out.parquet")
    assert_right(rows, ("a", "b", "d", "e") if kind == "table" else tuple(SIZES), passes)
    assert list(rows) == (sorted(rows) if kind == "table" else data.ids)


@pytest.mark.usefixtures("without_cluster")
def test_ray_leaves_out_bad_files_and_names_them(tmp_path):
    (tmp_path / "cut.npy").write_bytes(b"cut off")
    data = SetDataset([*bad_files().sources, NpySource(tmp_path / "cut.npy")])
    with pytest.raises(DataError, match="cut.npy: cannot be read"):
        encode_sets(make(), data, tmp_path / "f.parquet", engine="ray")
    with pytest.raises(DataError, match="set 'd': 1 of 47 elements hold NaN"):
        encode_sets(make(), data[:2], tmp_path / "g.parquet", engine="ray")
    problems = []
    assert encode_sets(make(), data, tmp_path / "f.parquet", engine="ray", on_bad=problems.append) == 1
    assert_right(rows_of(tmp_path / "f.parquet"), ("a",))
    assert ["cut.npy" in problems[0], "set 'd': 1 of 47" in problems[1]] == [True, True]
