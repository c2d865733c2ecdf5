"""The panel's own arithmetic: calibration, paired differences, ranks; and that its two halves have nothing in common."""

import hashlib
import math

import numpy as np
import pytest
from benchmarks.estimators_data import CHOOSE, MAKERS, REPORT, Sets, points, windows
from benchmarks.estimators_models import DEFAULTS, MODELS, PlainNetwork, moments, quantiles
from scipy import stats

from benchmarks import estimators
from setstream.integrations.sklearn import SetClassifier


def test_the_halves_are_all_data_sets_and_disjoint():
    assert not set(CHOOSE) & set(REPORT)
    assert set(CHOOSE) | set(REPORT) == set(MAKERS)


def test_calibration_error_of_certain_and_of_honest_answers():
    y = np.array([0, 1, 0, 1])

    def error(*folds):
        lines = [{"gaps": estimators.gaps(np.array(p), y[: len(p)]).tolist(), "test": len(p)} for p in folds]
        return estimators.calibration_error({(0, fold): line for fold, line in enumerate(lines)})

    assert error([[1.0, 0.0]] * 4) == pytest.approx(0.5)
    assert error([[0.5, 0.5]] * 4) == pytest.approx(0.0)
    assert error([[0.7, 0.3]], [[0.3, 0.7]]) == pytest.approx(0.2)  # one right, one wrong, both 0.7: the folds are one


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
    order, _ = estimators.ranks(found, ["a", "b"], list(MODELS))
    assert order == {model: float(len(MODELS) - place) for place, model in enumerate(MODELS)}
    assert list(order) == list(MODELS)[::-1]
    many = {(str(n), model): {(0, 0): {"score": place}} for n in range(12) for place, model in enumerate(MODELS)}
    assert estimators.ranks(many, [str(n) for n in range(12)], list(MODELS))[1] < 1e-9
    # Demšar (2006), table 5: q = 2.949 for seven models.
    assert estimators.critical_difference(7, 12) == pytest.approx(2.949 * math.sqrt(7 * 8 / (6 * 12)), rel=1e-3)


def test_tables_compare_the_same_folds(capsys):
    found = estimators.defaultdict(dict)
    for fold, scores in enumerate([(0.9, 0.6, 0.7), (0.8, 0.5, 0.7), (None, 1.0, 1.0)]):
        for model, score in zip(("setstream", "logistic", "boosting"), scores, strict=True):
            if score is not None:
                found["musk1", model][0, fold] = {"score": score, "train": 80, "test": 20, "seconds": 1.0}
    estimators.table(found, ["setstream", "logistic", "boosting"])
    shown = capsys.readouterr().out
    assert "| musk1 | 2 | 0.850 | 0.550 | 0.700 | +0.150 ± " in shown
    assert "Mean ranks over 1 sets: setstream 1.00, boosting 2.00, logistic 3.00" in shown


def test_only_fits_with_the_same_defaults_count(tmp_path):
    path = tmp_path / "lines.jsonl"
    line = '{"set": "a", "model": "%s", "folds": 5, "repeat": 0, "fold": %d, "defaults": %s}\n'
    path.write_text(line % ("setstream", 0, "1") + line % ("setstream", 1, "2") + line % ("logistic", 0, "null"))
    found = estimators.chosen(type("Arguments", (), {"results": path, "folds": 5, "defaults": 2}))
    assert list(found["a", "setstream"]) == [(0, 1)]
    assert list(found["a", "logistic"]) == [(0, 0)]


def test_other_defaults_have_another_version():
    """If this fails, the answers have changed: raise DEFAULTS and put the new hash here."""
    options = SetClassifier().get_params() | {"random_state": 0}
    plans = [
        SetClassifier(random_state=0)._plan([range(size)] * count) for count in (60, 500, 5000) for size in (10, 1000, 10**5)
    ]
    digest = hashlib.sha256(repr((sorted(options.items()), plans)).encode()).hexdigest()[:8]
    assert (DEFAULTS, digest) == (2, "0f0d16f0")


def test_a_stopped_panel_is_continued(tmp_path, monkeypatch):
    sets = [np.full((3, 2), float(number)) for number in range(10)]
    monkeypatch.setattr(estimators, "load", lambda name: Sets(name, sets, np.arange(10) % 2, False))
    options = {"sets": ["musk1"], "models": ["logistic"], "folds": 5, "repeats": 1, "results": tmp_path / "lines.jsonl"}
    estimators.run(type("Arguments", (), options | {"minutes": 0}))
    assert not options["results"].is_file()
    for _ in range(2):
        estimators.run(type("Arguments", (), options | {"minutes": math.inf}))
    lines = estimators.read(options["results"])
    assert [line["fold"] for line in lines] == list(range(5))
    assert all(0 <= line["score"] <= 1 and line["test"] == 2 for line in lines)


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
    estimators.picture(found, tmp_path / "ranks.svg", list(MODELS))
    drawn = (tmp_path / "ranks.svg").read_text()
    assert all(f"<!-- {model} " in drawn for model in MODELS)
