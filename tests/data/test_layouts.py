"""Folders as other programs leave them, written here by the libraries that those programs use."""

import h5py
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image

import setstream as ss
from setstream.bulk.encode import encode_sets
from setstream.data import ParquetSets
from setstream.errors import DataError

X = np.random.default_rng(0).standard_normal((50, 6)).astype(np.float32)


def write_trident(job, encoders=("uni_v1",), magnification="20x_256px_0px_overlap"):
    """A job folder of TRIDENT: thumbnails and contours, coordinates, features for each encoder; one slide is empty."""
    for pictures in ("thumbnails", "contours"):
        (job / pictures).mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (8, 8)).save(job / pictures / "s1.jpg")
    patches = job / magnification / "patches"
    patches.mkdir(parents=True)
    for slide, size in (("s1", 30), ("s2", 0)):
        with h5py.File(patches / f"{slide}_patches.h5", "w") as file:
            coords = file.create_dataset("coords", data=np.zeros((size, 2), np.int64))
            coords.attrs["patch_size"] = 256
        for encoder in encoders:
            folder = job / magnification / f"features_{encoder}"
            folder.mkdir(exist_ok=True)
            with h5py.File(folder / f"{slide}.h5", "w") as file:
                features = file.create_dataset("features", data=X[None, :size] if encoder == "batched" else X[:size])
                features.attrs["encoder"] = encoder
                file.create_dataset("coords", data=np.zeros((size, 2), np.int64))


@pytest.mark.parametrize("encoder", ["uni_v1", "batched"])
@pytest.mark.parametrize("below", ["", "20x_256px_0px_overlap"])
def test_job_folders_of_trident(tmp_path, encoder, below):
    write_trident(tmp_path / "job", [encoder])
    data = ss.data.open(tmp_path / "job" / below)
    assert [(source.id, len(source)) for source in data] == [("s1", 30), ("s2", 0)]
    np.testing.assert_array_equal(data[0].tensor().numpy(), X[:30])


def test_a_job_folder_with_several_encoders_lists_them(tmp_path):
    write_trident(tmp_path, ["uni_v1", "gigapath"])
    with pytest.raises(DataError, match="open one of 20x_256px_0px_overlap/features_gigapath, 20x.*features_uni_v1"):
        ss.data.open(tmp_path)
    assert len(ss.data.open(tmp_path / "20x_256px_0px_overlap" / "features_gigapath")) == 2


@pytest.mark.parametrize("suffix", ["npy", "h5"])
@pytest.mark.parametrize("key", ["same", "data"])
def test_parallel_folders_of_torchmil(tmp_path, suffix, key):
    def write(kind, name, array):
        (tmp_path / kind).mkdir(exist_ok=True)
        if suffix == "npy":
            np.save(tmp_path / kind / f"{name}.npy", array)
        else:
            with h5py.File(tmp_path / kind / f"{name}.h5", "w") as file:
                file[kind if key == "same" else key] = array

    for name, size, label in (("b1", 7, 1), ("b2", 0, 0)):
        write("features", name, X[:size])
        write("labels", name, np.array([label]))
        write("inst_labels", name, np.zeros(size))
        write("coords", name, np.zeros((size, 2)))
    first, second = ss.data.open(tmp_path)
    assert (first.label, second.label, len(first), len(second)) == (1, 0, 7, 0)
    np.testing.assert_array_equal(first.tensor().numpy(), X[:7])
    assert first.metadata["coords"] == tmp_path / "coords" / f"b1.{suffix}"
    assert first.metadata["inst_labels"].exists()


def write_hive(folder):
    """As pyarrow partitions a table: a folder for each set, the column left out of the files; one set is empty."""
    ids = np.array(["a", "b/c"])[np.random.default_rng(1).integers(0, 2, len(X))]
    table = pa.table({"set_id": ids, "features": pa.FixedSizeListArray.from_arrays(pa.array(X.ravel()), 6)})
    pq.write_to_dataset(table, folder, partition_cols=["set_id"])
    (folder / "set_id=none").mkdir()
    pq.write_table(table.select(["features"]).slice(0, 0), folder / "set_id=none" / "part-0.parquet")
    return {"a": X[ids == "a"], "b/c": X[ids == "b/c"], "none": X[:0]}


def test_hive_partitions(tmp_path):
    sets = write_hive(tmp_path / "sets")
    data = ss.data.open(tmp_path / "sets")
    assert sorted(data.ids) == sorted(sets)
    for source in data:
        assert (source.shape, source.dtype) == ((6,), torch.float32)
        np.testing.assert_array_equal(source.tensor().numpy(), sets[source.id])
    encoder = ss.SetEncoder(torch.nn.Linear(6, 8), ss.UMBC(8, num_slots=2)).eval()
    assert encode_sets(encoder, ParquetSets(tmp_path / "sets"), tmp_path / "out.parquet", what="representations") == 3
    rows = {row["id"]: row for row in pq.read_table(tmp_path / "out.parquet").to_pylist()}
    assert {name: row["count"] for name, row in rows.items()} == {name: len(x) for name, x in sets.items()}
    for name, x in sets.items():
        z = encoder([torch.from_numpy(x)]).flatten().detach()
        np.testing.assert_allclose(rows[name]["z"], z.numpy(), rtol=1e-4, atol=1e-5)


def test_hive_folders_that_do_not_name_their_set(tmp_path):
    write_hive(tmp_path)
    (tmp_path / "set_id=a").rename(tmp_path / "set_id=__HIVE_DEFAULT_PARTITION__")
    with pytest.raises(DataError, match="do not name its set"):
        ss.data.open(tmp_path)
