"""Estimators on real tables: long frames to sets, missing values, categories, names of columns, transformers of elements."""

import numpy as np
import pytest
import torch
from sklearn.base import clone
from sklearn.decomposition import PCA
from sklearn.impute import SimpleImputer
from sklearn.model_selection import cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import FunctionTransformer, StandardScaler

import setstream as ss
from setstream.data import ArraySource
from setstream.errors import ConfigurationError, DataError, NonFiniteError, ShapeError
from setstream.integrations.sklearn import (
    ElementWise,
    FrameToSets,
    SetClassifier,
    SetFeaturizer,
    SetRegressor,
    permutation_importance,
)
from setstream.integrations.sklearn.columns import MixedColumns

SMALL = {"widths": (16,), "num_slots": 4, "heads": 2, "epochs": 1, "min_steps": 40, "learning_rate": 5e-3, "random_state": 0}
SMALL |= {"members": 2}


def visits(count=60, seed=0, tell="both"):
    """A long table, rows in random order: `kind` and the share of missing `dose` depend on the class; `word` has 60 values."""
    rng = np.random.default_rng(seed)
    owner = np.repeat(np.arange(count), rng.integers(4, 12, count))
    ill = owner % 2
    rare = np.where(ill, 0.7, 0.1)
    dose = np.where(rng.random(len(owner)) < (rare if tell != "kind" else 0.4), np.nan, rng.normal(50, 10, len(owner)))
    odd = rng.random(len(owner)) < (rare if tell != "missing" else 0.4)
    table = {
        "patient": np.array([f"p{number:03d}" for number in owner]),
        "day": np.arange(len(owner)) % 7.0,
        "dose": dose,
        "kind": np.where(odd, "odd", np.where(rng.random(len(owner)) < 0.5, "plain", "usual")),
        "word": np.array([f"w{number}" for number in rng.integers(60, size=len(owner))]),
        "ill": np.where(ill, "yes", "no"),
    }
    order = rng.permutation(len(owner))
    return {name: column[order] for name, column in table.items()}


@pytest.fixture(scope="module")
def made():
    table = visits()
    frame = FrameToSets("patient", time="day", drop=["ill"]).fit(table)
    return frame, table, SetClassifier(**SMALL).fit(frame.transform(table), frame.labels(table, "ill"))


def test_a_table_becomes_sets_in_the_order_of_ids():
    table = {
        "id": [7, 3, 7, 7],
        "when": np.array(["2024-01-05", "2024-02-01", "2024-01-02", "2024-01-02T12:00"], "datetime64[s]"),
        "x": [1.0, 2.0, None, 4.0],
        "kind": ["a", "b", None, "a"],
        "code": [10, 20, 10, 30],
        "y": ["u", "v", "u", "u"],
    }
    frame = FrameToSets("id", time="when", categories=["kind", "code"], drop="y", min_count=1)
    three, seven = frame.fit_transform(table)
    assert (three.id, seven.id) == ("3", "7")
    assert frame.get_feature_names_out().tolist() == ["when", "x", "kind", "code"]
    assert frame.categories_ == {"kind": ["a", "b"], "code": [10, 20, 30]}  # the most frequent first
    np.testing.assert_array_equal(three.tensor(), [[0.0, 2.0, 1.0, 1.0]])
    np.testing.assert_array_equal(seven.tensor(), [[0, np.nan, np.nan, 0], [0.5, 4, 0, 2], [3, 1, 0, 0]])
    assert frame.labels(table, "y").tolist() == ["v", "u"]
    assert frame.labels(table, {7: 1, 3: 0, 9: 1}).tolist() == [0, 1]
    other = frame.transform(table | {"kind": ["z", "b", "a", "b"]})  # unknown: NaN
    np.testing.assert_array_equal(other[1].tensor()[:, 2], [0.0, 1.0, np.nan])
    assert FrameToSets("id", drop=["y", "when"]).fit(table).categories_ == {"kind": ["a"]}  # rare: unknown


