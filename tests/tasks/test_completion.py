"""Image completion: pixels as sets, the likelihood, and models that do not care how the context is cut."""

import numpy as np
import pytest
import torch
from PIL import Image
from torch.distributions import Normal

import setstream as ss
from setstream import testing
from setstream.data.images import celeba, cifar10, pictures
from setstream.errors import ConfigurationError, DataError
from setstream.tasks.completion import MODELS, AnchoredDecoder, Completion, Decoder, Field, as_pixels, places
from setstream.tasks.completion.field import Waves
from setstream.tasks.completion.models import pretrained, spread, umbc_anchors
from setstream.training import TrainConfig, Trainer

CONSISTENT = ("deepsets", "sse", "sse-hierarchical", "umbc+set-transformer", "umbc+anchors")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Twenty small pictures of coloured gradients."""
    found = tmp_path_factory.mktemp("pictures")
    rng = np.random.default_rng(0)
    for number in range(20):
        ramp = np.linspace(0, 255, 20)[:, None, None] * rng.random(3) + np.linspace(0, 60, 16)[None, :, None]
        Image.fromarray(ramp.clip(0, 255).astype(np.uint8)).save(found / f"{number:02d}.png")
    return found


def task(folder, **options):
    small = {"side": 8, "fewest": 10, "most": 30, "test_contexts": [10, 30], "test_chunk": 7}
    return Completion("folder", str(folder), **(small | options))


def small_options(name):
    slots = {"num_slots": 4} if name in CONSISTENT and name != "deepsets" else {}
    return slots | ({"waves": 1} if name == "umbc+anchors" else {})


def model(name):
    torch.manual_seed(0)
    return MODELS[name](width=16, **small_options(name)).eval()


def test_waves_change_nothing_in_the_laws():
    torch.manual_seed(0)
    finer = MODELS["umbc+set-transformer"](width=16, num_slots=4, waves=4)
    ss.testing.check_mini_batch_consistency(finer.encoder, torch.rand(2, 40, 5))


def test_waves_keep_the_precision_of_their_rows():
    for dtype in (torch.bfloat16, torch.float32, torch.float64):
        assert Waves(2)(torch.rand(3, 5, dtype=dtype)).dtype == dtype


@pytest.mark.parametrize("name", MODELS)
def test_every_model_can_be_saved_and_opened_again(name, tmp_path):
    own = Completion().build(name, width=16, **small_options(name)).eval()
    own.save_pretrained(tmp_path)
    pixels = torch.rand(1, 9, 5)
    one, other = (each(pixels).at(places(4, 4)[None]).mean for each in (own, ss.SetModel.from_pretrained(tmp_path)))
    assert torch.equal(one, other)


def test_pixels_know_their_place():
    image = torch.arange(2 * 3 * 4 * 5, dtype=torch.uint8).view(2, 3, 4, 5)
    pixels = as_pixels(image)
    assert pixels.shape == (2, 20, 5)
    row, column = 2, 3
    own = pixels[1, row * 5 + column]
    torch.testing.assert_close(own[:2], torch.tensor([(column + 0.5) / 5, (row + 0.5) / 4]))
    torch.testing.assert_close(own[2:], image[1, :, row, column] / 255)
    assert float(places(7, 9).min()) > 0
    assert float(places(7, 9).max()) < 1


@pytest.mark.parametrize("waves", [0, 2])
def test_the_decoder_is_the_plain_one_without_the_repeated_work(waves):
    torch.manual_seed(0)
    decoder = Decoder(6, 3, waves).double()
    read, where = torch.randn(2, 6).double(), torch.rand(2, 9, 2).double()
    angles = [2**i * torch.pi * where[..., axis] for axis in range(2) for i in range(waves)]
    features = [own.sin() for own in angles] + [own.cos() for own in angles] + [where[..., 0], where[..., 1]]
    tiled = torch.cat([read.unsqueeze(1).expand(-1, 9, -1), torch.stack(features, -1)], -1)
    mean, raw = decoder.rest(decoder.first(tiled)).chunk(2, -1)
    found = decoder(read, where)
    torch.testing.assert_close(found[0], mean)
    torch.testing.assert_close(found[1], 0.1 + 0.9 * torch.nn.functional.softplus(raw))


def test_anchors_lie_evenly_over_the_image():
    for count in (16, 128, 256):
        anchors = spread(count)
        cells = (anchors * 4).long() @ torch.tensor([1, 4])
        per_cell = cells.bincount(minlength=16)
        assert (per_cell - count // 16).abs().max() <= 2, per_cell
        nearest = torch.cdist(anchors, anchors).fill_diagonal_(9).amin(1)
        assert nearest.min() > 0.5 / count**0.5  # at random, the closest two would lie much closer


def test_anchors_in_two_passes_are_consistent_and_start_near_the_same_places():
    model = umbc_anchors(num_slots=16, width=64, waves=2, passes=2).double()
    pixels = torch.rand(2, 60, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    testing.check_mini_batch_consistency(model.encoder.eval(), pixels)
    testing.check_exact_gradient(model.encoder, pixels, chunk_size=13)
    pool = model.encoder.pool
    places = torch.zeros(16, pool.pool(2).query.in_features, dtype=torch.float64)
    places[:, :8] = pool.between[0].places.detach()
    torch.testing.assert_close(pool.pool(2).query(places), pool.pool(1).query(pool.pool(1).slots.mean))


def test_anchors_begin_by_reading_what_lies_around_them():
    own = umbc_anchors(num_slots=64).double().eval()
    anchors, pixels = spread(64).double(), torch.rand(1, 5000, 5, generator=torch.Generator().manual_seed(0)).double()
    weights = own.encoder.attention(pixels, own.encoder.update(None, pixels))[0]  # (H, K, N)
    torch.testing.assert_close(weights.sum(-1), torch.ones_like(weights[..., 0]))
    distances = torch.cdist(anchors, pixels[0, :, :2])
    reach = (weights * distances).sum(-1).mean(-1)  # of each head, over its anchors
    assert (reach.diff() < 0).all(), "wide in the first head, narrow in the last"
    assert reach[-1] < 0.1 < 0.45 < distances.mean()
    # The same by the formula, in full.
    waves = own.encoder.phi.waves(anchors)[:, :16], own.encoder.phi.waves(pixels[0])[:, :16]
    logits = torch.tensor([0.25, 0.5, 1, 2]).double().view(-1, 1, 1) * (waves[0] @ waves[1].T)
    torch.testing.assert_close(weights, logits.softmax(-1), rtol=1e-5, atol=1e-9)


def test_a_place_finds_the_rows_of_the_anchors_near_it():
    torch.manual_seed(0)
    decoder = AnchoredDecoder(spread(16), 3, 32, 2, 3).double()
    rows, where = torch.randn(2, 16, 32).double(), torch.rand(2, 9, 2).double()
    together = torch.cat(decoder(rows, where), -1)
    alone = torch.cat([torch.cat(decoder(rows, place), -1) for place in where.split(1, dim=1)], 1)
    torch.testing.assert_close(alone, together)
    assert not torch.allclose(torch.cat(decoder(rows.roll(1, 0), where), -1), together)
    rows.requires_grad_()
    for anchor in (0, 7, 15):
        answer = decoder.raw(rows, spread(16)[None, anchor : anchor + 1].double().expand(2, -1, -1))
        (gradient,) = torch.autograd.grad(answer.abs().sum(), rows)
        assert (gradient.norm(dim=-1).argmax(1) == anchor).all()


def test_anchors_want_waves_that_their_heads_can_hold():
    for waves in (0, 9):
        with pytest.raises(ConfigurationError, match=f"waves must be 1 to 8 at width 128; got {waves}"):
            umbc_anchors(waves=waves)


@pytest.mark.parametrize("anchored", [False, True])
def test_the_loss_is_the_likelihood_and_streams(anchored):
    torch.manual_seed(0)
    decoder = (AnchoredDecoder(spread(4), 1, 8, 2, 3) if anchored else Decoder(8, 3)).double()
    read = torch.randn((2, 4, 8) if anchored else (2, 8)).double().requires_grad_()
    targets = torch.rand(2, 50, 5).double()
    field = Field(read, decoder)
    mean, scale = decoder(read, targets[..., :2])
    expected = -Normal(mean, scale).log_prob(targets[..., 2:]).sum(-1).mean(1)
    inputs = [read, *decoder.parameters()]
    for found in (field.nll(targets), field.nll(targets, chunk_size=8)):
        torch.testing.assert_close(found, expected)
        for own, wanted in zip(
            torch.autograd.grad(found.sum(), inputs),
            torch.autograd.grad(expected.sum(), inputs, retain_graph=True),
            strict=True,
        ):
            torch.testing.assert_close(own, wanted)
    torch.testing.assert_close(-field.at(targets[..., :2]).log_prob(targets[..., 2:]).sum(-1).mean(1), expected)


@pytest.mark.parametrize("name", MODELS)
def test_only_consistent_models_do_not_care_how_the_context_is_cut(folder, name):
    own = model(name)
    assert own.encoder.pool.consistent == (name in CONSISTENT)
    if name in CONSISTENT:
        losses = torch.stack([task(folder, test_chunk=chunk).losses(own, 30) for chunk in (1, 7, 30)])
        assert float((losses.amax(0) - losses.amin(0)).max()) < 1e-4
    context, codes = task(folder).test_pixels(0, 2)[:, :30].double(), []
    for chunk in (1, 7, 30):
        stream = own.double().stream(chunks="average")
        for piece in context.split(chunk, dim=1):
            stream.update(piece)
        codes.append(own.encoder.finalize(stream.state, chunks="average").detach())
    apart = max(float((code - codes[0]).abs().max()) for code in codes) / float(codes[0].abs().max())
    assert (apart < 1e-12) == (name in CONSISTENT), apart


@pytest.mark.parametrize("name", MODELS)
def test_every_model_learns_through_the_trainer(folder, tmp_path, name):
    gradient, options = "unbiased" if name in CONSISTENT else "subset", small_options(name)
    config = TrainConfig(
        "completion",
        name,
        {
            "data": "folder",
            "folder": str(folder),
            "side": 8,
            "fewest": 10,
            "most": 30,
            "targets": 20,
            "test_contexts": [10, 30],
        },
        {"width": 32, **options},
        steps=60,
        batch=4,
        lr=2e-3,
        gradient=gradient,
        chunk_size=10,
        tensorboard=False,
    )
    own = task(folder)
    before = own.evaluate(own.build(name, width=32, **options).eval())
    result = Trainer(own, config, tmp_path, shown=False).run()
    assert set(before) == {"nll", "nll_10", "nll_30", "nll_error"}
    assert result.metrics["nll"] < before["nll"] - 0.3


def test_a_context_of_n_is_the_first_n_of_a_larger_one(folder):
    own = task(folder)
    assert torch.equal(own.test_pixels(0, 2), own.test_pixels(0, 2))
    assert len({tuple(row) for row in own.test_pixels(0, 1)[0, :, :2].tolist()}) == 64  # each place once


def test_any_place_can_be_asked_for(folder):
    context = task(folder).test_pixels(0, 2)[:, :10]
    finer = model("umbc+set-transformer")(context).at(places(16, 16).expand(2, -1, -1))
    assert finer.mean.shape == (2, 256, 3)
    assert float(finer.stddev.detach().min()) >= 0.1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"data": "imagenet"}, "unknown data 'imagenet': choose one of cifar10"),
        ({"data": "celeba"}, "give task.folder=PATH"),
        ({"fewest": 5, "most": 3}, "fewest <= most; got 5 and 3"),
    ],
)
def test_bad_options_are_refused(options, message):
    with pytest.raises(ConfigurationError, match=message):
        Completion(**options)


def test_folders_of_pictures(folder, tmp_path):
    found = pictures(folder, 8)
    assert {split: tuple(own.shape) for split, own in found.items()} == {"train": (18, 3, 8, 8), "test": (2, 3, 8, 8)}
    with pytest.raises(DataError, match="no such file or folder"):
        pictures(tmp_path / "none", 8)
    with pytest.raises(DataError, match="found 0"):
        pictures(tmp_path, 8)
    for split in ("train", "test"):
        (tmp_path / split).mkdir()
        Image.new("L", (9, 5), 200).save(tmp_path / split / "a.jpg")
    assert (pictures(tmp_path, 4)["test"] == 200).all()
    (tmp_path / "test" / "b.png").write_bytes(b"no picture")
    with pytest.raises(DataError, match="b.png: cannot be read"):
        pictures(tmp_path, 4)


@pytest.mark.parametrize("suffix", [".txt", ".csv"])
def test_celeba_in_its_published_layout(tmp_path, suffix):
    faces = tmp_path / "img_align_celeba"
    with pytest.raises(DataError, match="list_eval_partition"):
        celeba(tmp_path)
    faces.mkdir()
    rows = []
    for number, part in enumerate([0, 0, 1, 2]):
        picture = np.zeros((218, 178, 3), np.uint8)
        picture[35:183, 15:163] = 60 * number + 20  # the middle 148 x 148; all around is black
        Image.fromarray(picture).save(faces / f"{number:06d}.jpg", quality=100)
        rows.append(f"{number:06d}.jpg{',' if suffix == '.csv' else ' '}{part}")
    header = ["image_id,partition"] if suffix == ".csv" else []
    (tmp_path / f"list_eval_partition{suffix}").write_text("\n".join([*header, *rows]) + "\n")
    found = celeba(tmp_path, side=4)
    assert {split: len(own) for split, own in found.items()} == {"train": 2, "val": 1, "test": 1}
    assert abs(int(found["test"].float().mean()) - 200) < 3
    for file in faces.iterdir():
        file.unlink()
    assert torch.equal(celeba(tmp_path, side=4)["train"], found["train"])  # made once


@pytest.mark.slow
def test_the_registrys_images_are_what_they_are_known_to_be():
    images = cifar10()
    assert {split: tuple(own.shape) for split, own in images.items()} == {
        "train": (50000, 3, 32, 32),
        "test": (10000, 3, 32, 32),
    }
    means = images["train"].float().div(255).mean((0, 2, 3))
    torch.testing.assert_close(means, torch.tensor([0.4914, 0.4822, 0.4465]), atol=1e-3, rtol=0)  # published channel means


def test_gradients_are_exact_in_chunks(folder):
    own = model("umbc+set-transformer").train()
    context = task(folder).test_pixels(0, 2)[:, :30]
    ss.testing.check_exact_gradient(own.encoder, context, chunk_size=7)


def test_shipped_models_are_trained_and_small():
    assert set(pretrained.available()) == {"deepsets", "umbc+set-transformer", "umbc+anchors"}
    assert (
        sum(path.stat().st_size for name in pretrained.available() for path in pretrained.folder_of(name).iterdir()) < 2 * 2**20
    )
    own = Completion(test_images=50, test_contexts=[200])
    nll = {name: own.evaluate(pretrained(name))["nll"] for name in pretrained.available()}
    assert nll["umbc+anchors"] + 1 < nll["umbc+set-transformer"] < nll["deepsets"] - 0.05 < -0.5


def test_he_keeps_the_size_of_features_and_torch_lets_them_shrink():
    pixels = torch.rand(1, 1000, 5, generator=torch.Generator().manual_seed(0))
    spread = {}
    for init in ("torch", "he"):
        torch.manual_seed(0)
        own = MODELS["umbc+set-transformer"](init=init)
        spread[init] = float(own.encoder.phi(pixels[0]).detach().std(0).mean())
    assert spread["he"] > 5 * spread["torch"]
    with pytest.raises(ConfigurationError, match="init is torch or he; got 'zeros'"):
        MODELS["deepsets"](init="zeros")
