"""Reports: pages, and finished runs in groups."""

import pytest

from setstream.errors import ConfigurationError
from setstream.report import find_runs
from setstream.report.page import Page
from setstream.report.runs import by_label, mean_and_sd
from setstream.training import TrainConfig, Trainer
from setstream.training.task import build_task
from tests.tasks.runs import SMALL_CLUSTERING, train_clustering


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    return train_clustering(tmp_path_factory.mktemp("runs"))


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
        config = TrainConfig(
            "clustering", "deepsets", SMALL_CLUSTERING, gradient="full" if first == "full" else "unbiased", **common
        )
        Trainer(build_task(config), config, tmp_path / first, shown=False).run()
        config = TrainConfig("clustering", "deepsets", SMALL_CLUSTERING, init_from=str(tmp_path / first), **common)
        Trainer(build_task(config), config, tmp_path / second, shown=False).run()
    groups = by_label([run for run in find_runs([tmp_path]) if run.config.init_from])
    assert sorted(sorted(run.folder.name for run in group) for group in groups.values()) == [["five"], ["four", "two"]]


def test_folders_without_runs_are_an_error(tmp_path):
    with pytest.raises(ConfigurationError, match="no finished run"):
        find_runs([tmp_path])
    with pytest.raises(ConfigurationError, match="no folder"):
        find_runs([tmp_path / "none"])


def test_means_have_a_standard_deviation_if_there_are_several_values():
    assert (mean_and_sd([1.0, 2.0]), mean_and_sd([1.0]), mean_and_sd([])) == ("1.500 ± 0.707", "1.000", "")