@pytest.mark.parametrize("library", ["pandas", "pyarrow"])
def test_frames_of_other_libraries_are_read_alike(library):
    module, table = pytest.importorskip(library), visits(8)
    wanted = FrameToSets("patient", time="day", drop=["ill"]).fit_transform(table)
    frame = module.DataFrame(table) if library == "pandas" else module.table(table)
    if library == "pandas":
        frame = frame.astype({"kind": "category", "dose": "Float64"})
        frame["dose"] = frame["dose"].mask(frame["dose"].isna())
    reader = FrameToSets("patient", time="day", drop=["ill"])
    for one, other in zip(reader.fit_transform(frame), wanted, strict=True):
        assert one.id == other.id
        np.testing.assert_array_equal(one.tensor(), other.tensor())
    assert reader.labels(frame, "ill").tolist() == ["no", "yes"] * 4


def test_numbers_of_the_first_layer_are_those_of_numpy():
    rng = np.random.default_rng(0)
    x = rng.normal(5, 3, (500, 4))
    x[rng.random(500) < 0.3, 0] = np.nan
    x[:, 2] = rng.integers(3, size=500)
    x[:, 3] = rng.integers(40, size=500)
    x[::7, 2], x[::9, 3] = np.nan, 99.0
    layer = MixedColumns(4, [["a", "b", "c"], list(map(str, range(40)))], [0, 2])
    found = layer.fit([x[:100], x[100:]], chunk_size=64)(torch.from_numpy(x).float()).numpy()
    assert found.shape == (500, layer.out_features)
    assert np.isfinite(found).all()
    numbers = np.nan_to_num((x[:, :2] - np.nanmean(x[:, :2], 0)) / np.nanstd(x[:, :2], 0))
    np.testing.assert_allclose(found[:, :2], numbers, atol=1e-5)
    absent = np.isnan(x[:, [0, 2]])
    np.testing.assert_allclose(found[:, 2:4], absent - absent.mean(0), atol=1e-6)
    hot = np.where(absent[:, 1:], np.nan, x[:, 2:3] == np.arange(3))
    np.testing.assert_allclose(found[:, 4:7], np.nan_to_num(hot - np.nanmean(hot, 0)), atol=1e-6)
    np.testing.assert_array_equal(found[:, -1], np.where(x[:, 3] == 99, 0, x[:, 3] + 1))


@pytest.mark.parametrize("tell", ["kind", "missing"])
def test_categories_and_missing_values_are_learned(tell):
    frame = FrameToSets("patient", drop=["ill", "word"])
    train, test = visits(80, 1, tell), visits(200, 2, tell)
    model = SetClassifier(**SMALL).fit(frame.fit_transform(train), frame.labels(train, "ill"))
    assert model.score(frame.transform(test), frame.labels(test, "ill")) > 0.8  # by chance 0.5, with a deviation of 0.035


def test_embeddings_of_many_categories_are_learned_and_unknown_ones_have_their_own():
    rng = np.random.default_rng(0)
    words = rng.integers(200, size=(120, 10))
    y = np.arange(120) % 2
    words = np.where((words % 2 != y[:, None]) & (rng.random(words.shape) < 0.7), words ^ 1, words)  # odd words: class 1
    table = {"id": np.repeat(np.arange(120), 10), "word": np.array([f"w{word}" for word in words.ravel()])}
    frame = FrameToSets("id", min_count=1)
    sets = frame.fit_transform(table)
    model = SetClassifier(**(SMALL | {"min_steps": 150})).fit(sets[:80], y[:80])
    assert model.score(sets[80:], y[80:]) > 0.75  # by chance 0.5, with a deviation of 0.08
    unknown = [ArraySource(np.full((5, 1), code)) for code in (np.nan, -1.0, 200.0, 0.5, 1e9)]
    answers = model.predict_proba(unknown)
    np.testing.assert_allclose(answers, answers[:1].repeat(5, 0), atol=1e-6)


def raw(frame, table, number):
    return frame.transform(table)[number].tensor().float()


