"""Sources: every format gives back what its own library wrote, whole, in ranges and at any positions; errors name the file."""

import os
import pickle

import h5py
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import zarr
from PIL import Image

import setstream as ss
from setstream._utils.prefetch import read_ahead
from setstream.data import (
    ArraySource,
    H5Source,
    ImageFolderSource,
    NpySource,
    ParquetSets,
    SetDataset,
    SetLoader,
    TorchSource,
    ZarrSource,
    open_source,
)
from setstream.errors import ConfigurationError, DataError

X = np.random.default_rng(0).standard_normal((257, 6)).astype(np.float32)


def write_npy(folder):
    np.save(folder / "a.npy", X)
    return NpySource(folder / "a.npy")


def write_clam(folder):
    with h5py.File(folder / "a.h5", "w") as file:
        file["features"], file["coords"] = X, np.arange(2 * len(X)).reshape(-1, 2)
    return H5Source(folder / "a.h5")


def write_trident(folder):
    with h5py.File(folder / "a.h5", "w") as file:
        file["features"] = X[None]
        file["coords"] = np.zeros((1, len(X), 2))
        file["features"].attrs["encoder"] = "resnet"
    return H5Source(folder / "a.h5")


def write_torch(folder):
    torch.save(torch.from_numpy(X), folder / "a.pt")
    return TorchSource(folder / "a.pt")


def write_old_torch(folder):
    torch.save(torch.from_numpy(X), folder / "a.pt", _use_new_zipfile_serialization=False)
    return TorchSource(folder / "a.pt")


def write_zarr(folder):
    zarr.save(str(folder / "a.zarr"), X)
    return ZarrSource(folder / "a.zarr")


def write_zarr_group(folder):
    group = zarr.open_group(str(folder / "a.zarr"), mode="w")
    group["features"] = X
    return ZarrSource(folder / "a.zarr")


def write_memory(folder):
    return ArraySource(X, id="a")


def table(ids, rows, listed=True):
    if listed:
        features = pa.FixedSizeListArray.from_arrays(pa.array(np.ascontiguousarray(rows).ravel()), rows.shape[1])
        return pa.table({"set_id": ids, "features": features})
    return pa.table({"set_id": ids, **{f"f{i}": rows[:, i] for i in range(rows.shape[1])}})


def scattered(folder, listed=True, arrow=False):
    """Set "a" is X, scattered among rows of other sets over two files and many row groups."""
    noise = np.zeros((300, 6), np.float32)
    place = np.sort(np.random.default_rng(1).permutation(len(X) + len(noise))[: len(X)])
    rows, ids = np.empty((len(X) + len(noise), 6), np.float32), np.full(len(X) + len(noise), "b")
    mask = np.zeros(len(rows), bool)
    mask[place] = True
    rows[mask], rows[~mask] = X, noise
    ids[mask] = "a"
    (folder / "sets").mkdir()
    for number, part in enumerate((slice(0, 333), slice(333, None))):
        made = table(ids[part], rows[part], listed)
        if arrow:
            with (
                pa.OSFile(str(folder / "sets" / f"{number}.arrow"), "wb") as sink,
                pa.ipc.new_file(sink, made.schema) as writer,
            ):
                writer.write_table(made, max_chunksize=50)
        else:
            pq.write_table(made, folder / "sets" / f"{number}.parquet", row_group_size=50)
    return ParquetSets(folder / "sets")


def write_parquet(folder):
    return scattered(folder).source("a")


def write_parquet_columns(folder):
    return scattered(folder, listed=False).source("a")


def write_arrow(folder):
    return scattered(folder, arrow=True).source("a")


WRITERS = [
    write_npy,
    write_clam,
    write_trident,
    write_torch,
    write_old_torch,
    write_zarr,
    write_zarr_group,
    write_memory,
    write_parquet,
    write_parquet_columns,
    write_arrow,
]


@pytest.fixture(params=WRITERS, ids=lambda writer: writer.__name__.removeprefix("write_"))
def source(request, tmp_path):
    return request.param(tmp_path)


def test_every_format_gives_back_what_was_written(source):
    assert (len(source), source.shape, source.dtype, source.id) == (257, (6,), torch.float32, "a")
    np.testing.assert_array_equal(source.tensor().numpy(), X)
    np.testing.assert_array_equal(source.read(40, 133).numpy(), X[40:133])
    assert source.read(5, 5).shape == (0, 6)
    index = torch.randperm(257, generator=torch.Generator().manual_seed(0))[:50]
    np.testing.assert_array_equal(source.take(index).numpy(), X[index.numpy()])
    assert len(source.take(torch.empty(0, dtype=torch.int64))) == 0


