"""The members of an estimator's network: the solved linear path, learned trust, and that everything still streams."""

import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression, Ridge

import setstream as ss
from setstream.data import ArraySource
from setstream.errors import RemovalError
from setstream.integrations.sklearn import SetClassifier, SetRegressor, base, ensemble, fitting
from setstream.integrations.sklearn.ensemble import Members, Plan, affine, class_rows, number_rows, split
from setstream.integrations.sklearn.network import MODELS
from setstream.training import Encode

SMALL = {"widths": (16,), "num_slots": 4, "heads": 2, "epochs": 1, "min_steps": 30, "learning_rate": 5e-3, "random_state": 0}


def shifted(count=60, seed=0, classes=2):
    """Sets of 3 to 20 elements whose mean depends on the class, in features of different units."""
    rng = np.random.default_rng(seed)
    y = np.arange(count) % classes
    return [(rng.normal(size=(rng.integers(3, 21), 3)) + 0.8 * label) * [1, 100, 0.01] for label in y], y


def summaries(sets):
    rows = np.stack([np.r_[x.mean(0), x.std(0), x.min(0), x.max(0), np.log1p(len(x))] for x in sets])
    return (rows - rows.mean(0)) / rows.std(0)


def members_of(sets, targets, loss, name, **answers):
    model = MODELS[name](in_dim=3, members=2, widths=[8], num_slots=2, heads=2, **answers)
    sources = [ArraySource(one) for one in sets]
    model.encoder.phi[0].fit(sources)
    weights = torch.ones(len(sets))
    return Members(model, Encode("auto", 1024, 1), sources, targets, weights, loss, Plan(5, 8, 1e-3, 0.0, None, 0))


@pytest.mark.parametrize("classes", [2, 3])
def test_the_linear_path_is_scikit_learns_logistic_regression(classes):
    sets, y = shifted(classes=classes)
    members = members_of(sets, torch.from_numpy(y), class_rows, "classifier", classes=list(range(classes)))
    t = members.measure()
    np.testing.assert_allclose(t[:, :13], summaries(sets).clip(-8, 8), atol=1e-3)
    *_, found = members._path(t.double(), np.arange(len(y)), (1000.0, 10.0, 1.0))
    # For two classes scikit-learn has one row of weights w: as two rows, w/2 and -w/2, they have half of its penalty.
    same = LogisticRegression(C=2.0 if classes == 2 else 1.0, tol=1e-8, max_iter=1000)
    wanted = same.fit(t.numpy(), y).predict_proba(t.numpy())
    np.testing.assert_allclose(affine(t.double(), found).softmax(1), wanted, atol=1e-3)


def test_the_statistics_include_how_many_elements_are_above_which_level():
    sets, y = shifted()
    members = members_of(sets, torch.from_numpy(y), class_rows, "classifier", classes=[0, 1])
    t, shares = members.measure().double(), members.model.encoder.pool.pools["shares"].module
    rows = np.concatenate(sets)
    rows, scaled = (rows - rows.mean(0)) / rows.std(0), [(one - rows.mean(0)) / rows.std(0) for one in sets]
    np.testing.assert_allclose(shares.level, np.quantile(rows, shares.QUANTILES, axis=0), atol=0.05)
    level, width = shares.level.numpy(), shares.width.numpy()
    wanted = np.stack([(1 / (1 + np.exp(-(x[:, None] - level) / width))).mean(0).ravel() for x in scaled])
    wanted = (wanted - wanted.mean(0)) / wanted.std(0)
    np.testing.assert_allclose(t[:, 13:], wanted.clip(-8, 8), atol=1e-3)


def test_the_linear_path_of_numbers_is_ridge_regression():
    sets, _ = shifted()
    y = torch.from_numpy(np.array([one[:, 0].mean() for one in sets])).float()[:, None]
    members = members_of(sets, y, number_rows, "regressor", outputs=1)
    t = members.measure()
    [found] = members._path(t.double(), np.arange(len(y)), (10.0,))
    wanted = Ridge(alpha=10.0).fit(t.numpy(), y.numpy()).predict(t.numpy())
    np.testing.assert_allclose(affine(t.double(), found)[:, 0], wanted.ravel(), atol=1e-4)


def test_padded_batches_are_what_encode_computes():
    sets, y = shifted(12)
    packed = members_of(sets, torch.from_numpy(y), class_rows, "classifier", classes=[0, 1])
    t, picked = packed.measure(), np.array([5, 0, 11, 3])
    member = packed._member(1).eval()
    together = packed._read(member, packed.encode, picked, t)
    packed.packed = None
    torch.testing.assert_close(together, packed._read(member, packed.encode, picked, t), rtol=1e-4, atol=1e-5)


def test_trust_goes_to_the_stream_that_answers_best():
    sets, y = shifted(200)
    members = members_of(sets, torch.from_numpy(y), class_rows, "classifier", classes=[0, 1])
    rng, rows = np.random.default_rng(0), torch.zeros(200, 4, 2, dtype=torch.float64)
    rows[:, 2, 1] = torch.from_numpy(4.0 * (y - 0.5) + rng.normal(size=200))  # of a probit of slope one: informative
    rows[:, 3, 1] = torch.from_numpy(rng.normal(size=200))  # noise
    members._weigh(rows.log_softmax(-1), np.arange(200))
    trust = members.head.trust
    assert trust[2] > 4 * trust[3]
    assert (trust >= 0).all()


