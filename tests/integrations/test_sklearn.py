"""Estimators over sets: scikit-learn's own checks, every form of X, and what a fit promises."""

import copy
import pickle
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn.base import clone
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import GridSearchCV, StratifiedKFold, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils import estimator_checks
from sklearn.utils.estimator_checks import parametrize_with_checks

import setstream as ss
from setstream.data import ArraySource, NpySource
from setstream.errors import ConfigurationError, NonFiniteError, ShapeError
from setstream.integrations.sklearn import SetClassifier, SetFeaturizer, SetRegressor
from setstream.integrations.sklearn.fitting import class_loss
from setstream.training import Encode

SMALL = {"widths": (16,), "num_slots": 4, "heads": 2, "learning_rate": 5e-3, "epochs": 1, "min_steps": 30, "random_state": 0}
SMALL |= {"members": 2}
TINY = SMALL | {"widths": (8,), "num_slots": 2, "dropout": 0.0, "weight_decay": 0.0, "batch_size": 32, "learning_rate": 1e-2}

WEIGHTS = "batches are drawn at random: a set of weight two is another batch than two sets of weight one"
EXPECTED = {f"check_sample_weight_equivalence_on_{kind}_data": WEIGHTS for kind in ("dense", "sparse")}
INVARIANCE = ("check_methods_subset_invariance", "check_methods_sample_order_invariance")


@pytest.fixture
def run(monkeypatch):
    """Runs a check. Those of invariance allow 1e-7 or less, but float32 products over another batch differ by up to 1e-6."""

    def allow(compare):
        return lambda *arrays, **options: compare(*arrays, **(options | {"atol": 1e-5}))

    def run(check, estimator):
        if check.func.__name__ in INVARIANCE:
            for name in ("assert_allclose", "assert_allclose_dense_sparse"):
                monkeypatch.setattr(estimator_checks, name, allow(getattr(estimator_checks, name)))
        check(estimator)

    return run


@parametrize_with_checks([SetFeaturizer(**(TINY | {"min_steps": 3}))])
def test_scikit_learns_own_checks(estimator, check, run):
    run(check, estimator)


@pytest.mark.slow
@parametrize_with_checks(
    [SetClassifier(**TINY), SetRegressor(**(TINY | {"min_steps": 120}))], expected_failed_checks=lambda estimator: EXPECTED
)
def test_scikit_learns_own_checks_of_what_must_learn(estimator, check, run):
    run(check, estimator)


def needles(count=60, seed=0):
    """Bags of 3 to 12 normal elements; in every other bag one element lies far off."""
    rng = np.random.default_rng(seed)
    bags = [rng.normal(size=(rng.integers(3, 13), 4)) * [1, 10, 100, 0.1] + [5, 0, 1000, 0] for _ in range(count)]
    y = np.arange(count) % 2
    for bag, label in zip(bags, y, strict=True):
        bag[0] += label * np.array([4.0, 40.0, 0.0, 0.0])
    return bags, np.array(["plain", "needle"])[y]


@pytest.fixture(scope="module")
def fitted():
    bags, y = needles()
    return SetClassifier(**(SMALL | {"min_steps": 150})).fit(bags, y)


def test_bags_with_needles_are_found(fitted):
    bags, y = needles(200, seed=1)
    # Chance is 100 of 200 with a deviation of 7.
    assert fitted.score(bags, y) > 0.85
    assert fitted.classes_.tolist() == ["needle", "plain"]
    assert fitted.n_features_in_ == 4
    probabilities = fitted.predict_proba(bags)
    np.testing.assert_allclose(probabilities.sum(1), 1.0, atol=1e-12)
    assert ((fitted.decision_function(bags) > 0) == (fitted.predict(bags) == "plain")).all()


@pytest.mark.parametrize("names", [("plain", "strange"), ("usual", "odd")], ids=["sorts last", "sorts first"])
def test_a_few_elements_decide_whichever_class_they_stand_for(names):
    found = []
    for seed in range(3):
        bags, y = needles(60, seed=seed)
        tests, wanted = needles(200, seed=10 + seed)
        named = np.array(names)
        model = SetClassifier(**(SMALL | {"min_steps": 150, "random_state": seed})).fit(
            bags, named[(y == "needle").astype(int)]
        )
        found.append(model.score(tests, named[(wanted == "needle").astype(int)]))
    # Chance is 0.5 with a deviation of 0.035 a seed.
    assert min(found) > 0.8, found