@pytest.fixture(scope="module", params=["predict_proba", "predict", "transform"])
def answering(request, made):
    """A fitted estimator of each kind, how it answers, and sets with missing values and unknown categories."""
    frame, table, model = made
    sets = frame.transform(table)
    numbers = 100.0 + np.array([float(len(one)) for one in sets])
    quick = SMALL | {"min_steps": 20}
    kinds = {
        "predict_proba": lambda: model,
        "predict": lambda: SetRegressor(**quick).fit(sets, numbers),
        "transform": lambda: SetFeaturizer(**quick).fit(sets, frame.labels(table, "ill")),
    }
    asked = frame.transform(table | {"kind": np.where(table["kind"] == "usual", "new", table["kind"])})[:5]
    assert any(one.tensor().isnan()[:, 1].any() and one.tensor().isnan()[:, 2].any() for one in asked)
    estimator = kinds[request.param]()
    return estimator, lambda given: np.reshape(getattr(estimator, request.param)(given), (len(given), -1)), asked


def test_streamed_merged_saved_and_loaded_models_answer_alike(answering, tmp_path):
    estimator, answer, sets = answering
    wanted, x = answer(sets), [one.tensor() for one in sets]
    estimator.save_pretrained(tmp_path)
    again = ss.SetModel.from_pretrained(tmp_path)
    assert again.options["columns"]["names"] == ["day", "dose", "kind", "word"]
    for one, expected in zip(x, wanted, strict=True):
        first, second = again.stream(), again.stream()
        for element in one[:2]:
            first.update(element[None, None])
        second.update(one[None, 2:])
        first.merge(ss.State.from_bytes(second.state.to_bytes()))
        np.testing.assert_allclose(first.predict()[0].detach(), expected, rtol=1e-5, atol=1e-5)
    with torch.no_grad():
        np.testing.assert_allclose(again(x), wanted, rtol=1e-5, atol=1e-5)
    estimator.set_params(chunk_size=3)
    np.testing.assert_allclose(answer(sets), wanted, rtol=1e-5, atol=1e-5)  # chunk by chunk
    estimator.set_params(chunk_size=4096)


def test_served_models_answer_alike(answering, tmp_path):
    testing = pytest.importorskip("fastapi.testclient")
    from setstream.serve import Options, create_app

    estimator, answer, sets = answering
    model = ss.SetModel.from_pretrained(estimator.save_pretrained(tmp_path / "model"))
    one = next(one for one in sets if one.tensor().isnan().any())
    app = create_app(ss.StateStore(tmp_path / "states.db", model), Options())
    names = ["no", "yes"] if isinstance(estimator, SetClassifier) else None
    with testing.TestClient(app, "http://localhost") as client:
        rows = [[None if number != number else number for number in row] for row in one.tensor().tolist()]
        for row in rows[:-1]:  # null is a missing value
            assert client.post("/sets/a/elements", json={"elements": [row]}).status_code == 200
        with client.websocket_connect("ws://localhost/sets/a/live") as socket:
            assert socket.receive_json()["classes"] == names
            client.post("/sets/a/elements", json={"elements": rows[-1:]})
            found = socket.receive_json()
        assert client.get("/sets/a/prediction").json() == found
        assert client.post("/predictions", json={"ids": ["a"]}).json() == {"predictions": [found]}
        np.testing.assert_allclose(found["prediction"], answer([one])[0], rtol=1e-5, atol=1e-5)
        assert found["classes"] == names
        spoilt = '{"elements": [[Infinity, 1, 0, 0]]}'
        headers = {"content-type": "application/json"}
        assert client.post("/sets/a/elements", content=spoilt, headers=headers).status_code == 422


@pytest.mark.slow
def test_exported_models_answer_alike(answering, tmp_path):
    onnxruntime = pytest.importorskip("onnxruntime")
    from setstream.integrations import onnx

    estimator, answer, sets = answering
    onnx.export(estimator.model_, tmp_path, torch.zeros(1, 4))
    one = next(one for one in sets if one.tensor().isnan().any())
    graphs = {name: onnxruntime.InferenceSession(tmp_path / f"{name}.onnx") for name in ("update", "predict")}
    state = dict(np.load(tmp_path / "empty.npz"))
    for part in np.array_split(one.tensor().float().numpy(), 2):
        state = dict(zip(state, graphs["update"].run(None, state | {"chunk": part[None]}), strict=True))
    np.testing.assert_allclose(graphs["predict"].run(None, state)[0], answer([one]), rtol=1e-4, atol=1e-4)


