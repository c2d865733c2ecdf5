"""The report of image completion, from tiny runs on pictures that we draw."""

import pytest
import torch

from setstream.report import write_report
from setstream.tasks.completion import Completion, as_pixels, report
from tests.tasks.pictures import write_pictures
from tests.tasks.runs import train_completion


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_pictures(tmp_path_factory.mktemp("pictures"))


def test_the_report_has_table_figures_gallery_and_animation(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(report.progress_gif, "__defaults__", (2, 3))
    monkeypatch.setattr(report, "GALLERY", (5, 20))
    runs = train_completion(folder, tmp_path / "runs")
    assert len(write_report([runs], tmp_path / "report.html")) == 6
    text = (tmp_path / "report.html").read_text()
    for wanted in ("umbc+set-transformer (unbiased 5)", "NLL at 20", "NLL by the size of the context", "data:image/gif"):
        assert wanted in text, wanted
    for name in ("umbc+set-transformer", "umbc+anchors"):
        assert f"Completions by {name}" in text


def test_revealed_pixels_are_those_of_the_image(folder):
    image = Completion("folder", str(folder), side=8).images["test"].pixels[:1]
    assert torch.equal(report.revealed(as_pixels(image)[0], 64, (3, 8, 8)), image[0] / 255)
    assert int((report.revealed(as_pixels(image)[0], 10, (3, 8, 8)) != 0.5).any(0).sum()) == 10
