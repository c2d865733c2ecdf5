"""The report of clustering runs, and its streams."""

import io
import re

import pytest
import torch
from PIL import Image

from setstream.report import Page, write_report
from setstream.tasks.clustering import Clustering, sample, task
from setstream.tasks.clustering.task import disagreement, stream_ends
from tests.tasks.runs import train_clustering


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    return train_clustering(tmp_path_factory.mktemp("runs"))


def test_the_report_is_one_page_that_needs_nothing_else(runs, tmp_path, monkeypatch):
    monkeypatch.setattr(task, "FRAMES", 2)
    out = tmp_path / "deep" / "report.html"
    assert len(write_report([runs], out, tmp_path / "figures")) == 7
    text = out.read_text()
    pictures = sorted(path.name for path in (tmp_path / "figures").iterdir())
    assert len(pictures) == text.count("data:image/")
    assert pictures[0] == "01-gap-to-the-oracle-during-training.png"
    for wanted in ("deepsets (unbiased 8)", "gap to oracle", "activation=sigmoid", "Four streams", "data:image/gif"):
        assert wanted in text, wanted
    assert not re.search(r'(src|href)="(?!data:)', text)


def test_streams_agree_for_consistent_models_and_not_for_others(monkeypatch):
    torch.manual_seed(0)
    models = {name: Clustering().build(name).eval() for name in ("umbc+set-transformer", "set-transformer")}
    drawn = sample(1, 60, generator=torch.Generator().manual_seed(0))
    ends = {name: stream_ends(model, drawn.points[0], drawn.labels[0]) for name, model in models.items()}
    assert disagreement(ends["umbc+set-transformer"], drawn.points) < 1e-4
    assert disagreement(ends["set-transformer"], drawn.points) > 1e-3
    monkeypatch.setattr(task, "FRAMES", 3)
    gif = Image.open(io.BytesIO(task.add_streams(Page("streams"), models, points=20)[1]))
    assert gif.n_frames == 3
