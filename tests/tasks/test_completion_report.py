"""The report of image completion, from tiny runs on pictures that we draw."""

from setstream.report import write_report
from tests.tasks.pictures import write_pictures
from tests.tasks.runs import train_completion


def test_the_report_has_table_curves_and_pictures(tmp_path):
    (tmp_path / "pictures").mkdir()
    runs = train_completion(write_pictures(tmp_path / "pictures"), tmp_path / "runs")
    assert len(write_report([runs], tmp_path / "report.html")) == 6
    text = (tmp_path / "report.html").read_text()
    for wanted in (
        "umbc+set-transformer (unbiased 5)",
        "NLL at 20",
        "NLL during training",
        "context, mean, uncertainty",
    ):
        assert wanted in text, wanted
    for name in ("umbc+set-transformer", "umbc+anchors"):
        assert f"Completions by {name}" in text