@pytest.mark.parametrize("partition", ["contiguous", "blocks", "random"])
def test_every_partition_brings_every_element_once_and_the_same_again(source, partition):
    chunks = source.chunks(31, partition, generator=torch.Generator().manual_seed(3))
    first, second = torch.cat(list(chunks)), torch.cat(list(chunks))
    assert torch.equal(first, second)
    assert len(chunks) == 9
    np.testing.assert_array_equal(np.sort(first.numpy(), axis=0), np.sort(X, axis=0))
    if partition != "contiguous":
        assert not np.array_equal(first.numpy(), X)


def test_sources_travel_to_other_processes(source):
    source.read(0, 1)
    again = pickle.loads(pickle.dumps(source))
    np.testing.assert_array_equal(again.tensor().numpy(), X)


def test_sources_work_in_the_workers_of_a_data_loader(tmp_path):
    write_clam(tmp_path)
    data = ss.data.open(tmp_path)
    loader = torch.utils.data.DataLoader(data, num_workers=2, collate_fn=lambda items: items[0].tensor())
    np.testing.assert_array_equal(next(iter(loader)).numpy(), X)


def test_clam_coordinates(tmp_path):
    assert write_clam(tmp_path).coords()[1].tolist() == [2, 3]


@pytest.mark.parametrize("shape", [(0, 6), (0,), (1, 0, 6)])
def test_empty_slides(tmp_path, shape):
    with h5py.File(tmp_path / "empty.h5", "w") as file:
        file["features"] = np.zeros(shape, np.float32)
    source = H5Source(tmp_path / "empty.h5")
    assert len(source) == 0
    assert list(source.chunks(4)) == []


def test_images(tmp_path):
    pixels = np.random.default_rng(0).integers(0, 255, (5, 8, 7, 3), dtype=np.uint8)
    for number, image in enumerate(pixels):
        Image.fromarray(image).save(tmp_path / f"{number}.png")
    source = open_source(tmp_path)
    assert isinstance(source, ImageFolderSource)
    assert (len(source), source.shape, source.dtype) == (5, (3, 8, 7), torch.uint8)
    np.testing.assert_array_equal(source.tensor().permute(0, 2, 3, 1).numpy(), pixels)
    Image.fromarray(pixels[0, :4]).save(tmp_path / "9.png")
    with pytest.raises(DataError, match=r"9.png: is \(3, 4, 7\)"):
        ImageFolderSource(tmp_path).tensor()


# -- errors -----------------------------------------------------------------------------------------------------------