def test_the_network_by_itself_answers_as_the_estimator_does(fitted):
    bags, y = needles(12, seed=3)
    numbers = 1000 + 50 * np.arange(24.0).reshape(12, 2)
    fits = {
        "predict_proba": fitted,
        "predict": SetRegressor(**SMALL).fit(bags, numbers),
        "transform": SetFeaturizer(**SMALL).fit(bags, y),
    }
    for method, estimator in fits.items():
        wanted = getattr(estimator, method)(bags[:1])
        stream = estimator.model_.stream()
        for piece in np.array_split(bags[0], 3):
            stream.update(piece[None])
        np.testing.assert_allclose(stream.predict().numpy(), wanted, rtol=1e-4, atol=1e-4)
    regressor = SetRegressor(**SMALL).partial_fit(bags, numbers[:, 0])
    np.testing.assert_allclose(regressor.model_([bags[0]]).detach()[0], regressor.predict(bags[:1]), rtol=1e-4)
    assert fitted.model_.options["classes"] == ["needle", "plain"]


def test_every_form_of_sets_gives_the_same_answer(fitted, tmp_path):
    bags, _ = needles(10, seed=2)
    wanted = fitted.predict_proba(bags)
    for number, bag in enumerate(bags):
        np.save(tmp_path / f"{number}.npy", bag)
    ptr = np.cumsum([0, *map(len, bags)])
    objects = np.empty(10, dtype=object)
    objects[:] = bags
    forms = [
        (np.concatenate(bags), ptr),
        [torch.from_numpy(bag) for bag in bags],
        [bag.astype(np.float32) for bag in bags],
        [bag.tolist() for bag in bags],
        [ArraySource(bag) for bag in bags],
        [NpySource(tmp_path / f"{number}.npy") for number in range(10)],
        ss.data.SetDataset([ArraySource(bag, id=str(number)) for number, bag in enumerate(bags)]),
        objects,
    ]
    for form in forms:
        np.testing.assert_allclose(fitted.predict_proba(form), wanted, atol=1e-4)
    dense = np.stack([bag[:3] for bag in bags])
    np.testing.assert_allclose(fitted.predict_proba(dense), fitted.predict_proba(list(dense)), atol=1e-5)
    rows = dense[:, 0]
    with pytest.warns(UserWarning, match=r"a table: 10 sets of one element each.*If X is one set, pass \[X\]"):
        found = fitted.predict_proba(rows)
    np.testing.assert_allclose(found, fitted.predict_proba(list(dense[:, :1])), atol=1e-5)


def test_chunks_change_neither_the_gradient_nor_the_answer(fitted):
    bags, y = needles(8)
    sets, target = [ArraySource(bag) for bag in bags], torch.from_numpy((y == "plain").astype(np.int64))
    found = {}
    for chunk_size in (1000, 2):  # the full gradient of whole sets; the exact one, two elements at a time
        model = copy.deepcopy(fitted.model_).eval()
        class_loss(model, Encode("auto", chunk_size, 1), sets, target).mean().backward()
        found[chunk_size] = torch.cat([p.grad.flatten() for p in model.parameters()])
    assert found[1000].norm() > 0
    assert (found[1000] - found[2]).norm() < 1e-4 * found[1000].norm()
    cut = clone(fitted).set_params(chunk_size=2, min_steps=1).fit(bags[:2], y[:2])
    cut.model_ = fitted.model_
    np.testing.assert_allclose(cut.predict_proba(bags), fitted.predict_proba(bags), atol=1e-4)


@pytest.mark.parametrize("gradient", ["full", "exact", "unbiased", "importance", "subset"])
def test_every_gradient_trains(gradient):
    bags, y = needles(40)
    model = SetClassifier(**(SMALL | {"min_steps": 40}), gradient=gradient, chunk_size=4, grad_chunks=2).fit(bags, y)
    assert model.loss_curve_[-1] < model.loss_curve_[0]


def test_standardisation_is_that_of_all_elements():
    rng = np.random.default_rng(0)
    sets = [rng.normal(1e4, 3.0, size=(int(n), 3)) for n in (1, 0, 700, 5, 64)]
    rows = np.concatenate(sets)
    fitted = ss.nn.Standardise(3).fit(sets, 16)
    np.testing.assert_allclose(fitted.mean, rows.mean(0), rtol=1e-7)
    np.testing.assert_allclose(fitted.scale, rows.std(0), rtol=1e-6)
    assert ss.nn.Standardise(1).fit([np.full((9, 1), 0.1)], 4).scale.tolist() == [1.0]


