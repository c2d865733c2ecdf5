"""`setstream slides`: patches, features, heat maps, Camelyon16's labels."""

import csv
import json
import tracemalloc

import h5py
import numpy as np
import pyarrow.parquet
import pytest
import torch
from PIL import Image
from torch import nn
from typer.testing import CliRunner

import setstream as ss
from setstream.cli.commands import app
from setstream.data.slides import Grid, write_scores, write_slide
from setstream.data.slides.source import COLOURS as SCALE
from setstream.errors import ConfigurationError, DataError, ShapeError
from setstream.tasks.loading import open_model
from setstream.tasks.mil.attribution import element_scores
from setstream.tasks.mil.models import MODELS
from setstream.training import Task, TrainConfig, Trainer
from tests.data.slide_pictures import tissue_picture

COLOURS = "tests.data.slide_pictures:Colours"
FOLDER = "20x_32px_0px_overlap"


def call(*arguments):
    """The output of a command that succeeds; what it raised, raised here."""
    done = CliRunner().invoke(app, ["slides", *map(str, arguments)])
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    assert done.exit_code == 0, done.output
    return " ".join(done.output.split())


def reads_features():
    """A model on the six features of Colours."""
    torch.manual_seed(0)
    return MODELS["umbc+set-transformer"](in_dim=6, widths=[16], num_slots=4, two_stream=True)


