"""The evidence of clustering: gradients and activations of runs, EM, and consistency."""

import torch

from benchmarks import evidence_clustering as evidence
from setstream.report import Page, find_runs
from setstream.tasks.clustering import sample
from tests.tasks.runs import train_clustering


def test_gradients_and_activations_are_compared(tmp_path, monkeypatch):
    monkeypatch.setattr(evidence, "SIZES", [16, 32])
    monkeypatch.setattr(evidence, "partition_variance", lambda partitions: {"x": {1: 0.0}})
    page = Page("evidence")
    evidence.add_evidence(page, find_runs([train_clustering(tmp_path)]), em_sets=2)
    text = page.html()
    assert "kB kept" in text
    for wanted in ("Activations, 2 steps", "sigmoid", "Gradients, 2 steps", "minus the full gradient", "EM", "variance of"):
        assert wanted in text, wanted


def test_em_comes_close_to_the_oracle():
    drawn = sample(5, 400, generator=torch.Generator().manual_seed(2))
    gap = evidence.em_nll(drawn.points, starts=5) - drawn.oracle()
    assert float(gap.mean()) < 0.05


def test_encoding_variance_is_zero_for_consistent_encoders_only():
    found = evidence.partition_variance(partitions=4, width=8, size=64)
    scale = found["Set Transformer"][4]
    assert scale > 1e-8
    assert all(variance < 1e-9 for variance in found["UMBC + Set Transformer"].values())
    assert all(found[name][4] > 1e-8 for name in ("FSPool", "Diff EM"))
