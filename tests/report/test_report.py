"""Reports: self-contained pages from run folders, figures and animations that hold what they claim."""

import io
import re

import pytest
import torch
from PIL import Image

from setstream.errors import ConfigurationError
from setstream.report import find_runs, write_report
from setstream.report.page import Page
from setstream.report.runs import by_label
from setstream.tasks.clustering import Clustering, partitions, sample
from setstream.tasks.clustering import report as evidence
from setstream.tasks.clustering import stream_figures as streams
from setstream.tasks.clustering.streams import disagreement, stream_ends
from setstream.training import TrainConfig, Trainer
from setstream.training.registry import build_task

TASK = {"points": 32, "test_sets": 4, "test_points": 16}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    kinds = [
        ("deepsets", 0, "unbiased", {}, {}),
        ("deepsets", 1, "unbiased", {}, {}),
        ("umbc+set-transformer", 0, "unbiased", {}, {}),
        ("umbc+set-transformer", 0, "full", {}, {}),
        ("umbc+set-transformer", 0, "unbiased", {"activation": "sigmoid"}, {}),
        ("set-transformer", 0, "subset", {}, {}),
        ("deepsets", 0, "unbiased", {}, {"dim": 3, "clusters": 5}),
    ]
    for number, (model, seed, gradient, options, other) in enumerate(kinds):
        config = TrainConfig(
            "clustering", model, TASK | other, options, steps=2, batch=2, seed=seed, gradient=gradient, tensorboard=False
        )
        Trainer(build_task(config), config, folder / str(number), shown=False).run()
    return folder


def test_the_report_is_one_page_that_needs_nothing_else(runs, tmp_path, monkeypatch):
    monkeypatch.setattr(evidence, "partition_variance", lambda: {"x": {1: (0.0, 0.0)}})
    monkeypatch.setattr(streams.streams_gif, "__defaults__", (2,))
    monkeypatch.setattr(evidence, "SIZES", [16, 32])
    monkeypatch.setattr(evidence, "PAPER_SCHEDULE", (2, TrainConfig("clustering", "deepsets").chunk_size))
    monkeypatch.setattr(evidence.add_evidence, "__kwdefaults__", {"em_sets": 2})
    out = tmp_path / "deep" / "report.html"
    assert len(write_report([runs], out, tmp_path / "figures")) == 7
    text = out.read_text()
    pictures = sorted(path.name for path in (tmp_path / "figures").iterdir())
    assert len(pictures) == text.count("data:image/")
    assert pictures[0] == "01-gap-to-the-oracle-while-training-2-steps.png"
    for wanted in (
        "deepsets (unbiased 8)",
        "2.43",
        "1.84",
        "Activations",
        "sigmoid",
        "Gradients, 2 steps",
        "beyond the full",
        "Four streams",
        "data:image/gif",
    ):
        assert wanted in text, wanted
    assert not re.search(r'(src|href)="(?!data:)', text)


def test_a_table_of_a_single_cell_with_markup_is_escaped():
    page = Page("a < b")
    page.table(["x"], [["<script>"]])
    page.code("<pre>")
    assert "<script>" not in page.html()
    assert "a &lt; b" in page.html()


def test_seeds_are_averaged(runs):
    labels = {run.label() for run in find_runs([runs])}
    assert len(labels) == 5


def test_seeds_of_two_stages_are_averaged(tmp_path):
    """Each seed's second stage begins with a folder of its own; with what another kind of run left, it is another kind."""
    for seed, first, second in ((0, "one", "two"), (1, "three", "four"), (0, "full", "five")):
        common = {"steps": 1, "batch": 2, "seed": seed, "tensorboard": False}
        config = TrainConfig("clustering", "deepsets", TASK, gradient="full" if first == "full" else "unbiased", **common)
        Trainer(build_task(config), config, tmp_path / first, shown=False).run()
        config = TrainConfig("clustering", "deepsets", TASK, init_from=str(tmp_path / first), **common)
        Trainer(build_task(config), config, tmp_path / second, shown=False).run()
    groups = by_label([run for run in find_runs([tmp_path]) if run.config.init_from])
    assert sorted(sorted(run.folder.name for run in own) for own in groups.values()) == [["five"], ["four", "two"]]


def test_folders_without_runs_are_an_error(tmp_path):
    with pytest.raises(ConfigurationError, match="no finished run"):
        find_runs([tmp_path])
    with pytest.raises(ConfigurationError, match="no folder"):
        find_runs([tmp_path / "none"])


def test_streams_agree_for_consistent_models_and_not_for_others():
    torch.manual_seed(0)
    models = {name: Clustering().build(name).eval() for name in ("umbc+set-transformer", "set-transformer")}
    drawn = sample(1, 60, generator=torch.Generator().manual_seed(0))
    ends = {name: stream_ends(model, drawn.points[0], drawn.labels[0]) for name, model in models.items()}
    assert disagreement(ends["umbc+set-transformer"], drawn.points) < 1e-4
    assert disagreement(ends["set-transformer"], drawn.points) > 1e-3
    gif = Image.open(io.BytesIO(streams.streams_gif(models, drawn, frames=3)))
    assert gif.n_frames == 3


def test_encoding_variance_is_zero_for_consistent_encoders_only():
    found = partitions.partition_variance(partitions=4, width=8, size=64)
    scale = found["Set Transformer"][4][0]
    assert scale > 1e-8
    assert all(variance < 1e-9 for variance, _ in found["UMBC + Set Transformer"].values())
    assert all(found[name][4][0] > 1e-8 for name in ("FSPool", "Diff EM"))