def reads_patches():
    """A model that reads the pixels itself."""
    torch.manual_seed(0)
    phi = nn.Sequential(nn.Conv2d(3, 8, 8, stride=8), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    model = MODELS["umbc+set-transformer"](in_dim=8, widths=[16], num_slots=4)
    model.encoder.phi = nn.Sequential(phi, model.encoder.phi)
    return model


class Lesions(Task):
    """A task whose runs the heat map can load."""

    name = "lesions"
    models = {"umbc": reads_features}  # noqa: RUF012

    def batch(self, step, size, generator):
        return {"x": torch.rand(size, 10, 6, generator=generator)}

    def loss(self, model, batch, encode):
        return model.head(encode(model.encoder, batch["x"])).square().mean()

    def evaluate(self, model, *, quick=False):
        return {"error": 0.0}


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    """Two slides and one that is none, patched and with features."""
    folder = tmp_path_factory.mktemp("slides")
    for number in range(2):
        write_slide(folder / f"s{number}.tif", tissue_picture(number, 256, lesion=True)[0], 20)
    (folder / "bad.tif").write_bytes(b"no slide")
    out = folder / "job"
    said = call("patch", folder, "--out", out, "--patch-size", 32, "--skip-bad")
    assert "skipped" in said
    assert "bad.tif: cannot be read" in said
    assert "2 slides" in said
    said = call("features", folder, out / FOLDER, "--backbone", COLOURS, "--chunk-size", 5)
    assert "2 slides written" in said
    return folder, out / FOLDER, out / FOLDER / f"features_{COLOURS.replace(':', '-')}"


@pytest.mark.parametrize("command", ["patch", "features", "heatmap", "camelyon16"])
def test_help_has_an_example(command):
    assert f"setstream slides {command}" in call(command, "--help")


def test_patches_and_features_lie_as_trident_has_them(job):
    _, out, features = job
    assert sorted(path.name for path in out.iterdir()) == sorted(["patches", "visualization", features.name])
    assert sorted(path.name for path in features.iterdir()) == ["s0.h5", "s1.h5"]
    with h5py.File(features / "s0.h5") as file, h5py.File(out / "patches" / "s0_patches.h5") as patches:
        assert file["features"].shape == (len(patches["coords"]), 6)
        np.testing.assert_array_equal(file["coords"][:], patches["coords"][:])
        assert {key: file["coords"].attrs[key] for key in patches["coords"].attrs} == dict(patches["coords"].attrs)
    assert ss.data.open(out).ids == ["s0", "s1"]


def test_what_is_done_is_skipped_and_what_is_missing_is_done(job):
    folder, out, features = job
    stamp = (features / "s0.h5").stat().st_mtime_ns
    (features / "s1.h5").unlink()
    assert "1 slides written" in call("features", folder, out, "--backbone", COLOURS, "--skip-bad")
    assert (features / "s0.h5").stat().st_mtime_ns == stamp
    assert (features / "s1.h5").exists()


def test_problems_are_named(job, tmp_path):
    folder, out, features = job
    with pytest.raises(DataError, match="bad.tif: cannot be read"):
        call("patch", folder, "--out", tmp_path)
    with pytest.raises(DataError, match="holds no \\*_patches.h5"):
        call("features", folder, tmp_path, "--backbone", COLOURS)
    with pytest.raises(ConfigurationError, match="unknown backbone"):
        call("features", folder, out, "--backbone", "resnet9000")
    with pytest.raises(ConfigurationError, match="has no 'instance' scores; it has evidence, alone, attention"):
        call("heatmap", f"{__name__}:reads_patches", folder / "s0.tif", "--out", tmp_path, "--score", "instance")
    with pytest.raises(ConfigurationError, match=r"must be an ss.SetModel, or a function returning one; it is Colours"):
        call("heatmap", COLOURS, folder / "s0.tif", "--out", tmp_path, "--features", features / "s0.h5")
    with pytest.raises(ConfigurationError, match="is not a run folder"):
        call("heatmap", tmp_path, folder / "s0.tif", "--out", tmp_path, "--features", features / "s0.h5")


def test_a_heat_map_of_a_run(job, tmp_path):
    """A run folder, features in a file: the picture, and the table."""
    folder, out, features = job
    config = TrainConfig(f"{__name__}:Lesions", "umbc", steps=2, batch=2, tensorboard=False)
    Trainer(Lesions(), config, tmp_path / "run", shown=False).run()
    arguments = ("--features", features / "s0.h5", "--chunk-size", 7, "--trust", f"{__name__}:Lesions")
    said = call("heatmap", tmp_path / "run", folder / "s0.tif", "--out", tmp_path / "maps", *arguments)
    assert "p = 0." in said
    with Image.open(tmp_path / "maps" / "s0.png") as picture:
        assert picture.size == (256, 256)
    with (tmp_path / "maps" / "s0.csv").open() as file:
        rows = list(csv.DictReader(file))
    table = {name: np.array([float(row[name]) for row in rows]) for name in rows[0]}
    with h5py.File(out / "patches" / "s0_patches.h5") as file:
        coords = file["coords"][:]
    assert set(table) == {"x", "y", "evidence", "alone", "attention", "instance"}
    np.testing.assert_array_equal(np.stack([table["x"], table["y"]], 1), coords)
    assert np.sum(table["attention"]) == pytest.approx(1.0, abs=1e-5)
    model = open_model(str(tmp_path / "run"), trust=[f"{__name__}:Lesions"])
    for name, values in element_scores(model, ss.data.H5Source(features / "s0.h5")).elements.items():
        np.testing.assert_allclose(table[name], values.double().numpy(), rtol=1e-5, atol=1e-5 * float(values.abs().max()))


def test_a_heat_map_straight_from_the_slide(job, tmp_path):
    folder, out, _ = job
    arguments = ("--patches", out / "patches" / "s1_patches.h5", "--score", "attention")
    call("heatmap", f"{__name__}:reads_patches", folder / "s1.tif", "--out", tmp_path, *arguments)
    with (tmp_path / "s1.csv").open() as file:
        total = sum(float(row["attention"]) for row in csv.DictReader(file))
    assert total == pytest.approx(1.0, abs=1e-5)


def test_only_the_score_that_is_drawn_is_computed(job, tmp_path):
    folder, _, features = job
    arguments = ("--features", features / "s0.h5", "--score", "attention")
    call("heatmap", f"{__name__}:reads_features", folder / "s0.tif", "--out", tmp_path, *arguments)
    assert (tmp_path / "s0.csv").read_text().splitlines()[0] == "x,y,attention"


@pytest.fixture
def clam(job, tmp_path):
    """A file of features with coordinates as CLAM writes it: without attributes."""
    with h5py.File(job[2] / "s0.h5") as theirs, h5py.File(tmp_path / "c.h5", "w") as file:
        file["features"], file["coords"] = theirs["features"][:], theirs["coords"][:]
        return tmp_path / "c.h5", theirs["coords"][:], dict(theirs["coords"].attrs)


def test_a_heat_map_without_the_slide(job, clam, tmp_path):
    """From features and coordinates alone, in every format; the size of patches from an option, or another file."""
    (_, out, _), (path, coords, about) = job, clam
    model = f"{__name__}:reads_features"
    with pytest.raises(
        DataError, match=r"c.h5: 'coords' must have the attributes .*it has \[\]: give .*--patches.*--patch-size"
    ):
        call("heatmap", model, "--features", path, "--out", tmp_path)
    with pytest.raises(
        ConfigurationError, match="a heat map needs --features, a file of features with coordinates, or a slide"
    ):
        call("heatmap", model, "--out", tmp_path)
    with pytest.raises(ConfigurationError, match="--write takes png, csv, parquet, geojson; got 'jpg'"):
        call("heatmap", model, "--features", path, "--out", tmp_path, "--write", "jpg")
    with pytest.raises(DataError, match="coordinates for .* elements of c"):
        call("heatmap", model, "--features", path, "--out", tmp_path, "--patches", out / "patches" / "s1_patches.h5")
    formats = [word for kind in ("png", "csv", "parquet", "geojson") for word in ("--write", kind)]
    common = ("--features", path, "--score", "attention", *formats)
    said = call("heatmap", model, *common, "--out", tmp_path / "a", "--patch-size", about["patch_size_level0"])
    assert f"{tmp_path}/a/c.png, .csv, .parquet, .geojson" in said
    call("heatmap", model, *common, "--out", tmp_path / "b", "--patches", out / "patches" / "s0_patches.h5")
    table = pyarrow.parquet.read_table(tmp_path / "a" / "c.parquet").to_pydict()
    assert list(table) == ["x", "y", "attention"]
    np.testing.assert_array_equal(np.stack([table["x"], table["y"]], 1), coords)
    assert sum(table["attention"]) == pytest.approx(1.0, abs=1e-5)
    found = json.loads((tmp_path / "a" / "c.geojson").read_text())
    assert (tmp_path / "a" / "c.geojson").read_bytes() == (tmp_path / "b" / "c.geojson").read_bytes()
    assert (found["type"], len(found["features"])) == ("FeatureCollection", len(coords))
    tile, (x, y) = found["features"][3], coords[3].tolist()
    square = [[x, y], [x + 32, y], [x + 32, y + 32], [x, y + 32], [x, y]]
    assert tile["geometry"] == {"type": "Polygon", "coordinates": [square]}
    assert tile["properties"]["objectType"] == "tile"
    assert tile["properties"]["measurements"]["attention"] == pytest.approx(table["attention"][3], rel=1e-5)
    with Image.open(tmp_path / "b" / "c.png") as picture:  # as large as the slide, whose size is in the file of patches
        assert picture.size == (256, 256)
    with Image.open(tmp_path / "a" / "c.png") as picture:
        assert picture.size == tuple((coords.max(0) + 32).tolist())
        pixels = np.asarray(picture)
    (x, y), white = coords[np.argmax(table["attention"])], np.ones(picture.size[::-1], bool)
    assert pixels[y + 16, x + 16].tolist() == SCALE[-1].tolist()  # not mixed with the background
    for left, top in coords:
        white[top : top + 32, left : left + 32] = False
    assert (pixels[white] == 255).all()


def test_tables_are_written_in_constant_memory(tmp_path):
    grid = Grid(np.random.default_rng(0).integers(0, 10**5, (100_000, 2)), 256, 256, 20.0, 20.0, 0, "t", 0, 0)
    columns = {"evidence": np.random.default_rng(0).random(100_000)}
    for ending in ("csv", "parquet", "geojson"):
        tracemalloc.start()
        write_scores(tmp_path / f"t.{ending}", grid, columns)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 5e6  # all numbers as Python objects are 9.6e6
    written = np.loadtxt(tmp_path / "t.csv", delimiter=",", skiprows=1)
    np.testing.assert_array_equal(written, np.column_stack([grid.coords, columns["evidence"]]))
    with pytest.raises(ShapeError, match=r"100000 patches and needs a value for each; got \{'evidence': \(3,\)\}"):
        write_scores(tmp_path / "t.csv", grid, {"evidence": np.zeros(3)})
    with pytest.raises(ConfigurationError, match="scores are written as .csv, .parquet, .geojson; got t.xls"):
        write_scores(tmp_path / "t.xls", grid, columns)


def test_labels_of_camelyon16(tmp_path):
    for name in ("training/normal/normal_001", "training/tumor/tumor_001", "testing/images/test_001"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        write_slide(tmp_path / f"{name}.tif", tissue_picture(0, 256)[0], 40)
    (tmp_path / "testing" / "reference.csv").write_text("test_001,Tumor,IDC,Macro\n")
    said = call("camelyon16", tmp_path, "--out", tmp_path / "labels.csv")
    assert "2 train (1 with a tumour), 1 test (1 with a tumour)" in said
    (tmp_path / "features").mkdir()
    for name in ("normal_001", "tumor_001", "test_001"):
        np.save(tmp_path / "features" / f"{name}.npy", np.zeros((3, 2), np.float32))
    data = ss.data.SetDataset([ss.data.open_source(path) for path in sorted((tmp_path / "features").iterdir())])
    splits = data.with_labels(tmp_path / "labels.csv").split(tmp_path / "labels.csv")
    assert {split: dict(zip(own.ids, own.labels, strict=True)) for split, own in splits.items()} == {
        "train": {"normal_001": 0, "tumor_001": 1},
        "test": {"test_001": 1},
    }
