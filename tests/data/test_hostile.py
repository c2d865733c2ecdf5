"""Files that are damaged or written to harm: an error that names the file, never a crash, never another file's content."""

import json
import os
import pickle
import random
import struct
import warnings

import h5py
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import zarr
from PIL import Image

import setstream as ss
from setstream.data import (
    H5Source,
    ImageFolderSource,
    NpySource,
    ParquetSets,
    SetDataset,
    TorchSource,
    ZarrSource,
    table_sets,
)
from setstream.data.formats import table as table_format
from setstream.data.images import celeba, pictures
from setstream.data.recognise import open_sets
from setstream.data.slides import read_grid
from setstream.errors import ConfigurationError, DataError

X = np.random.default_rng(0).standard_normal((64, 6)).astype(np.float32)
IDS = np.repeat(["a", "b"], 32)
MUTATIONS = 120


def fixed(rows):
    return pa.FixedSizeListArray.from_arrays(pa.array(rows.ravel()), rows.shape[1])


def write_arrow(path, table, compression=None):
    options = pa.ipc.IpcWriteOptions(compression=compression)
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, table.schema, options=options) as writer:
        writer.write_table(table, max_chunksize=24)


def write_all(kind, folder):
    """Some files of a kind, written in different ways."""
    listed = pa.table({"set_id": pa.array(IDS).dictionary_encode(), "features": [row.tolist() for row in X]})
    plain = pa.table({"set_id": IDS, "features": fixed(X)})
    if kind == "arrow":
        for number, (table, compression) in enumerate([(plain, None), (listed, None), (plain, "zstd"), (listed, "lz4")]):
            write_arrow(folder / f"{number}.arrow", table, compression)
    elif kind == "parquet":
        pq.write_table(plain, folder / "0.parquet", row_group_size=24)
        pq.write_table(listed, folder / "1.parquet", compression="zstd")
    elif kind == "h5":
        for name, options in (("0", {}), ("1", {"chunks": (16, 6), "compression": "gzip"})):
            with h5py.File(folder / f"{name}.h5", "w") as file:
                file.create_dataset("features", data=X, **options)
                file["coords"] = np.zeros((64, 2))
    elif kind == "npy":
        np.save(folder / "0.npy", X)
        np.save(folder / "1.npy", np.asfortranarray(X))
    elif kind == "pt":
        torch.save(torch.from_numpy(X), folder / "0.pt")
        torch.save(torch.from_numpy(X), folder / "1.pt", _use_new_zipfile_serialization=False)
    else:
        for suffix in ("png", "jpg", "tif", "webp"):
            Image.fromarray(np.random.default_rng(0).integers(0, 255, (8, 7, 3), np.uint8)).save(folder / f"0.{suffix}")
    return sorted(folder.iterdir())


def mutated(data, rng):
    """The bytes with some of them changed, mostly at the ends, where formats say what is there."""
    data = bytearray(data)
    if rng.random() < 0.15:
        return bytes(data[: rng.randrange(len(data))])
    for _ in range(rng.choice((1, 1, 2, 8))):
        place = rng.choice(
            (rng.randrange(len(data)), rng.randrange(min(len(data), 700)), -1 - rng.randrange(min(len(data), 1200)))
        )
        place %= len(data)
        number = rng.choice((0, 1, -1, 2**31 - 1, -(2**31), 2**30, 255))
        data[place : place + 4] = rng.choice(
            (bytes([rng.randrange(256)]) + data[place + 1 : place + 4], struct.pack("<i", number))
        )
    return bytes(data)


def fail(name, reason):
    raise DataError(f"{name}: {reason}")


def read_everything(path):
    if path.suffix in (".arrow", ".parquet"):
        for block in ParquetSets(path).blocks(0, 16, 0, fail):
            if isinstance(block.elements, DataError):
                raise block.elements
    for source in open_sets(path.parent if path.suffix in ImageFolderSource.SUFFIXES else path):
        for chunk in source.chunks(16):
            chunk.double().sum()
        if isinstance(source, H5Source):
            source.coords()
        source.close()


