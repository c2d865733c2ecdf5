"""Features of slides, and where a model looks: streamed attention is whole attention, planted lesions light up."""

import h5py
import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits

import setstream as ss
from setstream.data import ArraySource
from setstream.data.slides import GridOptions, SlideSource, patch_slides, write_grid, write_slide
from setstream.data.slides.folder import patches_file
from setstream.errors import ConfigurationError, DataError, NonFiniteError, ShapeError
from setstream.tasks.mil.attribution import element_scores
from setstream.tasks.mil.metrics import auroc
from setstream.tasks.mil.models import MODELS
from setstream.tasks.mil.slide_features import features_file, is_done, slide_for, trained_backbone, write_features
from tests.data.slide_pictures import Colours, tissue_picture

HERE = "tests.data.slide_pictures"


# -- attention --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("two_stream", [False, True])
@pytest.mark.parametrize("name", ["umbc+set-transformer", "umbc+fspool", "ab-mil", "clam-mb", "acmil", "ds-mil"])
def test_scores_in_chunks_are_those_of_the_whole_bag(name, two_stream):
    """In float64, against the definition on all elements at once; attention sums to one over the bag."""
    if name == "ds-mil" and two_stream:
        pytest.skip("DS-MIL has two streams of its own")
    torch.manual_seed(0)
    model = MODELS[name](in_dim=6, widths=[16], two_stream=two_stream).double().train()
    whole = ss.nn.DSMIL(16).double()
    if name == "ds-mil":
        model.encoder.pool.load_state_dict(whole.state_dict())
    x = torch.randn(57, 6, dtype=torch.float64)
    found = element_scores(model, ArraySource(x), chunk_size=10)
    assert model.training  # as it was before
    model.eval()
    for size in (1, 57, 100):
        other = element_scores(model, ArraySource(x), chunk_size=size)
        for key, values in found.elements.items():
            torch.testing.assert_close(other.elements[key], values, rtol=1e-9, atol=1e-12)
    with torch.no_grad():
        torch.testing.assert_close(found.logits, model([x])[0], rtol=1e-9, atol=1e-9)
        pool = model.encoder.pool
        bag = pool.pools["bag"] if two_stream else pool
        features = model.encoder.phi(x)
        if isinstance(bag, ss.UMBC):
            queries = bag.query_norm(bag.query(bag.slots(None)))[0]
            keys = bag.key(features)
            logits = torch.einsum("khd,nhd->hkn", queries.unflatten(-1, (4, -1)), keys.unflatten(-1, (4, -1)))
            expected = (logits / (keys.shape[-1] / 4) ** 0.5).softmax(-1).mean((0, 1))
        elif isinstance(bag, ss.GatedAttention):
            weights = bag.score(bag.content(features) * bag.gate(features)).softmax(0)
            expected = weights.mean(1)
            for branch in range(bag.branches if bag.branches > 1 else 0):
                torch.testing.assert_close(found.elements[f"attention-{branch}"], weights[:, branch], rtol=1e-9, atol=1e-12)
        else:
            expected = whole(features[None], return_attention=True)[1][0, :, 0]
        torch.testing.assert_close(found.elements["attention"], expected, rtol=1e-9, atol=1e-12)
        assert float(found.elements["attention"].sum()) == pytest.approx(1.0, abs=1e-9)
        if two_stream or name == "ds-mil":
            score = pool.pools["instance"].module if two_stream else pool.score
            torch.testing.assert_close(found.elements["instance"], score(features)[:, 0])
            assert float(found.elements["instance"].max()) == pytest.approx(float(found.logits[0]))
        else:
            branches = {"clam-mb": 2, "acmil": 5}.get(name, 0)
            assert set(found.elements) == {"attention", "alone", "evidence", *(f"attention-{n}" for n in range(branches))}
        alone = torch.cat([model([element[None]])[:, -1] for element in x])
        torch.testing.assert_close(found.elements["alone"], alone, rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(found.elements["evidence"], alone.sigmoid() * expected, rtol=1e-9, atol=1e-12)
    assert found.probability == pytest.approx(float(found.logits.sigmoid().mean()))


@pytest.mark.parametrize("passes", [2, 3])
def test_the_attention_of_several_passes_is_that_of_the_last(passes):
    torch.manual_seed(0)
    model = MODELS["umbc+set-transformer"](in_dim=6, widths=[16], passes=passes).double().eval()
    x = torch.randn(57, 6, dtype=torch.float64)
    with torch.no_grad():
        state = model.encoder.update(None, x[None])
        for _ in range(1, passes):
            state = model.encoder.update(model.encoder.next_pass(state), x[None])
        expected = model.encoder.attention(x[None], state)[0].mean((0, 1))
        for size in (1, 10, 57):
            found = element_scores(model, ArraySource(x), chunk_size=size)
            torch.testing.assert_close(found.logits, model([x])[0], rtol=1e-9, atol=1e-9)
            torch.testing.assert_close(found.elements["attention"], expected, rtol=1e-9, atol=1e-12)
            torch.testing.assert_close(found.elements["evidence"], found.elements["alone"].sigmoid() * expected)


def test_of_several_classes_the_last_one_is_scored():
    """Its probability, by a softmax; an element's, as a bag of its own, is the sigmoid of its log-odds."""
    torch.manual_seed(0)
    model, x = MODELS["clam-mb"](in_dim=6, outputs=3).eval(), torch.randn(40, 6)
    found = element_scores(model, ArraySource(x), chunk_size=7)
    with torch.no_grad():
        assert found.probability == pytest.approx(float(model(x[None])[0].softmax(0)[2]), abs=1e-6)
        torch.testing.assert_close(found.elements["alone"].sigmoid(), model(x[:, None]).softmax(1)[:, 2])
    one = element_scores(model, ArraySource(x), scores=["attention-1"])
    assert list(one.elements) == ["attention-1"]
    torch.testing.assert_close(one.elements["attention-1"], found.elements["attention-1"])


@pytest.mark.parametrize("two_stream", [False, True])
def test_gated_attention_reads_a_bag_once(two_stream):
    """phi, and the attention network, which is most of the work after it."""
    model, read = MODELS["clam-mb"](in_dim=6, widths=[8], two_stream=two_stream), []
    pool = model.encoder.pool
    for module in (model.encoder.phi, (pool.pools["bag"] if two_stream else pool).content):
        module.register_forward_hook(lambda _, inputs, output: read.append(output[..., 0].numel()))
    element_scores(model, ArraySource(torch.randn(30, 6)), chunk_size=10)
    assert read == [10] * 6


def test_a_bag_without_elements_has_no_scores():
    nothing = ArraySource(torch.zeros(0, 6), id="blank")
    found = element_scores(MODELS["umbc+set-transformer"](in_dim=6, widths=[8], two_stream=True), nothing)
    assert {key: tuple(values.shape) for key, values in found.elements.items()} == dict.fromkeys(
        ("evidence", "alone", "attention", "instance"), (0,)
    )
    assert bool(torch.isfinite(found.logits).all())
    found = element_scores(MODELS["clam-mb"](in_dim=6), nothing)
    assert {name: len(values) for name, values in found.elements.items()}["attention-1"] == 0
    found = element_scores(MODELS["ds-mil"](in_dim=6), nothing)
    assert (float(found.logits[0]), len(found.elements["attention"])) == (0.0, 0)
    whole = ss.SetModel(ss.SetEncoder(nn.Identity(), ss.ChunkMean(nn.Linear(6, 1))), nn.Flatten())
    with pytest.raises(DataError, match="blank has no elements"):
        element_scores(whole, nothing)


@pytest.mark.parametrize(("name", "options"), [("deepsets", {}), ("sse", {"normalise": False})])
def test_models_without_attention_score_elements_alone(name, options):
    """SSE that is not normalised gives every element the same attention in all: that is none."""
    model, x = MODELS[name](in_dim=6, **options).eval(), torch.randn(5, 6)
    found = element_scores(model, ArraySource(x), chunk_size=2)
    assert set(found.elements) == {"evidence", "alone"}
    with torch.no_grad():
        torch.testing.assert_close(found.elements["evidence"], model(x[:, None])[:, 0].sigmoid())


def test_a_head_of_attention_reads_one_slot_for_each_element():
    """All slots of a bag with one element are equal; in chunks, not one by one, and only what is asked for."""
    torch.manual_seed(0)
    model = MODELS["umbc+set-transformer"](in_dim=6, widths=[8], num_slots=16).eval()
    seen = []
    model.head.register_forward_hook(lambda *_: seen.append("bag"))
    model.head.decoder[0].register_forward_hook(lambda _, inputs, output: seen.append(tuple(inputs[0].shape)))
    x = torch.randn(100, 6)
    found = element_scores(model, ArraySource(x), chunk_size=50)
    assert seen == [(50, 1, 8), (50, 1, 8), (1, 16, 8), "bag"]
    with torch.no_grad():
        torch.testing.assert_close(found.elements["alone"], model(x[:, None])[:, -1], rtol=1e-4, atol=1e-5)
    seen.clear()
    other = element_scores(model, ArraySource(x), chunk_size=50, scores=["attention"])
    assert seen == [(1, 16, 8), "bag"]
    assert set(other.elements) == {"attention"}
    torch.testing.assert_close(other.elements["attention"], found.elements["attention"])
    with pytest.raises(ConfigurationError, match="has no 'instance' scores; it has evidence, alone, attention"):
        element_scores(model, ArraySource(x), scores=["instance"])


@pytest.mark.parametrize("options", [{"slot_residual": True}, {"activation": "slot-sigmoid"}, {"norm_after": True}])
def test_elements_alone_are_bags_of_one_whatever_the_pool(options):
    torch.manual_seed(0)
    model = MODELS["umbc+set-transformer"](in_dim=6, widths=[8], num_slots=4, heads=2, **options).double().eval()
    x = torch.randn(70, 6, dtype=torch.float64)
    found = element_scores(model, ArraySource(x), scores=["alone"])
    with torch.no_grad():
        torch.testing.assert_close(found.elements["alone"], model(x[:, None])[:, -1], rtol=1e-9, atol=1e-9)


# -- features ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def job(tmp_path):
    """Two slides, patched."""
    slides = {f"s{n}": write_slide(tmp_path / f"s{n}.tif", tissue_picture(n, 256)[0], 20) for n in range(2)}
    options = GridOptions(patch_size=32)
    list(patch_slides(list(slides.values()), tmp_path / "job", options))
    return slides, tmp_path / "job" / options.folder


def test_features_are_the_backbones_of_the_patches(job):
    slides, folder = job
    for name in slides:
        source = slide_for(folder / "patches" / f"{name}_patches.h5", slides)
        path = features_file(folder / "patches", "colours", name)
        assert path == folder / "features_colours" / f"{name}.h5"
        seen = []
        count = write_features(Colours(), source, path, encoder="colours", chunk_size=7, progress=seen.append)
        assert seen[-1] == count == len(source)
        with h5py.File(path) as file:
            assert file["features"].dtype == np.float32
            expected = Colours()(SlideSource(slides[name], source.grid).tensor())
            np.testing.assert_allclose(file["features"][:], expected.numpy(), rtol=1e-5, atol=1e-6)
            np.testing.assert_array_equal(file["coords"][:], source.grid.coords)
            assert file["coords"].attrs["patch_size_level0"] == 32
            assert file["features"].attrs["encoder"] == "colours"
        assert is_done(path, source)
        other = SlideSource(slides[name], patch_size=16)
        assert not is_done(path, other)
    data = ss.data.open(folder)  # beside patches/ and visualization/
    assert data.ids == ["s0", "s1"]
    assert data[0].shape == (6,)
    torch.testing.assert_close(data[0].coords(), slide_for(folder / "patches" / "s0_patches.h5", slides).coords())


def test_features_of_an_empty_slide(tmp_path):
    path = write_slide(tmp_path / "white.tif", np.full((256, 256, 3), 255, np.uint8), 20)
    write_features(Colours(), SlideSource(path, patch_size=32), tmp_path / "f.h5", encoder="x")
    (source,) = ss.data.open(tmp_path / "f.h5")
    assert (len(source), source.shape, source.coords().shape) == (0, (6,), (0, 2))


def test_backbones_that_cannot_be(job, tmp_path):
    slides, folder = job
    source = slide_for(folder / "patches" / "s0_patches.h5", slides)
    with pytest.raises(NonFiniteError, match="s0.tif: NaN or infinity in the features of patches 0 .. 15"):
        write_features(trained_backbone(f"{HERE}:broken"), source, tmp_path / "f.h5", encoder="x", chunk_size=16)
    wrong = nn.Conv2d(3, 2, 4)
    wrong.out_dim = 2
    with pytest.raises(ShapeError, match=r"must return \(\d+, 2\) features; got \(\d+, 2, 29, 29\)"):
        write_features(wrong, source, tmp_path / "f.h5", encoder="x")
    assert not (tmp_path / "f.h5").exists()
    assert not list(tmp_path.glob(".*"))
    for name, message in {
        "resnet9000": "unknown backbone 'resnet9000'",
        "nowhere:f": "cannot be imported",
        f"{HERE}:nothing": "cannot be imported",
        f"{HERE}:np": "does not take these options",
    }.items():
        with pytest.raises(ConfigurationError, match=message):
            trained_backbone(name)
    with pytest.raises(ConfigurationError, match="does not take these options"):
        trained_backbone(f"{HERE}:Colours", tmp_path)
    assert isinstance(trained_backbone(f"{HERE}:Colours"), Colours)
    with pytest.raises(DataError, match="no slide named s1 among the 1"):
        slide_for(folder / "patches" / "s1_patches.h5", {"s0": slides["s0"]})


# -- planted lesions --------------------------------------------------------------------------------------------------


def lesion_share(mask, coords, size):
    """Of each patch."""
    sums = np.pad(mask.cumsum(0).cumsum(1), ((1, 0), (1, 0)))
    x, y = coords.T
    return (sums[y + size, x + size] - sums[y, x + size] - sums[y + size, x] + sums[y, x]) / size**2


@pytest.fixture(scope="module")
def cohort(tmp_path_factory):
    """24 slides, every other with a lesion; features of their patches, in files, and which patches lie in a lesion."""
    folder, options = tmp_path_factory.mktemp("cohort"), GridOptions(patch_size=16)
    truth = {}
    for number in range(24):
        picture, _, sick = tissue_picture(number, 256, lesion=number % 2 == 1)
        path = write_slide(folder / f"s{number:02d}.tif", picture, 20)
        source = SlideSource(path, patch_size=16)
        write_grid(patches_file(folder / "job", options, path.stem), source.grid)
        write_features(Colours(), source, folder / "job" / options.folder / "features_c" / f"{path.stem}.h5", encoder="c")
        truth[path.stem] = torch.from_numpy(lesion_share(sick, source.grid.coords, 16) > 0.5)
    return ss.data.open(folder / "job" / options.folder), truth


@pytest.mark.parametrize(
    ("name", "options", "steps"),
    [
        ("umbc+set-transformer", {"num_slots": 16, "two_stream": True}, 200),
        ("umbc+set-transformer", {"num_slots": 16}, 200),
        ("ds-mil", {}, 200),
        ("deepsets", {}, 200),
    ],
)
def test_a_planted_lesion_lights_up(cohort, name, options, steps):
    """Trained on 16 slides with labels of slides only; AUROC of the patches' scores on the 4 lesions of 8 others above 0.95."""
    data, truth = cohort
    torch.manual_seed(0)
    rows = torch.cat([source.tensor() for source in data])
    model = MODELS[name](in_dim=6, widths=[32], **options)
    model.encoder.phi = nn.Sequential(Standardise(rows.mean(0), rows.std(0)), model.encoder.phi)
    bags = [source.tensor() for source in data]
    labels = torch.arange(24).remainder(2).float()
    optimizer = torch.optim.Adam(model.parameters(), 2e-3)
    for step in range(steps):
        chosen = torch.randperm(16, generator=torch.Generator().manual_seed(step))[:4].tolist()
        logits = model.train()([bags[number] for number in chosen])
        loss = binary_cross_entropy_with_logits(logits, labels[chosen, None].expand_as(logits))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    found = [element_scores(model, source, chunk_size=50) for source in list(data)[16:]]
    assert auroc(torch.tensor([own.probability for own in found]), labels[16:]) > 0.9
    scored = zip(found, list(data)[16:], strict=True)
    areas = [auroc(own.elements["evidence"], truth[source.id]) for own, source in scored]
    assert sum(areas[1::2]) / 4 > 0.95, areas


class Standardise(nn.Module):
    """Features around their mean, in units of their standard deviation."""

    def __init__(self, mean, std):
        super().__init__()
        self.register_buffer("mean", mean)
        self.register_buffer("std", std)

    def forward(self, x):
        return (x - self.mean) / self.std


@pytest.mark.slow
def test_torchmil_reads_our_features(job, tmp_path):
    """torchmil's TridentWSIDataset gives the same features, coordinates and labels. Needs `pip install torchmil`."""
    torchmil = pytest.importorskip("torchmil.datasets")
    slides, folder = job
    for name in slides:
        source = slide_for(folder / "patches" / f"{name}_patches.h5", slides)
        write_features(Colours(), source, features_file(folder / "patches", "c", name), encoder="c")
    (tmp_path / "labels.csv").write_text("slide,label\ns0.tif,0\ns1.tif,1\n")
    theirs = torchmil.TridentWSIDataset(
        base_path=f"{folder}/",
        labels_path=str(tmp_path / "labels.csv"),
        feature_extractor="c",
        patch_size=32,
        wsi_name_col="slide",
        wsi_label_col="label",
        bag_keys=["X", "Y", "adj", "coords"],
    )
    ours = ss.data.open(folder)
    assert len(theirs) == len(ours) == 2
    by_name = dict(zip(theirs.bag_names, range(2), strict=True))
    for number, source in enumerate(ours):
        bag = theirs[by_name[source.id]]
        torch.testing.assert_close(bag["X"], source.tensor())
        torch.testing.assert_close(bag["coords"].long(), source.coords() // 32)
        assert int(bag["Y"]) == number
        assert tuple(bag["adj"].shape) == (len(source), len(source))
