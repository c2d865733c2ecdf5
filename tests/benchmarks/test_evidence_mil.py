"""The evidence of multiple instance learning: means over the folds of complete repeats."""

import statistics

from benchmarks import evidence_mil as evidence
from setstream.report import Page
from setstream.report.runs import FinishedRun
from setstream.training import TrainConfig


def fold(tmp_path, data, number, score, repeat=0, **options):
    task_options = {"data": data, "fold": number, "count": 3, "repeat": repeat}
    config = TrainConfig("mil", "ab-mil-released", task_options, options, steps=150)
    return FinishedRun(tmp_path, config, result={"metrics": {"accuracy": score, "auroc": score / 2}})


def test_rows_are_means_over_folds_of_complete_repeats(tmp_path):
    scores = [0.5, 0.7, 0.9]
    runs = [fold(tmp_path, "musk1", number, score) for number, score in enumerate(scores)]
    runs += [fold(tmp_path, "musk1", number, 0.1, repeat=1) for number in (0, 2)]  # one fold is missing
    runs += [fold(tmp_path, "musk1", number, 0.9, two_stream=False) for number in range(3)]
    runs += [fold(tmp_path, "ucsb", number, 0.4) for number in (0, 1)]
    half = 1.96 * statistics.stdev(scores) / 3**0.5
    text = f"0.700 [{0.7 - half:.3f}, {0.7 + half:.3f}]"
    rows = evidence.rows_of(runs)
    assert [row[:4] for row in rows] == [
        ["musk1", "ab-mil-released, one stream", "1", "150"],  # the better one first
        ["musk1", "ab-mil-released, two streams", "1", "150"],
    ]
    assert rows[1][4] == text


def test_passes_are_compared_fold_by_fold(tmp_path):
    runs = [fold(tmp_path, "musk1", number, score) for number, score in enumerate([0.5, 0.7, 0.9])]
    runs += [fold(tmp_path, "musk1", number, score, passes=2) for number, score in enumerate([0.6, 0.8, 1.0])]
    runs += [fold(tmp_path, "ucsb", number, 0.5, passes=2) for number in range(3)]  # not run with one pass
    runs += [fold(tmp_path, "musk1", 0, 0.0, repeat=1, passes=2)]  # an incomplete repeat
    assert evidence.differences(runs) == [["musk1", "ab-mil-released", "2", "3", "+0.100 ± 0.000", "+0.050 ± 0.000"]]
    page = Page("evidence")
    evidence.add_evidence(page, runs)
    assert page.html().count("ab-mil-released, two streams, 2 passes<") == 2  # of musk1 and ucsb


def test_activations_have_a_table_of_their_own(tmp_path):
    runs = [fold(tmp_path, "musk1", number, 0.5) for number in range(3)]
    runs += [fold(tmp_path, "musk1", number, 0.6, activation="slot-sigmoid", normalise=False) for number in range(3)]
    page = Page("evidence")
    evidence.add_evidence(page, runs)
    text = page.html()
    assert text.count("two streams, slot-sigmoid, summed") == 1
    assert text.count("ab-mil-released, two streams<") == 2  # the default activation is in both tables