def test_other_models_and_infinity_are_refused_as_before(made):
    frame, table, model = made
    one = raw(frame, table, 0)
    one[1, 0] = torch.inf
    with pytest.raises(NonFiniteError, match="1 of .* elements hold NaN or infinity .first: element 1 "):
        model.model_.encoder.update(None, one[None])
    with torch.no_grad(), pytest.raises(NonFiniteError, match="first: element 1 "):
        model.model_.encoder.update(None, one[None])
    with pytest.raises(NonFiniteError, match="set 0, element 1, column day"):
        model.predict([one])
    bags, y = [np.random.default_rng(i).normal(size=(5, 2)) + i % 2 for i in range(20)], np.arange(20) % 2
    plain = SetClassifier(**(SMALL | {"min_steps": 2})).fit(bags, y)
    bags[3][2, 1] = np.nan
    with torch.no_grad(), pytest.raises(NonFiniteError, match="first: element 2 "):
        plain.model_.encoder.update(None, bags[3][None])
    for refuse in (plain.predict, lambda bags: plain.fit(bags, y)):
        with pytest.raises(NonFiniteError, match="set 3, element 2.*missing=True"):
            refuse(bags)
    for estimator in (SetClassifier, SetRegressor, SetFeaturizer):
        given = estimator(**(SMALL | {"min_steps": 2}), missing=True).fit(bags, y)
        assert given.model_([torch.from_numpy(bags[3])]).isfinite().all()
    sets, labels = frame.transform(table), frame.labels(table, "ill")
    with pytest.raises(NonFiniteError, match="column dose"):
        SetClassifier(**SMALL, missing=False).fit(sets, labels)
    with pytest.raises(ConfigurationError, match="^missing must be True, False or 'auto'"):
        SetClassifier(**SMALL, missing="often").fit(sets, labels)


def test_a_table_with_missing_values_row_by_row():
    x, y = np.random.default_rng(0).normal(size=(40, 3)), np.arange(40) % 2
    x[:, 0] += 3 * y
    x[::5, 1] = np.nan
    with pytest.raises(ValueError, match="NaN"):
        SetClassifier(**SMALL).fit(x, y)
    assert SetClassifier(**SMALL, missing=True).fit(x, y).score(x, y) > 0.8


def test_columns_are_kept_and_named_in_errors(made):
    _, table, model = made
    assert model.feature_names_in_.tolist() == ["day", "dose", "kind", "word"]
    with pytest.raises(ShapeError, match="fitted on the former., the columns day, dose, kind, word"):
        model.predict([np.zeros((3, 2))])
    renamed = {("drug" if name == "dose" else name): column for name, column in table.items()}
    other = FrameToSets("patient", time="day", drop=["ill"]).fit_transform(renamed)
    with pytest.raises(ShapeError, match="fitted on the columns day, dose, .*; set 0 has day, drug, "):
        model.predict(other)
    refitted = FrameToSets("patient", time="day", drop=["ill"]).fit_transform(visits(8, 5))
    with pytest.raises(ShapeError, match="other categories than those of fit.*same FrameToSets"):
        model.predict(refitted)
    assert not hasattr(clone(model).set_params(min_steps=1).fit([np.eye(2)] * 4, [0, 1, 0, 1]), "feature_names_in_")
    pandas = pytest.importorskip("pandas")
    frames = [pandas.DataFrame({"a": [0.0, label], "b": [1.0, np.nan]}) for label in (0.0, 1.0) * 5]
    named = SetClassifier(**(SMALL | {"min_steps": 2})).fit(frames, [0, 1] * 5)
    assert named.feature_names_in_.tolist() == ["a", "b"]
    with pytest.raises(ShapeError, match="columns a, b; set 0 has b, a"):
        named.predict([frames[0][["b", "a"]]])


