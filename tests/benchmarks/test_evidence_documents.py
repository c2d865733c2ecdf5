"""The evidence of documents, from tiny runs on texts that we write."""

import torch

from benchmarks import evidence_documents as evidence
from setstream.report import Page, find_runs
from tests.tasks.test_documents import bert, folder, model, task
from tests.tasks.test_documents_report import runs

__all__ = ["bert", "folder", "runs", "task"]  # fixtures


def test_gradients_of_one_schedule_and_words_of_slots(runs):
    found = find_runs([runs])
    assert {run.folder.name for run in evidence.last_stages(found)} == {run.folder.name for run in found} - {"one"}
    with_slots = [run for run in found if run.config.model in evidence.WITH_SLOTS]
    assert {run.folder.name for run in evidence.same_schedule(with_slots)} == {"one", "subset", "subset-14"}
    page = Page("evidence")
    evidence.add_evidence(page, found)
    text = page.html()
    for wanted in (
        "umbc+bert (unbiased 7",
        "umbc+bert (subset 14",
        "size of the gradient set",
        "MiB kept",
        "1 + 1",
        "length of the document",
    ):
        assert wanted in text, wanted
    assert text.count("Words that slots attend to") == 2 * 3  # alternative text and caption of three documents


def test_weights_of_a_words_places_add_up(task):
    umbc = model(task, "umbc+bert")
    document = torch.tensor([7, 9, 7, 11, 7])
    ids, weights = evidence.word_weights(umbc, document)
    assert ids.tolist() == [7, 9, 11]
    torch.testing.assert_close(weights.sum(1), torch.ones(5))
    once = umbc.encoder.attention(document[None], umbc.encoder.update(None, document[None]))[0, 0]
    torch.testing.assert_close(weights[:, 0], (once[:, [0, 2, 4]].sum(1) / once.sum(1)).detach())