def test_statistics_alone_are_learned_and_probabilities_are_calibrated():
    train, y = shifted(150, seed=1)
    test, wanted = shifted(400, seed=2)
    model = SetClassifier(**SMALL).fit(train, y)
    p = model.predict_proba(test)
    linear = LogisticRegression().fit(summaries(train), y).score(summaries(test), wanted)
    assert model.score(test, wanted) > linear - 0.05  # three deviations of a difference on 400 sets
    assert abs((p.max(1) - (p.argmax(1) == wanted)).mean()) < 0.08


@pytest.mark.parametrize("chunk_size", [1024, 4])
def test_the_network_streams_merges_is_saved_and_answers_alike(tmp_path, chunk_size):
    sets, y = shifted(40)
    numbers = np.array([one[:, 1].mean() for one in sets])
    estimators = [SetClassifier(**SMALL, chunk_size=chunk_size).fit(sets, y), SetRegressor(**SMALL).fit(sets, numbers)]
    for estimator, method in zip(estimators, ("predict_proba", "predict"), strict=True):
        wanted = np.reshape(getattr(estimator, method)(sets[:1]), (1, -1))
        estimator.model_.save_pretrained(tmp_path / method)
        again = ss.SetModel.from_pretrained(tmp_path / method)
        first, second = again.stream(), again.stream()
        first.update(sets[0][None, :1])
        second.update(sets[0][None, 1:])
        first.merge(second)
        np.testing.assert_allclose(first.predict().detach(), wanted, rtol=1e-3, atol=1e-4)


@pytest.mark.slow
def test_the_network_is_exported(tmp_path):
    onnxruntime = pytest.importorskip("onnxruntime")
    from setstream.integrations import onnx

    sets, y = shifted(40)
    estimator = SetClassifier(**SMALL, members=2).fit(sets, y)
    onnx.export(estimator.model_, tmp_path, torch.zeros(1, 3))
    graphs = {name: onnxruntime.InferenceSession(tmp_path / f"{name}.onnx") for name in ("update", "predict")}
    state = dict(np.load(tmp_path / "empty.npz"))
    for part in np.array_split(sets[0].astype(np.float32), 2):
        state = dict(zip(state, graphs["update"].run(None, state | {"chunk": part[None]}), strict=True))
    answer = graphs["predict"].run(None, state)[0]
    np.testing.assert_allclose(answer, estimator.predict_proba(sets[:1]), atol=1e-4)


def test_without_the_elements_stream_elements_can_be_removed():
    sets, y = shifted(40)
    for with_elements in (False, True):
        encoder = SetClassifier(**SMALL, elements_stream=with_elements).fit(sets, y).model_.encoder
        with torch.no_grad():
            whole, part = encoder.update(None, sets[0][None]), encoder.update(None, sets[0][None, :2])
            if with_elements:
                with pytest.raises(RemovalError):
                    whole - part
                continue
            found, wanted = encoder.finalize(whole - part), encoder(torch.from_numpy(sets[0][None, 2:]))
        torch.testing.assert_close(found["statistics"], wanted["statistics"], rtol=1e-3, atol=1e-4)


def test_folds_hold_every_set_out_once_where_there_are_enough():
    strata = np.array([0] * 9 + [1] * 3)
    folds = split(12, 3, 0.1, strata, 0)
    assert sorted(np.concatenate([held for _, held in folds]).tolist()) == list(range(12))
    assert all((strata[held] == 1).sum() == 1 for _, held in folds)
    assert [len(held) for _, held in split(20, 1, 0.25, None, 0)] == [5]
    assert [len(held) for _, held in split(2, 4, 0.1, None, 0)] == [0] * 4


class Counted(ArraySource):
    """Counts the elements that are read in order, and those that are picked."""

    in_order, picked = 0, ()

    def read(self, start, stop):
        self.in_order += stop - start
        return super().read(start, stop)

    def take(self, index):
        self.picked = (*self.picked, index)
        return super().take(index)


def test_a_step_reads_a_sample_of_large_sets_and_trust_is_measured_on_whole_ones(monkeypatch):
    for module in (base, ensemble, fitting):
        monkeypatch.setattr(module, "MOST", 50)
    rng = np.random.default_rng(0)
    y = np.arange(80) % 2
    sets = [rng.normal(size=(400, 3)) for _ in y]
    for one in sets[1::2]:
        one[:12, 0] += 6
    sources = [Counted(one) for one in sets]
    model = SetClassifier(**(SMALL | {"min_steps": 60}), members=2, chunk_size=100).fit(sources[:40], y[:40])
    # For the scale, the statistics and the trust; and a chunk may be read ahead of each first look at a set.
    assert max(one.in_order for one in sources[:40]) <= 4 * 400 + 4 * 100
    picks = [index for one in sources[:40] for index in one.picked[1:]]  # the first ones are for the levels of the shares
    assert all(len(index) == 50 == len(index.unique()) for index in picks)
    assert len(picks) > 2 * 60 * 16  # as many as steps and batches, and tests of early stopping
    assert torch.cat(picks).unique().tolist() == list(range(400))
    assert model.score(sources[40:], y[40:]) > 0.85  # by chance 0.5, with a deviation of 0.08
    exact = SetClassifier(**(SMALL | {"min_steps": 2}), members=2, chunk_size=100, gradient="exact")
    exact.fit(sources[40:], y[40:])
    assert all(len(one.picked) == 1 for one in sources[40:])