def attack(kind, folder, seed):
    """Read mutated files; gives what went wrong otherwise than with a DataError that names the file."""
    files = write_all(kind, folder)
    wrong = []
    for number in range(MUTATIONS):
        rng = random.Random(seed + number)
        original = files[number % len(files)]
        path = folder / str(number) / f"damaged{original.suffix}"
        path.parent.mkdir()
        path.write_bytes(mutated(original.read_bytes(), rng))
        try:
            read_everything(path)
        except DataError as error:
            if str(path) not in str(error):
                wrong.append(f"{number}: does not name the file: {error}")
        except Exception as error:
            wrong.append(f"{number}: {type(error).__name__}: {error}")
    return wrong


@pytest.mark.parametrize("kind", ["arrow", "parquet", "h5", "npy", "pt", "images"])
def test_damaged_files_are_errors_that_name_them(tmp_path, kind):
    """In a child process, as what is looked for ends processes."""
    child = os.fork()
    if child == 0:
        warnings.simplefilter("ignore")
        try:
            wrong = attack(kind, tmp_path, seed=0)
        except BaseException as error:
            wrong = [repr(error)]
        (tmp_path / "wrong.json").write_text(json.dumps(wrong))
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert not os.WIFSIGNALED(status), f"died of signal {os.WTERMSIG(status)}"
    assert json.loads((tmp_path / "wrong.json").read_text()) == []


# -- files that name others -------------------------------------------------------------------------------------------


def secret(folder):
    with h5py.File(folder / "secret.h5", "w") as file:
        file["features"] = file["coords"] = X
        file["coords"].attrs.update({"patch_size": 4, "patch_size_level0": 4})
    X.tofile(folder / "secret.bin")
    return folder / "secret.h5"


def external_link(file, key, folder):
    file[key] = h5py.ExternalLink(str(secret(folder)), "features")


def soft_link_to_external(file, key, folder):
    file["elsewhere"] = h5py.ExternalLink(str(secret(folder)), "/")
    file[key] = h5py.SoftLink("/elsewhere/features")


def external_storage(file, key, folder):
    secret(folder)
    file.create_dataset(key, X.shape, "f4", external=[(str(folder / "secret.bin"), 0, X.nbytes)])


def virtual(file, key, folder):
    layout = h5py.VirtualLayout(X.shape, "f4")
    layout[:] = h5py.VirtualSource(secret(folder), "features", X.shape)
    file.create_virtual_dataset(key, layout)


@pytest.mark.parametrize("write", [external_link, soft_link_to_external, external_storage, virtual])
def test_hdf5_that_leads_to_other_files_is_not_followed(tmp_path, write):
    (tmp_path / "sets").mkdir()
    with h5py.File(tmp_path / "sets" / "a.h5", "w") as file:
        write(file, "features", tmp_path)
        write(file, "coords", tmp_path) if write is not soft_link_to_external else None
    for read in (
        lambda: ss.data.open(tmp_path / "sets")[0].tensor(),
        lambda: H5Source(tmp_path / "sets" / "a.h5").coords(),
        lambda: read_grid(tmp_path / "sets" / "a.h5"),
    ):
        with pytest.raises(DataError, match=r"a\.h5: .*(not read|has no 'coords')"):
            read()
    _, problems = ss.data.open(tmp_path / "sets").check(skip_bad=True)
    assert len(problems) == 1


def test_hdf5_groups_that_are_links_are_not_followed(tmp_path):
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["group"] = h5py.ExternalLink(str(secret(tmp_path)), "/")
        file.create_group("own")["features"] = X
    with pytest.raises(DataError, match=r"a\.h5: 'group/features' is a link"):
        H5Source(tmp_path / "a.h5", key="group/features").tensor()
    assert torch.equal(H5Source(tmp_path / "a.h5", key="own/features").tensor(), torch.from_numpy(X))