def test_partial_fit_goes_on_and_knows_its_classes():
    bags, y = needles(40)
    model = SetClassifier(**SMALL)
    with pytest.raises(ConfigurationError, match="at least two classes"):
        clone(model).partial_fit(bags[:1], y[:1])
    model.partial_fit(bags[:1], y[:1], classes=["plain", "needle"])
    first = model.score(bags, y)
    for _ in range(25):
        model.partial_fit(bags, y)
    assert model.score(bags, y) > max(first, 0.85)
    assert pickle.loads(pickle.dumps(model)).partial_fit(bags, y).n_iter_ == model.n_iter_ + 1
    with pytest.raises(ConfigurationError, match="the classes are"):
        model.partial_fit(bags, y, classes=["plain", "other"])
    with pytest.raises(ConfigurationError, match=r"y holds \['other'\]"):
        model.partial_fit(bags[:1], ["other"])
    steps = SetClassifier(**SMALL).fit(bags, y)
    before = steps.predict_proba(bags)
    after = steps.partial_fit(bags, y).predict_proba(bags)  # goes on from the fit, and does not begin anew
    assert 0 < np.abs(after - before).max() < 0.5


def test_same_seed_same_model_and_nobodys_random_numbers_move():
    bags, y = needles(16)
    state = torch.random.get_rng_state()
    one, two = (SetClassifier(**SMALL).fit(bags, y) for _ in range(2))
    assert torch.equal(torch.random.get_rng_state(), state)
    assert np.array_equal(one.predict_proba(bags), two.predict_proba(bags))
    other = SetClassifier(**(SMALL | {"random_state": 1})).fit(bags, y)
    assert not np.array_equal(one.predict_proba(bags), other.predict_proba(bags))
    again = pickle.loads(pickle.dumps(one))
    assert np.array_equal(one.predict_proba(bags), again.predict_proba(bags))


def test_early_stopping_keeps_the_best(capsys):
    bags, y = needles(40)
    options = SMALL | {"epochs": 200, "learning_rate": 2e-2}
    model = SetClassifier(**options, early_stopping=True, n_iter_no_change=3, verbose=1)
    model.set_params(members=1, validation_fraction=0.25).fit(bags, y)
    assert model.n_iter_ == len(model.validation_losses_) < 200
    *before, _, _, _ = model.validation_losses_  # the last three did not improve by more than 1e-4
    assert min(before) < min(model.validation_losses_) + 2e-4
    assert "SetClassifier  step" in capsys.readouterr().out
    with pytest.raises(ConfigurationError, match="cannot hold sets out"):
        SetClassifier(**(options | {"members": 4}), early_stopping=True).fit(bags[:2], y[:2])


def test_weights_of_classes_and_sets_move_the_decision():
    rng = np.random.default_rng(0)
    sets = [rng.normal(size=(4, 2)) for _ in range(40)]  # nothing to learn but how often each class comes
    y = np.array([0] * 30 + [1] * 10)

    def mean_of_one(options, **fit):
        return SetClassifier(**(SMALL | {"min_steps": 60}), **options).fit(sets, y, **fit).predict_proba(sets)[:, 1].mean()

    plain = mean_of_one({})
    assert plain < 0.4
    assert mean_of_one({"class_weight": "balanced"}) > plain + 0.1
    assert mean_of_one({"class_weight": {0: 1, 1: 9}}) > plain + 0.2
    assert mean_of_one({}, sample_weight=np.where(y == 1, 9.0, 1.0)) > plain + 0.2


def test_three_classes_and_several_numbers():
    rng = np.random.default_rng(0)
    y = np.arange(60) % 3
    sets = [rng.normal(size=(6, 2)) + 3 * label for label in y]
    model = SetClassifier(**(SMALL | {"min_steps": 120})).fit(sets, y)
    assert model.predict_proba(sets).shape == model.decision_function(sets).shape == (60, 3)
    assert model.score(sets, y) > 0.9
    numbers = np.stack([[one.mean(), one.std()] for one in sets]) * [1.0, 1000.0]
    regressor = SetRegressor(**(SMALL | {"min_steps": 200, "dropout": 0.0})).fit(sets, numbers)
    assert regressor.predict(sets).shape == (60, 2)
    assert regressor.fit(sets, numbers[:, 0]).score(sets, numbers[:, 0]) > 0.9
    assert regressor.predict(sets).shape == (60,)


