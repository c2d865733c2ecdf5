"""Needle bags: what is in them, that they come again, and that both stages train."""

import sys

import pytest
import torch
from benchmarks.needles import LARGEST, SMALLEST, NeedleBags, Needles, OtherClasses, part, splits

from benchmarks import evidence_needles, needles
from setstream.errors import ConfigurationError
from setstream.report import Page, find_runs, write_report
from setstream.tasks.loading import open_model
from setstream.tasks.mil import Mil
from setstream.training import TrainConfig, Trainer
from setstream.training.task import task_class


def bags(rate=0.004, seed=0, count=12, needle=3, others=(0, 1, 5, 9)):
    numbers = torch.arange(1000)
    return NeedleBags(numbers, numbers % 10, count=count, needle=needle, others=others, rate=rate, seed=seed)


@pytest.mark.parametrize("rate", [0.001, 0.004, 0.02])
def test_positive_bags_hold_as_many_needles_as_the_rate_says_and_others_none(rate):
    for number, bag in enumerate(bags(rate)):
        wanted = max(1, round(rate * len(bag))) if number % 2 else 0
        assert int((bag % 10 == 3).sum()) == wanted
        assert set((bag % 10).tolist()) - {3} == {0, 1, 5, 9}
        assert SMALLEST <= len(bag) <= LARGEST


def test_bags_come_again_and_rates_differ_in_needles_alone():
    assert all(torch.equal(a, b) for a, b in zip(bags(), bags(), strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(bags(), bags(seed=1), strict=False))
    for few, many in zip(bags(0.001), bags(0.01), strict=True):
        assert int((few != many).sum()) <= round(0.01 * len(few))
    with pytest.raises(ConfigurationError, match=r"different classes in 0 .. 9; got 10 and \[0"):
        bags(needle=10)
    with pytest.raises(ConfigurationError, match="different classes in 0 .. 9; got 5 and"):
        bags(needle=5)
    with pytest.raises(ConfigurationError, match="rate of needles must be between 0 and 1; got 1"):
        bags(rate=1)


def test_needles_stand_anywhere_in_a_bag():
    """Mean place of 3,000 needles, in units of the bag's size: a half, z below 4."""
    places = torch.cat([(bag % 10 == 3).nonzero().flatten() / len(bag) for bag in bags(0.05, count=60)])
    assert len(places) > 2000
    assert abs(float(places.mean()) - 0.5) < 4 / (12 * len(places)) ** 0.5


def test_the_images_are_those_of_cifar10_in_three_parts():
    parts = splits()
    assert [len(parts[name].pixels) for name in ("train", "val", "test")] == [40_000, 10_000, 10_000]
    assert parts["test"].classes.bincount().tolist() == [1000] * 10
    assert torch.cat([parts["train"].classes, parts["val"].classes]).bincount().tolist() == [5000] * 10
    assert parts["test"].pixels.shape == (10_000, 3, 32, 32)
    assert parts["test"].classes[:4].tolist() == [3, 8, 8, 0]  # a cat, two ships, an airplane
    mean = parts["train"].pixels[::40].float().mean((0, 2, 3)) / 255
    torch.testing.assert_close(mean, torch.tensor([0.4914, 0.4822, 0.4465]), atol=0.01, rtol=0)  # its known mean colour


def test_outside_of_a_checkout_the_error_says_where_they_are(monkeypatch):
    monkeypatch.setitem(sys.modules, "benchmarks.needles", None)
    with pytest.raises(ConfigurationError, match="cannot be imported: .*in a checkout of setstream"):
        task_class("needles")


@pytest.fixture
def _few_images(monkeypatch):
    """A few hundred of the images are enough to see that everything fits together."""
    few = {name: part(images, slice(300)) for name, images in splits().items()}
    monkeypatch.setattr(needles, "splits", lambda: few)


@pytest.mark.usefixtures("_few_images")
def test_from_other_classes_to_a_head_to_the_whole(tmp_path):
    """All three runs of the sweep, small."""
    common = {"tensorboard": False, "seed": 0}
    first = TrainConfig("other-classes", "linear", model_options={}, steps=3, batch=8, gradient="full", **common)
    others = OtherClasses()
    assert all(int((part.classes == needles.NEEDLE).sum()) == 0 for part in others.parts.values())
    Trainer(others, first, tmp_path / "pretrained", shown=False).run()
    weights = str(tmp_path / "pretrained" / "model.safetensors")
    sizes = {"train_bags": 4, "val_bags": 4, "test_bags": 4}
    head = {"widths": [16], "num_slots": 4, "two_stream": True}
    second = TrainConfig(
        "needles",
        "umbc+set-transformer",
        task_options=sizes | {"features": weights},
        model_options=head,
        steps=2,
        batch=2,
        gradient="full",
        **common,
    )
    Trainer(Needles(**second.task_options), second, tmp_path / "runs" / "frozen", shown=False).run()
    for gradient in ("unbiased", "importance", "subset"):
        third = TrainConfig(
            "needles",
            "umbc+set-transformer",
            task_options=sizes,
            model_options=head | {"backbone": "small", "weights": weights},
            steps=1,
            batch=2,
            gradient=gradient,
            chunk_size=64,
            init_from=str(tmp_path / "runs" / "frozen"),
            **common,
        )
        result = Trainer(Needles(**sizes), third, tmp_path / "runs" / gradient, shown=False).run()
        assert set(result.metrics) >= {"accuracy", "auroc", "f1", "threshold"}
    with pytest.raises(ConfigurationError, match="--trust benchmarks.needles:Needles"):
        open_model(str(tmp_path / "runs" / "subset"))
    assert open_model(str(tmp_path / "runs" / "subset"), trust=["benchmarks.needles:Needles"]).head is not None
    write_report([tmp_path / "runs"], tmp_path / "report.html")
    assert "umbc+set-transformer (importance 64" in (tmp_path / "report.html").read_text()
    page = Page("evidence")
    evidence_needles.add_evidence(page, find_runs([tmp_path / "runs"]))
    assert "frozen features" in page.html()
    assert "importance, 64 with a graph" in page.html()


@pytest.mark.usefixtures("_few_images")
def test_features_give_the_answers_of_pixels(tmp_path):
    first = TrainConfig("other-classes", "linear", steps=1, batch=2, gradient="full", tensorboard=False)
    Trainer(OtherClasses(), first, tmp_path, shown=False).run()
    weights = str(tmp_path / "model.safetensors")
    sizes = {"train_bags": 2, "val_bags": 2, "test_bags": 2}
    on_features, on_pixels = Needles(features=weights, **sizes), Needles(**sizes)
    head = on_features.build("deepsets", widths=[8], two_stream=True).eval()
    whole = on_pixels.build("deepsets", widths=[8], two_stream=True, backbone="small", weights=weights).eval()
    whole.load_state_dict(head.state_dict(), strict=False)
    expected = on_features.probabilities(head, on_features.test.bags)
    torch.testing.assert_close(on_pixels.probabilities(whole, on_pixels.test.bags), expected, rtol=1e-4, atol=1e-5)
    bag_by_bag = Mil.probabilities(on_pixels, whole, on_pixels.test.bags)  # every image as often as it comes
    torch.testing.assert_close(bag_by_bag, expected, rtol=1e-4, atol=1e-5)
