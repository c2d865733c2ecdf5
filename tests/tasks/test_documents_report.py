"""The report of documents, from tiny runs on texts that we write."""

import pytest

from setstream.report import write_report
from setstream.training import TrainConfig
from tests.tasks.runs import train
from tests.tasks.test_documents import SMALL, bert, folder, task

__all__ = ["bert", "folder", "task"]  # fixtures
KINDS = [
    ("one", "umbc+bert", "unbiased", 7),
    ("two", "umbc+bert", "unbiased", 7),
    ("subset", "umbc+bert", "subset", 7),
    ("subset-14", "umbc+bert", "subset", 14),
    ("tobert", "tobert", "full", 7),
    ("anchors", "umbc+anchors+bert", "unbiased", 7),
    ("anchors-14", "umbc+anchors+bert", "unbiased", 14),
]


@pytest.fixture
def runs(task, folder, bert, tmp_path):
    """Runs of one step; the second begins with the weights of the first."""
    options = {"corpus": "eurlex", "folder": folder, "bert": bert}
    for name, kind, gradient, size in KINDS:
        begin = {"init_from": str(tmp_path / "runs" / "one")} if name == "two" else {}
        config = TrainConfig(
            *("documents", kind, options, SMALL[kind]),
            **({"steps": 1, "batch": 2, "gradient": gradient, "chunk_size": size, "tensorboard": False} | begin),
        )
        train(config, tmp_path / "runs" / name, task)
    return tmp_path / "runs"


def test_the_report_has_table_and_figures(runs, tmp_path):
    assert len(write_report([runs], tmp_path / "report.html")) == 7
    text = (tmp_path / "report.html").read_text()
    for wanted in ("Documents: eurlex", "umbc+bert (subset 14", "micro F1, tuned", "micro F1 during training"):
        assert wanted in text, wanted
