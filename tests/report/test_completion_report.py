"""The report of image completion, from tiny runs on pictures that we draw."""

import re

import numpy as np
import pytest
import torch
from PIL import Image

from setstream.report import write_report
from setstream.report.page import Page
from setstream.report.runs import FinishedRun
from setstream.tasks.completion import Completion, as_pixels
from setstream.tasks.completion import report as evidence
from setstream.training import TrainConfig, Trainer
from setstream.training.registry import build_task


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    found = tmp_path_factory.mktemp("pictures")
    rng = np.random.default_rng(0)
    for number in range(20):
        Image.fromarray(rng.integers(0, 256, (8, 8, 3), np.uint8)).save(found / f"{number:02d}.png")
    return found


def test_the_report_has_table_figures_gallery_and_animation(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(evidence.progress_gif, "__defaults__", (2, 3))
    monkeypatch.setattr(evidence, "GALLERY", (5, 20))
    options = {"data": "folder", "folder": str(folder), "side": 8, "fewest": 5, "most": 20, "test_contexts": [5, 20]}
    umbc = "umbc+set-transformer"
    kinds = [(umbc, "unbiased", {}), (umbc, "full", {}), ("set-transformer", "subset", {}), ("deepsets", "unbiased", {})]
    kinds += [("deepsets", "unbiased", {"init": "he"}), ("umbc+anchors", "unbiased", {"num_slots": 4})]
    for number, (model, gradient, built) in enumerate(kinds):
        config = TrainConfig(
            "completion", model, options, built, steps=1, batch=2, gradient=gradient, chunk_size=5, tensorboard=False
        )
        Trainer(build_task(config), config, tmp_path / "runs" / str(number), shown=False).run()
    assert len(write_report([tmp_path / "runs"], tmp_path / "report.html")) == 6
    text = (tmp_path / "report.html").read_text()
    for wanted in ("umbc+set-transformer (unbiased 5)", "NLL at 20", "Gradients of umbc", "data:image/gif"):
        assert wanted in text, wanted
    for name in (umbc, "umbc+anchors"):
        assert f"Completions by {name}" in text
    assert "NLL beyond that of umbc+set-transformer (full)" in text
    apart = {
        name: float(cell) for name, cell in re.findall(r"<tr><td>(\S+) [^<]*</td>.{0,200}?<td>(\d\.\de[+-]\d+)</td></tr>", text)
    }
    assert set(apart) == {"umbc+set-transformer", "umbc+anchors", "set-transformer", "deepsets"}
    assert "the one with the lowest NLL on these test images is shown" in text
    assert apart["umbc+set-transformer"] < 1e-4


def test_of_a_model_built_in_several_ways_the_best_is_shown(folder):
    task = Completion("folder", str(folder), side=8)

    def tested(model, nll, **options):
        config = TrainConfig("completion", model, {}, options)
        return evidence.Tested([FinishedRun(folder, config, {})], task, torch.full((2, 3), nll))

    found = {"a": tested("sse", 1.0), "b": tested("sse", 0.5, init="he"), "c": tested("fspool", 2.0), "d": tested("sse", 0.7)}
    assert list(evidence.best_of_each_model(found)) == ["b", "c"]


def test_differences_are_paired(folder):
    task = Completion("folder", str(folder), side=8, test_contexts=[5, 20])
    base = torch.randn(2, 400, generator=torch.Generator().manual_seed(0))
    worse = base + torch.tensor([[0.5], [0.1]]) + 0.01 * torch.randn(2, 400, generator=torch.Generator().manual_seed(1))
    page = Page("differences")
    elsewhere = Completion("folder", str(folder), side=8, test_contexts=[5, 20], test_seed=2)
    tested = {"a": (task, base), "b": (task, worse), "other contexts": (elsewhere, worse)}
    evidence.differences_table(page, {name: evidence.Tested([], *own) for name, own in tested.items()}, "a")
    found = re.findall(r"<td>([+-][\d.]+) ± ([\d.]+)</td>", "".join(page.parts))
    for (mean, error), shift in zip(found, (0.5, 0.1), strict=True):  # z below 4 for 400 images of deviation 0.01
        assert abs(float(mean) - shift) < 0.002 + 0.0005
        assert float(error) == 0.001


def test_memory_is_flat_for_consistent_models_only(folder):
    task = Completion("folder", str(folder), side=8)
    pixels = task.test_pixels(0, 1)
    for name, flat in (("umbc+set-transformer", True), ("deepsets", True), ("set-transformer", False), ("diff-em", False)):
        few, many = (evidence.kept_kilobytes(task.build(name), pixels[:, :size], 10) for size in (20, 60))
        assert (many < 1.05 * few) == flat, (name, few, many)


def test_revealed_pixels_are_those_of_the_image(folder):
    image = Completion("folder", str(folder), side=8).images["test"].pixels[:1]
    assert torch.equal(evidence.revealed(as_pixels(image)[0], 64, (3, 8, 8)), image[0] / 255)
    assert int((evidence.revealed(as_pixels(image)[0], 10, (3, 8, 8)) != 0.5).any(0).sum()) == 10
