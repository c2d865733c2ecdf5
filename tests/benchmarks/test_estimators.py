"""The panel's own arithmetic: calibration, paired differences, ranks; and that its two halves have nothing in common."""

import math

import numpy as np
import pytest
from benchmarks.estimators_data import CHOOSE, MAKERS, REPORT, points, windows
from benchmarks.estimators_models import MODELS, PlainNetwork, moments, quantiles
from scipy import stats

from benchmarks import estimators


def test_the_halves_are_all_data_sets_and_disjoint():
    assert not set(CHOOSE) & set(REPORT)
    assert set(CHOOSE) | set(REPORT) == set(MAKERS)


def test_calibration_error_of_certain_and_of_honest_answers():
    y = np.array([0, 1, 0, 1])
    assert estimators.calibration_error(np.array([[1.0, 0.0]] * 4), y) == pytest.approx(0.5)
    assert estimators.calibration_error(np.array([[0.5, 0.5]] * 4), y) == pytest.approx(0.0)


def test_a_difference_has_the_corrected_interval():
    lines = [{(0, fold): {"score": score, "test": 20, "train": 80} for fold, score in enumerate(scores)} for scores in (
        [0.9, 0.8, 0.7], [0.8, 0.8, 0.5]
    )]  # fmt: skip
    by, width = estimators.difference(*lines)
    assert by == pytest.approx(0.1)
    assert width == pytest.approx(math.sqrt(0.01 * (1 / 3 + 20 / 80)) * stats.t.ppf(0.975, 2))


def test_ranks_are_means_over_data_sets_and_one_is_best():
    found = {
        (name, model): {(0, 0): {"score": score + place / 10}}
        for name, score in (("a", 0.0), ("b", 5.0))
        for place, model in enumerate(MODELS)
    }
    assert estimators.ranks(found, ["a", "b"]) == {model: float(len(MODELS) - place) for place, model in enumerate(MODELS)}


def test_only_fits_of_the_same_code_count(tmp_path, monkeypatch):
    path = tmp_path / "lines.jsonl"
    line = '{"set": "a", "model": "%s", "folds": 5, "repeat": 0, "fold": %d, "code": %s}\n'
    path.write_text(line % ("setstream", 0, '"old"') + line % ("setstream", 1, '"new"') + line % ("logistic", 0, "null"))
    monkeypatch.setattr(estimators, "code", lambda: "new")
    arguments = type("Arguments", (), {"results": path, "folds": 5, "code": None})
    found = estimators.chosen(arguments)
    assert list(found["a", "setstream"]) == [(0, 1)]
    assert list(found["a", "logistic"]) == [(0, 0)]


def test_summaries_windows_and_points_have_their_shapes():
    sets = [np.arange(6.0).reshape(3, 2), np.ones((1, 2))]
    assert moments(sets).shape == (2, 9)
    assert quantiles(sets).shape == (2, 15)
    assert windows(np.arange(10.0)[:, None], 4, 3).tolist() == [[0, 1, 2, 3], [3, 4, 5, 6], [6, 7, 8, 9]]
    assert windows(np.arange(2.0)[:, None], 4, 3).tolist() == [[0, 1, 1, 1]]
    assert points(np.array([[[0.0, 0.5], [1.0, 0.1]]]))[0].tolist() == [[1.0, 0.0, 0.5], [0.0, 1.0, 1.0]]


@pytest.mark.parametrize("kind", ["deepsets", "ab-mil"])
def test_the_plain_networks_learn(kind):
    rng = np.random.default_rng(0)
    y = np.arange(40) % 2
    sets = [(rng.normal(size=(rng.integers(2, 9), 2)) + 2 * label).astype(np.float32) for label in y]
    model = PlainNetwork(kind, False, 0).fit(sets, y)
    assert (model.predict_proba(sets).argmax(1) == y).mean() > 0.85


def test_the_picture_shows_every_model(tmp_path):
    found = {
        (name, model): {(0, 0): {"score": place + number}}
        for number, name in enumerate(REPORT[:3])
        for place, model in enumerate(MODELS)
    }
    found = estimators.defaultdict(dict, found)
    estimators.picture(found, tmp_path / "ranks.svg")
    drawn = (tmp_path / "ranks.svg").read_text()
    assert all(f"<!-- {model} " in drawn for model in MODELS)