def test_labels_of_torchmil_that_are_links_are_not_followed(tmp_path):
    for name in ("features", "labels"):
        (tmp_path / name).mkdir()
    np.save(tmp_path / "features" / "a.npy", X)
    with h5py.File(tmp_path / "labels" / "a.h5", "w") as file:
        external_link(file, "labels", tmp_path)
    with pytest.raises(DataError, match=r"a\.h5: 'labels' is a link"):
        ss.data.open(tmp_path)


def test_links_out_of_a_zarr_folder_are_not_followed(tmp_path):
    zarr.save(str(tmp_path / "a.zarr"), X, zarr_format=2)
    X.tofile(tmp_path / "secret.bin")
    about = json.loads((tmp_path / "a.zarr" / ".zarray").read_text()) | {"compressor": None}
    (tmp_path / "a.zarr" / ".zarray").write_text(json.dumps(about))
    (tmp_path / "a.zarr" / "0.0").unlink()
    (tmp_path / "a.zarr" / "0.0").symlink_to(tmp_path / "secret.bin")
    with pytest.raises(DataError, match=r"a\.zarr: 0\.0 is a link"):
        ZarrSource(tmp_path / "a.zarr").tensor()


def test_names_in_celebas_list_are_no_paths(tmp_path):
    (tmp_path / "img_align_celeba").mkdir()
    Image.fromarray(np.zeros((218, 178, 3), np.uint8)).save(tmp_path / "secret.jpg")
    (tmp_path / "list_eval_partition.txt").write_text("../secret.jpg 0\n../secret.jpg 1\n../secret.jpg 2\n")
    with pytest.raises(DataError, match=r"names of files in img_align_celeba/, not paths like '../secret.jpg'"):
        celeba(tmp_path)


# -- code and bombs ---------------------------------------------------------------------------------------------------


class Harm:
    """Unpickled, it makes a file."""

    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return os.mkdir, (self.path,)


def test_pickled_code_is_not_run(tmp_path):
    mark = tmp_path / "ran"
    np.save(tmp_path / "a.npy", np.array([Harm(mark)], dtype=object), allow_pickle=True)
    torch.save(Harm(mark), tmp_path / "a.pt")
    zarr.save(str(tmp_path / "a.zarr"), X, zarr_format=2)
    about = json.loads((tmp_path / "a.zarr" / ".zarray").read_text())
    for dtype, filters in (("<f4", None), ("|O", [{"id": "vlen-utf8"}])):
        about |= {"compressor": {"id": "pickle", "protocol": 5}, "dtype": dtype, "filters": filters, "fill_value": None}
        (tmp_path / "a.zarr" / ".zarray").write_text(json.dumps(about))
        (tmp_path / "a.zarr" / "0.0").write_bytes(pickle.dumps(Harm(mark)))
        for source in (NpySource(tmp_path / "a.npy"), TorchSource(tmp_path / "a.pt"), ZarrSource(tmp_path / "a.zarr")):
            with pytest.raises(DataError, match=source.path.name):
                source.tensor()
    assert not mark.exists()


def test_arrays_that_declare_more_than_they_store(tmp_path):
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file.create_dataset("features", (4, 2**34), "f4", chunks=(1, 2**20))
    zarr.create_array(str(tmp_path / "a.zarr"), shape=(4, 2**34), chunks=(1, 2**20), dtype="f4")
    for source in (H5Source(tmp_path / "a.h5"), ZarrSource(tmp_path / "a.zarr")):
        with pytest.raises(DataError, match=r"a\.(h5|zarr): declares 274,877,906,944 bytes"):
            source.read(0, 1)
    with h5py.File(tmp_path / "zeros.h5", "w") as file:  # much compressed, but whole
        file.create_dataset("features", data=np.zeros((2**18, 80), np.float32), chunks=(2**14, 80), compression="gzip")
    assert len(H5Source(tmp_path / "zeros.h5")) == 2**18