def test_grid_search_and_cross_validation_over_lists():
    bags, y = needles(24)
    search = GridSearchCV(SetClassifier(**SMALL), {"learning_rate": [1e-5, 5e-3], "num_slots": [2]}, cv=2).fit(bags, y)
    assert search.best_params_["num_slots"] == 2
    assert len(search.predict(bags)) == 24
    assert len(cross_val_score(SetClassifier(**SMALL), bags, y, cv=3, error_score="raise")) == 3


def test_features_in_a_pipeline_with_and_without_labels():
    rng = np.random.default_rng(0)
    y = np.arange(60) % 2
    sets = [rng.normal(size=(30, 2)) * (1 + label) for label in y]
    for use_labels in (True, False):
        features = SetFeaturizer(**(SMALL | {"min_steps": 120})).fit(sets, y if use_labels else None)
        rows = features.transform(sets)
        assert rows.shape == (60, 16) == (60, len(features.get_feature_names_out()))
        held = make_pipeline(StandardScaler(), LogisticRegression()).fit(rows[:40], y[:40]).score(rows[40:], y[40:])
        assert held >= 0.85, use_labels
    line = make_pipeline(SetFeaturizer(**SMALL), StandardScaler(), LogisticRegression()).fit(sets, y)
    assert line.score(sets, y) > 0.8
    assert SetFeaturizer(**SMALL).fit(sets, np.linspace(0, 1, 60)).transform(sets).shape == (60, 16)


def test_a_set_without_elements_alone_is_as_in_company(fitted):
    bags, _ = needles(6, seed=4)
    nothing = np.zeros((0, 4))
    regressor = SetRegressor(**SMALL).fit(bags, np.arange(6.0))
    for estimator, method in ((fitted, "predict_proba"), (regressor, "predict")):
        answer = getattr(estimator, method)
        np.testing.assert_allclose(answer([nothing])[0], answer([bags[0], nothing, bags[1]])[1], rtol=1e-5)
        fresh = estimator.model_.stream().predict()
        np.testing.assert_allclose(np.asarray(fresh).reshape(-1), np.asarray(answer([nothing])).reshape(-1), rtol=1e-4)


def test_arrays_may_lie_backwards_or_come_in_frames(fitted):
    pandas = pytest.importorskip("pandas")
    bags, _ = needles(3, seed=5)
    wanted = fitted.predict_proba(bags)
    for forms in ([bag[::-1] for bag in bags], [pandas.DataFrame(bag) for bag in bags], [bag.astype(">f8") for bag in bags]):
        np.testing.assert_allclose(fitted.predict_proba(forms), wanted, atol=1e-5)
        stream = fitted.model_.stream()
        stream.update([forms[0]])
        np.testing.assert_allclose(stream.predict(), wanted[:1], atol=1e-5)
    with pytest.raises(ShapeError, match=r"set 0 must hold real numbers; got object in the columns name: convert it"):
        fitted.predict([pandas.DataFrame(bags[0]).assign(name="x")])


def test_empty_sets_are_sets():
    bags, y = needles(20)
    bags[3] = np.zeros((0, 4))
    assert np.isfinite(SetClassifier(**SMALL).fit(bags, y).predict_proba(bags)).all()