def test_wrong_tables_are_explained():
    table = visits(4)
    for options, error, message in (
        ({"id": "who"}, DataError, "no column 'who'; its columns are patient, day"),
        ({"id": "patient", "numbers": ["weight"]}, DataError, "no column 'weight'"),
        ({"id": "patient", "numbers": [], "categories": []}, ConfigurationError, "no columns are left"),
    ):
        with pytest.raises(error, match=message):
            FrameToSets(**options).fit(table)
    for given in ("numbers", "categories"):
        with pytest.raises(ConfigurationError, match="column .* holds .*numbers: name it among numbers, categories or drop"):
            FrameToSets("patient", **{given: []}).fit(table)
    with pytest.raises(DataError, match="expected a DataFrame, an Arrow table or a mapping"):
        FrameToSets("patient").fit(np.zeros((3, 2)))
    with pytest.raises(DataError, match="column kind does not hold numbers"):
        FrameToSets("patient", numbers=["kind"], categories=[]).fit_transform(table)
    with pytest.raises(DataError, match="rows have no dose"):
        FrameToSets("patient", time="dose", drop="ill").fit_transform(table)
    frame = FrameToSets("patient", drop=["ill"]).fit(table)
    with pytest.raises(DataError, match="word must be the same in all rows of a set; set p000 has"):
        frame.labels(table, "word")
    with pytest.raises(DataError, match="no label for 4 of 4 sets, 'p000' among them"):
        frame.labels(table, {"x": 1})
    ids = table["patient"].astype(object)
    ids[5] = None
    with pytest.raises(DataError, match="1 rows have no patient, row 5 the first"):
        frame.transform(table | {"patient": ids})


def test_transformers_of_elements_in_a_pipeline(made):
    frame, table, _ = made
    sets, y = frame.transform(table), frame.labels(table, "ill")
    rows = torch.cat([one.tensor() for one in sets]).numpy()
    imputed = ElementWise(SimpleImputer(add_indicator=True)).fit(sets).transform(sets)
    found = torch.cat([one.tensor() for one in imputed]).numpy()
    np.testing.assert_array_equal(found[:, :3], SimpleImputer(add_indicator=True).fit_transform(rows[:, :2]))
    np.testing.assert_array_equal(found[:, 3:], rows[:, 2:])  # categories stay
    assert imputed[0].metadata["columns"].names == ("day", "dose", "missingindicator_dose", "kind", "word")
    assert [one.id for one in imputed] == [one.id for one in sets]
    pipeline = make_pipeline(ElementWise(SimpleImputer()), ElementWise(StandardScaler()), SetClassifier(**SMALL))
    assert cross_val_score(pipeline, sets, y, cv=2).mean() > 0.7
    bags = [np.random.default_rng(i).normal(size=(i % 3 + 1, 4)) for i in range(6)]
    halved = ElementWise(PCA(2)).fit(bags).transform(bags[:2])
    expected = PCA(2).fit(np.concatenate(bags)).transform(bags[1])
    np.testing.assert_allclose(halved[1].tensor().abs(), np.abs(expected), atol=1e-8)
    with pytest.raises(DataError, match="one row per element"):
        ElementWise(FunctionTransformer(lambda x: x[:1])).fit(bags).transform(bags)


def test_partial_fit_goes_on_with_the_columns_of_the_first_call(made):
    frame, table, model = made
    sets, y = frame.transform(table), frame.labels(table, "ill")
    whole = [one for one in sets if not one.tensor().isnan().any()]
    before = clone(model).set_params(min_steps=2).fit(sets, y)
    kept = before.model_
    again = before.partial_fit(whole or sets[:4], y[: len(whole) or 4])
    assert again.model_ is not kept
    assert np.isfinite(again.predict_proba(sets)).all()


