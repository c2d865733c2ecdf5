"""The evidence of image completion, from tiny runs on pictures that we draw."""

import re

import pytest
import torch

from benchmarks import evidence_completion as evidence
from setstream.report import Page, find_runs
from setstream.report.runs import FinishedRun
from setstream.tasks.completion import Completion, as_pixels
from setstream.training import TrainConfig
from tests.tasks.pictures import write_pictures
from tests.tasks.runs import train_completion


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_pictures(tmp_path_factory.mktemp("pictures"))


def test_the_evidence_compares_gradients_and_chunk_sizes(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(evidence.progress_gif, "__defaults__", (2, 3))
    monkeypatch.setattr(evidence, "GALLERY", (5, 20))
    page = Page("evidence")
    evidence.add_evidence(page, find_runs([train_completion(folder, tmp_path / "runs")]))
    text = page.html()
    assert "Gradients of umbc" in text
    assert "data:image/gif" in text
    assert "NLL minus that of umbc+set-transformer (full)" in text
    apart = {
        name: float(cell) for name, cell in re.findall(r"<tr><td>(\S+) [^<]*</td>.{0,200}?<td>(\d\.\de[+-]\d+)</td></tr>", text)
    }
    assert set(apart) == {"umbc+set-transformer", "umbc+anchors", "set-transformer", "deepsets"}
    assert "the one with the lowest NLL on these test images is shown" in text
    assert apart["umbc+set-transformer"] < 1e-4


def test_revealed_pixels_are_those_of_the_image(folder):
    image = Completion("folder", str(folder), side=8).images["test"][:1]
    assert torch.equal(evidence.revealed(as_pixels(image)[0], 64, (3, 8, 8)), image[0] / 255)
    assert int((evidence.revealed(as_pixels(image)[0], 10, (3, 8, 8)) != 0.5).any(0).sum()) == 10


def test_of_a_model_built_in_several_ways_the_best_is_shown(folder):
    task = Completion("folder", str(folder), side=8)

    def tested(model, nll, **options):
        config = TrainConfig("completion", model, {}, options)
        return evidence.Tested([FinishedRun(folder, config)], task, torch.full((2, 3), nll))

    found = {"a": tested("sse", 1.0), "b": tested("sse", 0.5, init="he"), "c": tested("fspool", 2.0), "d": tested("sse", 0.7)}
    assert list(evidence.best_of_each_model(found)) == ["b", "c"]


def test_differences_are_paired(folder):
    task = Completion("folder", str(folder), side=8, test_contexts=[5, 20])
    base = torch.randn(2, 400, generator=torch.Generator().manual_seed(0))
    worse = base + torch.tensor([[0.5], [0.1]]) + 0.01 * torch.randn(2, 400, generator=torch.Generator().manual_seed(1))
    page = Page("differences")
    elsewhere = Completion("folder", str(folder), side=8, test_contexts=[5, 20], test_seed=2)
    tested = {"a": (task, base), "b": (task, worse), "other contexts": (elsewhere, worse)}
    evidence.add_differences(page, {name: evidence.Tested([], *losses) for name, losses in tested.items()}, "a")
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