def test_what_is_wrong_is_said(fitted):
    bags, y = needles(10)
    with pytest.raises(ShapeError, match="takes elements of width 4; those of set 0 have width 3 .it was fitted"):
        fitted.predict([bags[0][:, :3]])
    with pytest.raises(ShapeError, match="those of set 1 have width . .as set 0 has"):
        SetClassifier(**SMALL).fit([bags[0], bags[1][:, :2]], [0, 1])
    with pytest.raises(ShapeError, match="elements of shape"):
        SetClassifier(**SMALL).fit([ArraySource(np.zeros((3, 2, 2)))], [0])
    with pytest.raises(ShapeError, match="ptr must rise from 0 to len"):
        fitted.predict((bags[0], [0, 99]))
    with pytest.raises(ShapeError, match="real numbers"):
        fitted.predict([np.array([["a"]])])
    with pytest.raises(ValueError, match="inconsistent numbers of samples"):
        SetClassifier(**SMALL).fit(bags, y[:5])
    for bad in (np.nan, np.inf):
        spoilt = [bag.copy() for bag in bags]
        spoilt[4][0, 0] = bad
        for refuse in (lambda: SetClassifier(**SMALL).fit(spoilt, y), lambda: fitted.predict(spoilt)):  # noqa: B023
            with pytest.raises(NonFiniteError, match="NaN or infinity in set 4, element 0"):
                refuse()
        named = [ArraySource(bag, id=f"slide-{number}") for number, bag in enumerate(spoilt)]
        with pytest.raises(NonFiniteError, match=r"set 4 \(slide-4\), element 0"):
            clone(fitted).set_params(chunk_size=2, min_steps=1).fit(bags, y).predict(named)
    for nothing in ([], {}):
        with pytest.raises(ShapeError, match="there are no sets|X is a dict, but sets must be a list"):
            fitted.predict(nothing)
    with pytest.raises(ShapeError, match=r"X is a generator.*pass list\(X\)"):
        fitted.predict(bag for bag in bags)
    with pytest.raises(ShapeError, match=r"inconsistent numbers of samples.*each of one element: if X is one set, pass \[X\]"):
        SetClassifier(**SMALL).fit(bags[0], y)
    with pytest.raises(ShapeError, match="set 0 must be .* rows of one length"):
        fitted.predict([[[1.0, 2.0], [3.0]]])
    with pytest.raises(ShapeError, match="are these transposed"):
        fitted.predict([bag.T for bag in bags])
    with pytest.warns(UserWarning, match=r"If X is one set, pass \[X\]"):
        fitted.predict(list(bags[0]))
    for name, value in {
        "widths": 32,
        "learning_rate": "fast",
        "gradient": "none",
        "epochs": -1,
        "dropout": 2,
        "elements_stream": "no",
    }.items():
        with pytest.raises(ConfigurationError, match=f"^{name} "):
            SetClassifier(**(SMALL | {name: value})).fit(bags, y)
    spoilt = [bag.copy() for bag in bags]
    spoilt[7][1, 0] = np.nan
    for seed in range(3):  # in the sets that are kept, or in those that are held out
        with pytest.raises(NonFiniteError, match="NaN or infinity in set 7, element 1"):
            SetClassifier(**(SMALL | {"random_state": seed}), early_stopping=True, validation_fraction=0.4).fit(spoilt, y)
    with pytest.raises(NonFiniteError, match="NaN or infinity in set 7, element 1"):
        SetClassifier(**SMALL).partial_fit(bags, y).partial_fit(spoilt, y)
    for tuples in (tuple(bags), tuple(bags[:2])):
        with pytest.raises(ShapeError, match="as a list"):
            SetClassifier(**SMALL).fit(tuples, y[: len(tuples)])
    with pytest.raises(ShapeError, match=r"single numbers, pass x\[:, None\]"):
        SetClassifier(**SMALL).fit([bag[:, 0] for bag in bags], y)
    for name, value in {"gradient": "wrong", "chunk_size": 0, "batch_size": 0, "learning_rate": -1.0}.items():
        with pytest.raises(ConfigurationError, match=f"{name.removeprefix('learning_').replace('_size', '')[:5]}|lr"):
            SetClassifier(**(SMALL | {name: value})).fit(bags, y)


def test_setstream_itself_needs_none_of_them():
    code = (
        "import sys, setstream as ss; "
        "assert not {'sklearn', 'torch_geometric', 'onnx', 'huggingface_hub'} & set(sys.modules), 'imported'; "
        "sys.modules['sklearn'] = sys.modules['torch_geometric'] = sys.modules['onnx'] = None\n"
        "for name in ('sklearn', 'pyg'):\n"
        "    try:\n        getattr(ss.integrations, name)\n"
        "    except ss.errors.ConfigurationError as error:\n        print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "pip install 'setstream[sklearn]'" in done.stdout, done.stderr
    assert "pip install 'setstream[pyg]'" in done.stdout, done.stderr


@pytest.mark.slow
def test_defaults_do_well_on_musk1():
    from setstream.tasks.mil.task import classic

    found = classic("musk1")
    bags, y = [bag.numpy() for bag in found.bags], found.labels.numpy()
    folds = StratifiedKFold(10, shuffle=True, random_state=0)
    scores = cross_val_score(SetClassifier(random_state=0), bags, y, cv=folds, error_score="raise")
    assert scores.mean() >= 0.85


def test_every_option_is_in_the_guide():
    page = (Path(__file__).parents[2] / "docs" / "integrations.md").read_text()
    assert {name for name in SetClassifier().get_params() if f"`{name}`" not in page} == set()
