"""The report of documents, from tiny runs on texts that we write."""

import torch

from setstream.report import write_report
from setstream.report.runs import FinishedRun, find_runs
from setstream.tasks.documents import report as evidence
from setstream.training import TrainConfig, Trainer
from tests.tasks.test_documents import SMALL, bert, folder, model, task

__all__ = ["bert", "folder", "task"]  # fixtures


def test_the_report_has_table_figures_and_words(task, folder, bert, tmp_path):
    options = {"corpus": "eurlex", "folder": folder, "bert": bert}
    kinds = [
        ("one", "umbc+bert", "unbiased", 7),
        ("two", "umbc+bert", "unbiased", 7),
        ("subset", "umbc+bert", "subset", 7),
        ("subset-14", "umbc+bert", "subset", 14),
        ("tobert", "tobert", "full", 7),
        ("anchors", "umbc+anchors+bert", "unbiased", 7),
        ("anchors-14", "umbc+anchors+bert", "unbiased", 14),
    ]
    runs = tmp_path / "runs"
    for name, kind, gradient, size in kinds:
        begin = {"init_from": str(runs / "one")} if name == "two" else {}
        config = TrainConfig(
            *("documents", kind, options, SMALL[kind]),
            **({"steps": 1, "batch": 2, "gradient": gradient, "chunk_size": size, "tensorboard": False} | begin),
        )
        Trainer(task, config, runs / name, shown=False).run()
    found = find_runs([runs])
    assert {run.folder.name for run in evidence.last_stages(found)} == {name for name, *_ in kinds} - {"one"}
    umbc = [run for run in found if run.config.model in evidence.WITH_SLOTS]
    assert {run.folder.name for run in evidence.same_schedule(umbc)} == {"one", "subset", "subset-14"}
    assert len(write_report([runs], tmp_path / "report.html")) == 7
    text = (tmp_path / "report.html").read_text()
    for wanted in (
        "Documents: eurlex",
        "umbc+bert (subset 14",
        "MiB kept",
        "1 + 1",  # steps of both stages
        "length of the document",
        "size of the gradient set",
    ):
        assert wanted in text, wanted
    main, gradients = text.split("size of the gradient set")[0].split("<table")[2:4]
    for label, places in {"umbc+bert (unbiased 7": (True, True), "umbc+bert (subset 14": (False, True)}.items():
        assert (label in main, label in gradients) == places, label  # of the three, only `two` has a second stage
    assert text.count("Words that slots attend to") == 2 * 3  # alternative text and caption of three documents


def test_the_time_of_a_resumed_run_is_that_of_all_its_steps(tmp_path):
    config = TrainConfig("documents", "deepsets")
    assert FinishedRun(tmp_path, config, {"step": 400, "steps_timed": 100, "seconds": 30.0}).seconds() == 120.0
    assert FinishedRun(tmp_path, config, {"step": 400, "seconds": 30.0}).seconds() == 30.0


def test_weights_of_a_words_places_add_up(task):
    own = model(task, "umbc+bert")
    document = torch.tensor([7, 9, 7, 11, 7])
    ids, weights = evidence.word_weights(own, document)
    assert ids.tolist() == [7, 9, 11]
    torch.testing.assert_close(weights.sum(1), torch.ones(5))
    once = own.encoder.attention(document[None], own.encoder.update(None, document[None]))[0, 0]
    torch.testing.assert_close(weights[:, 0], (once[:, [0, 2, 4]].sum(1) / once.sum(1)).detach())