def test_torch_tensors_that_are_no_arrays(tmp_path):
    torch.save(torch.eye(3).to_sparse(), tmp_path / "a.pt")
    with pytest.raises(DataError, match=r"a\.pt: expected a dense tensor"):
        TorchSource(tmp_path / "a.pt").tensor()


def test_images_with_too_many_pixels(tmp_path, monkeypatch):
    for name in ("train", "test"):
        (tmp_path / name).mkdir()
        Image.fromarray(np.zeros((64, 64, 3), np.uint8)).save(tmp_path / name / "a.png")
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 1000)
    with pytest.raises(DataError, match=r"a\.png: .*decompression bomb"):
        ImageFolderSource(tmp_path / "train").tensor()
    with pytest.raises(DataError, match=r"a\.png: .*decompression bomb"):
        pictures(tmp_path, 8)
    kept, problems = ss.data.open(tmp_path).check(skip_bad=True)
    assert (len(kept), len(problems)) == (0, 2)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"id,label\na,1\nb\n", "row 2 after the header has no 'label'"),
        (b"id,label\na," + b"1" * 200_000 + b"\n", "field larger than field limit"),
        (b"id,label\n\xff\xfe,1\n", "codec can't decode"),
    ],
)
def test_tables_of_labels_that_are_damaged(tmp_path, content, message):
    (tmp_path / "labels.csv").write_bytes(content)
    with pytest.raises(DataError, match=rf"labels\.csv: .*{message}"):
        SetDataset([ss.data.ArraySource(X, id="a")]).with_labels(tmp_path / "labels.csv")


@pytest.mark.parametrize("size", [0, -1, 10**6, "many"])
def test_grids_that_cannot_be(tmp_path, size):
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["coords"] = np.zeros((3, 2))
        file["coords"].attrs.update({"patch_size": size, "patch_size_level0": 256})
    with pytest.raises(DataError, match=r"a\.h5: "):
        read_grid(tmp_path / "a.h5")


# -- tables -----------------------------------------------------------------------------------------------------------


def test_what_a_table_keeps_is_bounded_for_all_of_its_sets(tmp_path, monkeypatch):
    monkeypatch.setattr(table_format, "KEPT_BYTES", 40_000)
    monkeypatch.setattr(table_sets, "PIECE_BYTES", 1000)
    rows = np.random.default_rng(0).standard_normal((20_000, 6)).astype(np.float32)
    names = np.repeat([f"s{n}" for n in range(20)], 1000)
    pq.write_table(pa.table({"set_id": names, "features": fixed(rows)}), tmp_path / "t.parquet")
    data = ss.data.open(tmp_path / "t.parquet")
    for _ in range(2):
        for number, source in enumerate(data):
            found = torch.cat(list(source.chunks(64)))
            np.testing.assert_array_equal(found.numpy(), rows[1000 * number : 1000 * (number + 1)])
            index = torch.randperm(1000)[:50]
            np.testing.assert_array_equal(source.take(index).numpy(), found[index].numpy())
    kept = data[0].sets.kept
    assert sum(piece.nbytes for piece in kept.pieces.values()) <= kept.bytes <= 40_000
    assert len(kept.readers) <= table_format.OPEN_READERS