def test_estimators_are_saved_and_loaded_whole(made, tmp_path):
    frame, table, model = made
    sets, y = frame.transform(table), frame.labels(table, "ill")
    numbers = np.array([float(len(one)) for one in sets])
    quick = SMALL | {"min_steps": 3}
    weighed = SetClassifier(**quick, class_weight={0: 1.0, 1: 2.5}).fit([np.eye(2) * i for i in range(8)], np.arange(8) % 2)
    for estimator, method, given in (
        (model, "predict_proba", sets),
        (weighed, "predict", [np.eye(2), np.zeros((0, 2))]),
        (SetRegressor(**quick).fit(sets, numbers), "predict", sets),
        (SetRegressor(**quick).fit(sets, np.stack([numbers, -numbers], 1)), "predict", sets),
        (SetFeaturizer(**quick).fit(sets), "transform", sets),
    ):
        kind = type(estimator)
        again = kind.from_pretrained(estimator.save_pretrained(tmp_path / "saved"))
        assert {name: value for name, value in again.get_params().items() if name != "widths"} == {
            name: value for name, value in estimator.get_params().items() if name != "widths"
        }
        np.testing.assert_array_equal(getattr(again, method)(given), getattr(estimator, method)(given))
        for name in ("feature_names_in_", "classes_", "n_features_in_", "n_iter_"):
            assert hasattr(again, name) == hasattr(estimator, name)
            np.testing.assert_array_equal(getattr(again, name, 0), getattr(estimator, name, 0))
        other = SetRegressor if kind is not SetRegressor else SetClassifier
        with pytest.raises(ConfigurationError, match=f"holds {kind.__name__}; expected a {other.__name__}"):
            other.from_pretrained(tmp_path / "saved")
    with pytest.raises(ShapeError, match="fitted on the former., the columns day"):
        SetFeaturizer.from_pretrained(tmp_path / "saved").transform(
            FrameToSets("patient", time="day", drop=["ill", "word"]).fit_transform(table)[:1]
        )
    again = SetClassifier.from_pretrained(model.save_pretrained(tmp_path / "model")).partial_fit(sets, y)  # goes on
    assert again.classes_.tolist() == ["no", "yes"]
    model.model_.save_pretrained(tmp_path / "network")
    with pytest.raises(ConfigurationError, match="without its estimator"):
        SetClassifier.from_pretrained(tmp_path / "network")
    config = tmp_path / "model" / "config.json"
    config.write_text(config.read_text().replace('"dropout"', '"dripout"', 1))
    with pytest.raises(ConfigurationError):
        SetClassifier.from_pretrained(tmp_path / "model")


def test_explanations_are_sums_of_branches_and_leave_one_out(made):
    frame, table, model = made
    sets = frame.transform(table)
    numbers = SetRegressor(**(SMALL | {"min_steps": 5}), elements_stream=False).fit(sets, [float(len(one)) for one in sets])
    for estimator, streams in ((model, 4), (numbers, 3)):
        for one in (sets[0], sets[3]):
            x = one.tensor()
            rest = [ArraySource(torch.cat([x[:i], x[i + 1 :]])) for i in range(len(x))]
            if estimator is model:
                logs = np.log(estimator.predict_proba([one, *rest]))
                logs -= logs.mean(1, keepdims=True)
            else:
                logs = estimator.predict([one, *rest])[:, None]
            found = estimator.explain(one)
            assert len(found.streams) == streams
            np.testing.assert_allclose(found.answer, logs[0], atol=1e-4)
            np.testing.assert_allclose(found.offset + sum(found.streams.values()), found.answer, atol=1e-9)
            np.testing.assert_allclose(found.elements, logs[:1] - logs[1:], atol=2e-4)
    assert model.explain(np.zeros((0, 4))).elements.shape == (0, 2)
    assert model.explain(sets[0].tensor()[:1]).elements.shape == (1, 2)
    with pytest.raises(ConfigurationError, match="classifier or a regressor"):
        SetFeaturizer(**(SMALL | {"min_steps": 1})).fit(sets).explain(sets[0])


def test_shuffled_columns_that_matter_cost_score(made):
    frame, table, model = made
    found = permutation_importance(model, frame.transform(table), frame.labels(table, "ill"), n_repeats=3, random_state=0)
    assert found.names.tolist() == ["day", "dose", "kind", "word"]
    assert found.importances.shape == (4, 3)
    assert found.importances_mean[[1, 2]].min() > found.importances_mean[0]
