"""Patients with several slides, and splits that others have published."""

import csv
import json
from itertools import zip_longest

import numpy as np
import pyarrow.parquet
import pytest
import torch

from setstream.data import ArraySource, JoinedSource
from setstream.errors import ConfigurationError, DataError, ShapeError
from setstream.report import write_report
from setstream.tasks.mil import Mil
from setstream.tasks.mil.models import MODELS
from setstream.tasks.mil.predictions import bag_logits, patient_logits, predict_table
from setstream.tasks.mil.splits import read_splits
from setstream.tasks.mil.targets import Binary
from tests.cli.test_cli import call, code_of


def slides(count=5, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [ArraySource(torch.randn(n + 2, 6, generator=generator), id=f"s{n}") for n in range(count)]


def test_joined_sources_are_their_concatenation():
    parts = [ArraySource(torch.randn(n, 4)) for n in (3, 0, 5, 1)]
    joined, whole = JoinedSource(parts, id="p"), torch.cat([part.array for part in parts])
    assert (len(joined), joined.shape, joined.dtype) == (9, (4,), torch.float32)
    assert torch.equal(joined.tensor(), whole)
    for start in range(10):
        for stop in range(start, 10):
            assert torch.equal(joined.read(start, stop), whole[start:stop])
    index = torch.randperm(9)
    assert torch.equal(joined.take(index), whole[index])
    with pytest.raises(ShapeError, match=r"p: elements of b are \(3,\); those of a are \(4,\)"):
        JoinedSource([ArraySource(torch.ones(2, 4), id="a"), ArraySource(torch.ones(2, 3), id="b")], id="p").tensor()


@pytest.mark.parametrize("name", ["ab-mil", "ds-mil", "deepsets", "sse", "umbc+set-transformer"])
def test_a_patient_is_the_concatenation_of_the_slides(name):
    """To 1e-6, also without each slide, whether by adding states or by reading the slides as one set."""
    torch.manual_seed(0)
    model, parts = MODELS[name](in_dim=6, widths=[8]).eval(), slides()
    whole, each, without = patient_logits(model, parts, 3, without=True)
    with torch.no_grad():
        torch.testing.assert_close(whole, model([torch.cat([part.array for part in parts])]), rtol=0, atol=1e-6)
        for number, slide in enumerate(parts):
            rest = torch.cat([part.array for part in parts if part is not slide])
            torch.testing.assert_close(each[number], model([slide.array])[0], rtol=0, atol=1e-6)
            torch.testing.assert_close(without[number], model([rest])[0], rtol=0, atol=1e-6)


def test_two_slides_without_each_and_one_slide():
    model = MODELS["ab-mil"](in_dim=6, widths=[8]).eval()
    two = slides(2)
    _, each, without = patient_logits(model, two, 4, without=True)
    torch.testing.assert_close(without, each.flip(0))
    table = predict_table(
        model, Binary(), [*two, ArraySource(torch.randn(3, 6), id="s2")], {"s0": "a", "s1": "a", "s2": "b"}, without=True
    )
    assert table["level"] == ["patient", "slide", "slide", "patient", "slide"]
    assert table["id"] == ["a", "s0", "s1", "b", "s2"]
    assert [value is None for value in table["without_probability"]] == [True, False, False, True, True]
    assert table["without_probability"][1] == pytest.approx(table["probability"][2])
    torch.testing.assert_close(
        torch.tensor(table["probability"])[[1, 2]], bag_logits(model, two, 7).sigmoid().mean(1), rtol=1e-5, atol=1e-6
    )


@pytest.fixture(scope="module")
def cohort(tmp_path_factory):
    """Thirty slides of fifteen patients in files, labels, and the splits of others."""
    folder = tmp_path_factory.mktemp("cohort")
    for name in ("features", "clam", "bool"):
        (folder / name).mkdir()
    generator = np.random.default_rng(0)
    names, cases = [f"s{n:02d}" for n in range(30)], [f"p{n // 2:02d}" for n in range(30)]
    rows, fold_of = [], [n // 2 % 3 for n in range(30)]
    for number, name in enumerate(names):
        bag = generator.normal(size=(12, 5)).astype("float32")
        bag[:4, 0] += 4 * (number // 2 % 2)
        np.save(folder / "features" / f"{name}.npy", bag)
        rows.append([name, cases[number], number // 2 % 2])
    write(folder / "labels.csv", ["slide_id", "case_id", "label"], rows)
    for fold in range(3):
        part = {name: ("test", "val", "train")[(own - fold) % 3] for name, own in zip(names, fold_of, strict=True)}
        lists = [[name for name in names if part[name] == kind] for kind in ("train", "val", "test")]
        write(
            folder / "clam" / f"splits_{fold}.csv",
            ["", "train", "val", "test"],
            [[n, *row] for n, row in enumerate(zip_longest(*lists, fillvalue=""))],
        )
        flags = [[name, *(str(part[name] == kind) for kind in ("train", "val", "test"))] for name in names]
        write(folder / "bool" / f"splits_{fold}_bool.csv", ["", "train", "val", "test"], flags)
    by_case = [
        [case, *("test" if number % 3 == fold else "train" for fold in range(3))] for number, case in enumerate(cases[::2])
    ]
    write(folder / "k=all.tsv", ["case_id", "fold_0", "fold_1", "fold_2"], by_case, "\t")
    write(folder / "folds.csv", ["case_id", "fold"], [[case, number % 3] for number, case in enumerate(cases[::2])])
    return folder


def write(path, header, rows, delimiter=","):
    with path.open("w", newline="") as file:
        csv.writer(file, delimiter=delimiter).writerows([header, *rows])


def patients(cohort, **options):
    return Mil(data=str(cohort / "features"), labels=str(cohort / "labels.csv"), patient="case_id", **options)


@pytest.mark.parametrize("split", ["clam", "bool", "k=all.tsv", "folds.csv"])
def test_published_splits(cohort, split):
    """Slides of CLAM's files, cases of the others: the same test patients, whose slides are one bag."""
    for fold in range(3):
        task = patients(cohort, split=str(cohort / split), fold=fold, validation=0.2)
        assert list(task.test.ids) == [f"p{number:02d}" for number in range(15) if number % 3 == fold]
        assert [len(bag) for bag in task.test.bags] == [24] * 5
        parts = [set(part.ids) for part in (task.train, task.val, task.test)]
        assert len(parts[0] | parts[1] | parts[2]) == 15 == sum(map(len, parts))
        slides = Mil(data=str(cohort / "features"), labels=str(cohort / "labels.csv"), split=str(cohort / "clam"), fold=fold)
        assert len(slides.test) == 10
    assert Mil.fold_count({"split": str(cohort / split)}) == 3
    with pytest.raises(ConfigurationError, match="has 3 splits, 0 to 2; got fold 3"):
        patients(cohort, split=str(cohort / split), fold=3)


def test_folds_hold_out_patients_not_slides(cohort):
    tested = [patients(cohort, count=5, fold=fold).test.ids for fold in range(5)]
    assert sorted(id for ids in tested for id in ids) == [f"p{number:02d}" for number in range(15)]


def test_inner_folds_never_see_the_test_bags(cohort):
    outer = set(patients(cohort, count=5, fold=1).test.ids)
    inner = [patients(cohort, count=5, fold=1, inner=part, inner_count=3) for part in range(3)]
    assert not any(outer & {*task.train.ids, *task.test.ids} for task in inner)
    assert len({id for task in inner for id in task.test.ids}) == 12


def test_splits_and_patients_that_cannot_be(cohort, tmp_path):
    write(tmp_path / "both.csv", ["slide_id", "split"], [["s00", "train"], ["s01", "test"], ["s02", "train"]])
    with pytest.raises(DataError, match="p00 is in train and in test: a bag, or a patient, has one part"):
        patients(cohort, split=str(tmp_path / "both.csv"))
    write(tmp_path / "names.csv", ["slide_id", "split"], [["s00", "train"], ["s01", "holdout"]])
    with pytest.raises(DataError, match="s01 is in 'holdout'; expected one of train, val, test"):
        read_splits(tmp_path / "names.csv")
    write(tmp_path / "other.csv", ["slide_id", "split"], [["s00", "train"], ["x", "test"]])
    with pytest.raises(DataError, match=r"there are no bags \['x'\]"):
        patients(cohort, split=str(tmp_path / "other.csv"))
    with pytest.raises(DataError, match=r"expected CLAM's splits_0.csv, splits_1.csv, ...; found none"):
        read_splits(tmp_path)
    rows = [[f"s{n:02d}", f"p{n // 2:02d}", n % 2] for n in range(30)]
    write(tmp_path / "labels.csv", ["slide_id", "case_id", "label"], rows)
    with pytest.raises(DataError, match="the slides of case_id 'p00' have different labels: s00, s01"):
        Mil(data=str(cohort / "features"), labels=str(tmp_path / "labels.csv"), patient="case_id")


def test_cross_validation_over_clams_splits_is_one_row_of_the_report(cohort, tmp_path):
    options = {"data": cohort / "features", "labels": cohort / "labels.csv", "patient": "case_id", "split": cohort / "clam"}
    given = [f"task.{name}={value}" for name, value in options.items()] + [
        "epochs=2",
        "batch=4",
        "gradient=full",
        "model.widths=[8]",
    ]
    arguments = [word for pair in given for word in ("-o", pair)]
    run = ["crossval", "mil", "ab-mil", "--out", str(tmp_path / "cv"), "--repeats", "1", *arguments]
    code, error = code_of(*run, "--folds", "5")
    assert code == 2
    assert "the split has 3 folds; got --folds 5" in " ".join(error.split())
    nested = [*run, "--each", "lr=[1e-6,0.02]", "--inner", "2"]
    done = call(*nested)
    assert done.exit_code == 0, done.output
    assert len(list((tmp_path / "cv").rglob("result.json"))) == 3 * (1 + 2 * 2)
    with (tmp_path / "cv" / "predictions.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert sorted(row["id"] for row in rows) == [f"p{number:02d}" for number in range(15)]
    write_report([tmp_path / "cv"], tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text()
    assert page.count(": 3 runs</p>") + page.count(": 2 runs</p>") + page.count(": 1 runs</p>") == len(
        chosen_rates(tmp_path / "cv")
    )
    assert "Confusion matrix" in page
    run_folder, out = str(tmp_path / "cv" / "repeat-0" / "fold-0"), tmp_path / "p.parquet"
    found = [
        "predict",
        run_folder,
        str(cohort / "features"),
        "--out",
        str(out),
        "--patients",
        str(cohort / "labels.csv"),
        "--without",
    ]
    assert call(*found).exit_code == 0
    table = pyarrow.parquet.read_table(out).to_pydict()
    assert table["level"].count("patient") == 15
    assert table["level"].count("slide") == 30
    known = {row["id"]: float(row["probability"]) for row in rows if row["fold"] == "0"}
    for id, probability in zip(table["id"], table["probability"], strict=True):
        assert id not in known or probability == pytest.approx(known[id], abs=1e-5)


def chosen_rates(folder):
    return {json.loads((folder / "repeat-0" / f"fold-{n}" / "config.json").read_text())["lr"] for n in range(3)}