def test_errors_name_file_key_and_shape(tmp_path):
    with pytest.raises(DataError, match=r"none.npy: there is no such file"):
        len(NpySource(tmp_path / "none.npy"))
    with h5py.File(tmp_path / "other.h5", "w") as file:
        file["feats"] = X
        file.create_group("features_group")
    with pytest.raises(DataError, match=r"other.h5: has no 'features'; its keys are \['feats', 'features_group'\]"):
        len(H5Source(tmp_path / "other.h5"))
    with pytest.raises(DataError, match="is a group"):
        len(H5Source(tmp_path / "other.h5", key="features_group"))
    torch.save({"a": 1}, tmp_path / "dict.pt")
    with pytest.raises(DataError, match="expected a bare tensor"):
        len(TorchSource(tmp_path / "dict.pt"))
    np.save(tmp_path / "one.npy", np.float32(1))
    torch.save(torch.tensor(1.0), tmp_path / "one.pt")
    zarr.create_array(str(tmp_path / "one.zarr"), shape=(), dtype="f4")
    with h5py.File(tmp_path / "one.h5", "w") as file:
        file["features"] = 1.0
    for path in sorted(tmp_path.glob("one.*")):
        with pytest.raises(DataError, match=rf"{path.name}: holds a single number"):
            len(open_source(path))
    for name, kind in (("cut.npy", NpySource), ("cut.h5", H5Source), ("cut.pt", TorchSource)):
        {"cut.npy": write_npy, "cut.h5": write_clam, "cut.pt": write_torch}[name](tmp_path)
        whole = (tmp_path / f"a{name[3:]}").read_bytes()
        (tmp_path / name).write_bytes(whole[: len(whole) // 3])
        with pytest.raises(DataError, match=name):
            kind(tmp_path / name).tensor()
    (tmp_path / "cut.parquet").write_bytes(b"PAR1 nothing")
    with pytest.raises(DataError, match="cut.parquet"):
        ParquetSets(tmp_path / "cut.parquet")
    with pytest.raises(DataError, match="this kind of file is not known"):
        (tmp_path / "a.xyz").write_text("")
        open_source(tmp_path / "a.xyz")


def test_parquet_says_what_is_missing(tmp_path):
    pq.write_table(pa.table({"name": ["a"], "f": [1.0]}), tmp_path / "a.parquet")
    with pytest.raises(DataError, match="has no column of set ids"):
        ParquetSets(tmp_path / "a.parquet")
    assert ParquetSets(tmp_path / "a.parquet", set_column="name").source("a").tensor().tolist() == [[1.0]]
    pq.write_table(pa.table({"set_id": ["a", None], "features": [[1.0], [2.0]]}), tmp_path / "b.parquet")
    with pytest.raises(DataError, match="1 rows have no 'set_id'"):
        ParquetSets(tmp_path / "b.parquet").ids()
    pq.write_table(pa.table({"set_id": ["a", "a"], "features": [[1.0], [2.0, 3.0]]}), tmp_path / "c.parquet")
    with pytest.raises(DataError, match="different lengths, 1 to 2"):
        ParquetSets(tmp_path / "c.parquet").source("a").tensor()
    with pytest.raises(DataError, match="no set 'z'"):
        ParquetSets(tmp_path / "c.parquet").source("z")


def test_options_that_cannot_be():
    with pytest.raises(ConfigurationError, match="unknown partition"):
        ArraySource(X).chunks(3, "sideways")
    with pytest.raises(ConfigurationError, match="chunk_size"):
        ArraySource(X).chunks(0)


def test_an_error_while_reading_ahead_reaches_the_reader_in_its_place():
    def fail():
        raise DataError("broken")

    found = []
    with pytest.raises(DataError, match="broken"):
        found.extend(read_ahead([lambda: 1, lambda: 2, fail, lambda: 3], ahead=3))


# -- datasets ---------------------------------------------------------------------------------------------------------


def test_open_recognises_what_is_there(tmp_path):
    write_npy(tmp_path)
    assert ss.data.open(tmp_path / "a.npy").ids == ["a"]
    trident = tmp_path / "job" / "features_resnet"
    trident.mkdir(parents=True)
    for name, size in (("s1", 5), ("s2", 0)):
        with h5py.File(trident / f"{name}.h5", "w") as file:
            file["features"] = X[:size]
    assert [(s.id, len(s)) for s in ss.data.open(tmp_path / "job")] == [("s1", 5), ("s2", 0)]
    bags = tmp_path / "bags"
    for kind in ("features", "labels", "coords"):
        (bags / kind).mkdir(parents=True)
    np.save(bags / "features" / "b1.npy", X[:3])
    np.save(bags / "labels" / "b1.npy", np.array([1]))
    np.save(bags / "coords" / "b1.npy", np.zeros((3, 2)))
    (bag,) = ss.data.open(bags)
    assert (bag.label, len(bag)) == (1, 3)
    assert bag.metadata["coords"].name == "b1.npy"
    scattered(tmp_path)
    assert set(ss.data.open(tmp_path / "sets").ids) == {"a", "b"}
    with pytest.raises(DataError, match="no sets were found"):
        (tmp_path / "nothing").mkdir()
        ss.data.open(tmp_path / "nothing")


def test_labels_and_splits_from_csv(tmp_path):
    data = SetDataset([ArraySource(X[:n], id=f"s{n}") for n in range(1, 7)])
    (tmp_path / "labels.csv").write_text("case_id,slide_id,label\n" + "".join(f"c,s{n},{n % 2}\n" for n in range(1, 6)))
    with pytest.raises(DataError, match=r"no label for \['s6'\]"):
        data.with_labels(tmp_path / "labels.csv")
    labelled = data.with_labels(tmp_path / "labels.csv", missing="drop")
    assert labelled.labels == [1, 0, 1, 0, 1]
    (tmp_path / "splits.csv").write_text(",train,val,test\n0,s1,s3,s5\n1,s2,,s4\n")
    splits = data.split(tmp_path / "splits.csv")
    assert {name: part.ids for name, part in splits.items()} == {"train": ["s1", "s2"], "val": ["s3"], "test": ["s5", "s4"]}
    (tmp_path / "column.csv").write_text("slide_id,split\ns1,fit\ns2,hold\ns3,fit\n")
    assert data.split(tmp_path / "column.csv")["fit"].ids == ["s1", "s3"]
    (tmp_path / "bad.csv").write_text("slide_id,colour\ns1,red\n")
    with pytest.raises(DataError, match="its columns are"):
        data.split(tmp_path / "bad.csv")
    with pytest.raises(DataError, match="no sets"):
        data.select(["s99"])
    with pytest.raises(DataError, match="more than once"):
        SetDataset([ArraySource(X, id="a"), ArraySource(X, id="a")])


def test_stratified_splits_are_fair_and_repeatable():
    data = SetDataset([ArraySource(X[:1], id=str(n), label=int(n % 5 == 0)) for n in range(100)])
    parts = data.stratified(0.6, 0.2, 0.2, seed=1)
    assert [len(part) for part in parts] == [60, 20, 20]
    assert [sum(part.labels) for part in parts] == [12, 4, 4]
    assert [part.ids for part in parts] == [part.ids for part in data.stratified(0.6, 0.2, 0.2, seed=1)]
    assert parts[0].ids != data.stratified(0.6, 0.2, 0.2, seed=2)[0].ids
    assert not set(parts[0].ids) & set(parts[1].ids)


def test_bad_sets_are_skipped_and_listed_on_request(tmp_path):
    np.save(tmp_path / "a.npy", X)
    np.save(tmp_path / "b.npy", X[:, :3])
    (tmp_path / "c.npy").write_bytes(b"junk")
    data = ss.data.open(tmp_path)
    with pytest.raises(DataError, match="c.npy"):
        data.check()
    np.save(tmp_path / "d.npy", X)
    good, problems = ss.data.open(tmp_path).check(skip_bad=True)
    assert good.ids == ["a", "d"]
    assert len(problems) == 2
    assert "c.npy" in problems[0]
    assert "b: elements are (3,); those of most sets are (6,)" in problems[1]


def test_many_files_are_not_open_at_once(tmp_path):
    before = len(os.listdir("/proc/self/fd"))
    for number in range(150):
        with h5py.File(tmp_path / f"{number:03d}.h5", "w") as file:
            file["features"] = X[: number + 1]
    data = ss.data.open(tmp_path)
    assert [len(source.tensor()) for source in data] == list(range(1, 151))
    assert len(os.listdir("/proc/self/fd")) - before <= 70
    data.check()
    assert len(os.listdir("/proc/self/fd")) - before <= 2


def test_other_byte_orders_and_types(tmp_path):
    np.save(tmp_path / "big.npy", X.astype(">f4"))
    np.testing.assert_array_equal(NpySource(tmp_path / "big.npy").tensor().numpy(), X)
    np.save(tmp_path / "text.npy", np.array([["a"], ["b"]]))
    with pytest.raises(DataError, match="torch cannot read"):
        NpySource(tmp_path / "text.npy").tensor()
    (tmp_path / "junk.pt").write_bytes(b"junk")
    with pytest.raises(DataError, match="junk.pt"):
        len(TorchSource(tmp_path / "junk.pt"))


def test_columns_that_look_like_labels_are_not_taken_for_features(tmp_path):
    pq.write_table(pa.table({"set_id": ["a"], "f": [1.0], "label": [1]}), tmp_path / "a.parquet")
    with pytest.raises(DataError, match="may be labels"):
        ParquetSets(tmp_path / "a.parquet")
    assert ParquetSets(tmp_path / "a.parquet", columns=["f"]).source("a").tensor().tolist() == [[1.0]]


@pytest.mark.parametrize("gradient", ["exact", "unbiased", "importance", "none"])
def test_the_loader_feeds_encode(tmp_path, gradient):
    sizes = (40, 0, 3, 111)
    for number, size in enumerate(sizes):
        np.save(tmp_path / f"{number}.npy", X[:size])
    torch.manual_seed(0)
    encoder = ss.SetEncoder(torch.nn.Linear(6, 8), ss.UMBC(8, num_slots=2))
    expected = {str(number): encoder(torch.from_numpy(X[None, :size].copy())) for number, size in enumerate(sizes)}
    loader = SetLoader(ss.data.open(tmp_path), batch=3, chunk_size=16, shuffle=True)
    seen = []
    for batch in loader:
        z = ss.encode(encoder, batch.sets, gradient=gradient)
        for own, name in zip(z, batch.ids, strict=True):
            torch.testing.assert_close(own, expected[name][0], rtol=1e-4, atol=1e-5)
        if gradient != "none":
            z.sum().backward()
        seen += batch.ids
    assert sorted(seen) == ["0", "1", "2", "3"]
    assert len(loader) == 2
    assert [b.ids for b in loader] != [b.ids for b in loader]  # another epoch, another order