def test_a_set_in_one_large_row_group_is_decoded_once(tmp_path, monkeypatch):
    """Chunk by chunk, though it does not fit what is kept."""
    monkeypatch.setattr(table_format, "KEPT_BYTES", 40_000)
    monkeypatch.setattr(table_sets, "PIECE_BYTES", 10_000)
    monkeypatch.setattr(table_format, "BATCH_BYTES", 1)
    rows = np.random.default_rng(0).standard_normal((20_480, 6)).astype(np.float32)
    pq.write_table(pa.table({"set_id": ["a"] * len(rows), "features": fixed(rows)}), tmp_path / "t.parquet")
    source = ss.data.open(tmp_path / "t.parquet")[0]
    source.shape  # noqa: B018 - reads one batch
    decoded = []
    features = table_sets.row_features
    monkeypatch.setattr(table_sets, "row_features", lambda *args: decoded.append(1) or features(*args))
    np.testing.assert_array_equal(torch.cat(list(source.chunks(100))).numpy(), rows)
    assert len(decoded) == 20


@pytest.mark.parametrize("compression", ["NONE", "zstd"])
def test_parquet_pages_that_declare_more_than_the_file_holds(tmp_path, compression):
    """The header of a page declares 2 GiB: nothing of that size is allocated."""
    path = tmp_path / "t.parquet"
    pq.write_table(pa.table({"set_id": IDS, "features": fixed(X)}), path, use_dictionary=["set_id"], compression=compression)
    whole, pool = path.read_bytes(), pa.default_memory_pool()
    for column, page in ((0, "dictionary_page_offset"), (1, "data_page_offset")):
        start = getattr(pq.ParquetFile(path).metadata.row_group(0).column(column), page)
        header = b"\x15\x00\x15\x00\x15\xfe\xff\xff\xff\x0f\x00"  # type 0, 0 bytes uncompressed, 2^31 - 1 compressed
        damaged = whole[:start] + header + whole[start + len(header) :]
        (tmp_path / "damaged.parquet").write_bytes(damaged)
        before = pool.max_memory()
        with pytest.raises(DataError, match=r"damaged\.parquet, row group 0: cannot be read"):
            ss.data.open(tmp_path / "damaged.parquet")[0].tensor()
        assert pool.max_memory() - before < 2**28


def test_open_takes_the_columns_of_tables(tmp_path):
    table = pa.table({"who": ["a", "a", "b"], "f0": [1.0, 2.0, 3.0], "f1": [4.0, 5.0, 6.0], "label": [0, 0, 1]})
    pq.write_table(table, tmp_path / "t.parquet")
    with pytest.raises(DataError, match=r"name the feature columns \(columns="):
        ss.data.open(tmp_path / "t.parquet", set_column="who")
    data = ss.data.open(tmp_path / "t.parquet", set_column="who", columns=["f1", "f0"])
    assert {source.id: source.tensor().tolist() for source in data} == {"a": [[4.0, 1.0], [5.0, 2.0]], "b": [[6.0, 3.0]]}
    with pytest.raises(ConfigurationError, match="columns is a list of names"):
        ss.data.open(tmp_path / "t.parquet", set_column="who", columns="f1")
    np.save(tmp_path / "a.npy", X)
    with pytest.raises(ConfigurationError, match="are options of Parquet and Arrow tables"):
        ss.data.open(tmp_path / "a.npy", columns=["f1"])


def test_an_image_that_claims_more_than_it_stores_is_not_decoded(tmp_path):
    """A header says 9,000 x 9,000 pixels, and a few bytes follow: hundreds of MB before anybody would notice."""
    Image.new("RGB", (8, 8)).save(tmp_path / "a.tif")
    content = bytearray((tmp_path / "a.tif").read_bytes())
    for tag in (256, 257):  # width and height: tag, type, count, value
        place = next(
            at for at in range(0, len(content) - 12, 2) if struct.unpack_from("<HHI", content, at) in ((tag, 3, 1), (tag, 4, 1))
        )
        struct.pack_into("<HHII", content, place, tag, 4, 1, 9000)
    (tmp_path / "a.tif").write_bytes(content)
    assert Image.open(tmp_path / "a.tif").size == (9000, 9000)
    with pytest.raises(DataError, match=r"a\.tif: declares 243,000,000 bytes"):
        ss.data.open(tmp_path)[0].tensor()
