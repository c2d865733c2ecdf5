"""Kinds of labels: losses and metrics beside their definitions, invalid tables, training, prediction and report of each."""

import csv
import gc
import json
import os
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
from sklearn import metrics as reference
from torch.autograd import gradcheck

from setstream.data import ArraySource
from setstream.errors import ConfigurationError, DataError
from setstream.report import write_report
from setstream.tasks.mil import Bags, Mil
from setstream.tasks.mil import metrics as own
from setstream.tasks.mil.predictions import read_target
from setstream.tasks.mil.targets import TARGETS, target_class, target_from
from setstream.tasks.mil.targets.survival import Cox, cox_loss, discrete_loss
from setstream.training import Encode, TrainConfig, Trainer
from setstream.training.record import read_metrics
from tests.cli.test_cli import call, code_of


def survival(count, seed=0):
    """Times with ties, and events."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(1, 9, (count,), generator=generator).double(), torch.rand(count, generator=generator).round().double()


# -- losses and metrics -----------------------------------------------------------------------------------------------


def test_cox_is_the_partial_likelihood():
    time, event = survival(20)
    risk = torch.randn(20, dtype=torch.float64, requires_grad=True)
    total = 0.0
    for i in range(20):
        if event[i]:
            at_risk = [j for j in range(20) if time[j] >= time[i]]
            total -= float((risk[i] - risk[at_risk].exp().sum().log()).detach())
    assert float(cox_loss(risk, time, event)) == pytest.approx(total / float(event.sum()))
    assert gradcheck(lambda risk: cox_loss(risk, time, event), [risk])
    assert float(cox_loss(risk, time, torch.zeros(20))) == 0.0


def test_discrete_time_is_the_likelihood_of_intervals():
    logits, interval = torch.randn(30, 4, dtype=torch.float64), torch.arange(30) % 4
    event = (torch.arange(30) % 3 > 0).double()
    hazard, total = logits.sigmoid(), 0.0
    for h, y, e in zip(hazard, interval.tolist(), event.tolist(), strict=True):
        before = float((1 - h[:y]).prod())
        total -= np.log(before * float(h[y]) if e else before * float(1 - h[y]))
    assert float(discrete_loss(logits, interval, event)) == pytest.approx(total / 30)


def test_concordance_is_the_share_of_pairs_in_order():
    time, event = survival(40, seed=1)
    risk = torch.randint(0, 5, (40,), generator=torch.Generator().manual_seed(2)).double()
    right = pairs = 0.0
    for i in range(40):
        for j in range(40):
            if event[i] and (time[i] < time[j] or (time[i] == time[j] and not event[j])):
                pairs += 1
                right += 1.0 if risk[i] > risk[j] else 0.5 if risk[i] == risk[j] else 0.0
    assert own.c_index(risk, time, event) == pytest.approx(right / pairs)
    assert own.c_index(-time, time, torch.ones(40)) == 1.0
    assert np.isnan(own.c_index(risk, time, torch.zeros(40)))


def test_the_log_rank_test_of_a_textbook():
    """Freireich's 42 children with leukaemia, 6-MP against placebo: chi-square 16.79 (Kalbfleisch and Prentice, 1980)."""
    drug = [6, 6, 6, 6, 7, 9, 10, 10, 11, 13, 16, 17, 19, 20, 22, 23, 25, 32, 32, 34, 35]
    seen = [1, 1, 1, 0, 1, 0, 1, 0, 0, 1, 1, 0, 0, 0, 1, 1, 0, 0, 0, 0, 0]
    placebo = [1, 1, 2, 2, 3, 4, 4, 5, 5, 8, 8, 8, 8, 11, 11, 12, 12, 15, 17, 22, 23]
    time, event = torch.tensor([*drug, *placebo]).double(), torch.tensor([*seen, *[1] * 21])
    group = torch.arange(42) < 21
    assert own.logrank(time, event, group) == pytest.approx(4.17e-5, rel=0.01)
    times, left = own.kaplan_meier(time[group], event[group])
    assert times.tolist() == [0, 6, 7, 10, 13, 16, 22, 23]
    assert left.tolist() == pytest.approx([1, 0.857, 0.807, 0.753, 0.690, 0.627, 0.538, 0.448], abs=1e-3)


def test_metrics_of_classes_and_numbers_are_those_of_scikit_learn():
    generator = np.random.default_rng(0)
    for _ in range(10):
        label, probability = generator.integers(0, 3, 40), generator.dirichlet([1, 1, 1], 40)
        found = own.class_summary(torch.tensor(probability), torch.tensor(label))
        answer = probability.argmax(1)
        expected = {
            "accuracy": reference.accuracy_score(label, answer),
            "balanced_accuracy": reference.balanced_accuracy_score(label, answer),
            "auroc": reference.roc_auc_score(label, probability, multi_class="ovr", average="macro"),
            "kappa": reference.cohen_kappa_score(label, answer),
            "quadratic_kappa": reference.cohen_kappa_score(label, answer, weights="quadratic"),
            "f1": reference.f1_score(label, answer, average="macro"),
        }
        assert {name: found[name] for name in expected} == pytest.approx(expected)
        value, guess = generator.normal(size=30), generator.normal(size=30)
        found = own.regression_summary(torch.tensor(guess), torch.tensor(value))
        assert found["r2"] == pytest.approx(reference.r2_score(value, guess))
        assert found["mae"] == pytest.approx(reference.mean_absolute_error(value, guess))


# -- Cox through whole patients ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["ab-mil", "umbc+set-transformer", "ds-mil"])
def test_the_gradient_of_cox_over_64_patients_is_that_of_ordinary_autograd(name):
    """In float64, from sources in chunks; no call of phi sees more than a chunk, so memory does not grow with the patients."""
    torch.manual_seed(0)
    sizes = torch.randint(3, 40, (64,)).tolist()
    tensors = [torch.randn(size, 6, dtype=torch.float64) for size in sizes]
    values = torch.stack(survival(64), 1)
    task = Mil(bags=Bags([ArraySource(x) for x in tensors], values, Cox()), count=8)
    model = task.build(name, widths=[8]).double().eval()
    rows = []
    model.encoder.phi.register_forward_hook(lambda _, inputs, output: rows.append(inputs[0].shape[:-1].numel()))
    gradients = {}
    for kind, bags in {"exact": [ArraySource(x) for x in tensors], "full": tensors}.items():
        model.zero_grad()
        rows.clear()
        loss = task.loss(model, {"bags": bags, "label": values}, Encode(kind, chunk_size=16))
        loss.backward()
        assert kind == "full" or 0 < max(rows) <= 16
        gradients[kind] = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    for name, gradient in gradients["full"].items():
        torch.testing.assert_close(gradients["exact"][name], gradient, rtol=1e-9, atol=1e-12)


def two_processes(*arguments):
    """`setstream train mil ...` by two processes under torchrun."""
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "setstream.cli"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.run([*launch, *arguments], capture_output=True, text=True, timeout=400, env=environment)


@pytest.mark.xdist_group("two processes")
def test_cox_over_two_processes_needs_all_patients_in_both(cohort, tmp_path):
    """With parts of every patient, two processes have the loss of one; with shares of the patients, Cox is an error."""
    data = {"data": str(cohort / "features"), "labels": str(cohort / "labels.csv"), "kind": "cox", "patient": "case_id"}
    config = Mil.config("ab-mil", data, steps=4, lr=1e-2, log_every=1, model_options={"widths": [8]}, tensorboard=False)
    Trainer(Mil(**config.task_options), replace(config, parallel="set"), tmp_path / "one", shown=False).run()
    arguments = ["train", "--config", str(tmp_path / "one" / "config.json"), "--out"]
    done = two_processes(*arguments, str(tmp_path / "two"))
    assert done.returncode == 0, done.stderr[-3000:]
    losses = [[line["loss"] for line in read_metrics(tmp_path / name, "train")] for name in ("one", "two")]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)
    done = two_processes(*arguments, str(tmp_path / "shares"), "--parallel", "data")
    assert done.returncode
    assert "use --parallel set" in " ".join(done.stderr.split())


def test_the_memory_of_patients_that_wait_for_their_gradient_is_that_of_their_states():
    """Nothing as large as a chunk is kept between the forward pass of a patient and the backward pass of the batch."""
    torch.manual_seed(0)
    values = torch.stack(survival(8), 1)
    task = Mil(bags=Bags([ArraySource(torch.randn(3000, 50)) for _ in range(8)], values, Cox()), count=2)
    model, encode = task.build("ab-mil", widths=[8]), Encode("exact", chunk_size=1000)
    before = {id(object) for object in gc.get_objects() if issubclass(type(object), torch.Tensor)}
    waiting = [encode(model.encoder, [bag]) for bag in task.train.bags]
    kept = [object for object in gc.get_objects() if issubclass(type(object), torch.Tensor) and id(object) not in before]
    assert len(waiting) == 4
    assert max(tensor.untyped_storage().nbytes() for tensor in kept) < 1000 * 8 * 4


# -- every kind from files --------------------------------------------------------------------------------------------

KINDS = {
    "binary": ({"positive": "tumor", "columns": "label"}, "auroc", 0.9),
    "classes": ({"columns": "grade", "class_weights": True}, "auroc", 0.9),
    "multilabel": ({"columns": ["er", "pr"]}, "auroc", 0.8),
    "regression": ({"columns": "score"}, "r2", 0.5),
    "cox": ({}, "c_index", 0.65),
    "discrete-time": ({"columns": ["time", "event"]}, "c_index", 0.65),
}


@pytest.fixture(scope="module")
def cohort(tmp_path_factory):
    """48 slides of 24 patients in files; the first feature of some patches is shifted by what the labels say."""
    folder = tmp_path_factory.mktemp("cohort")
    (folder / "features").mkdir()
    generator = np.random.default_rng(0)
    rows = []
    for number in range(48):
        grade = number // 2 % 3
        bag = generator.normal(size=(int(generator.integers(20, 40)), 6)).astype("float32")
        bag[:8, 0] += 3 * grade
        np.save(folder / "features" / f"s{number:02d}.npy", bag)
        labels = {"label": "tumor" if grade else "normal", "grade": f"G{grade}", "er": int(grade > 0), "pr": int(grade > 1)}
        labels |= {"score": 10.0 + 5 * grade, "time": 30.0 - 10 * grade + number // 2 % 5, "event": int(number // 2 % 4 > 0)}
        rows.append({"slide_id": f"s{number:02d}", "case_id": f"p{number // 2:02d}"} | labels)
    rows[3]["er"] = rows[2]["er"] = ""  # not known of the second patient
    with (folder / "labels.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)
    return folder


@pytest.mark.parametrize("kind", TARGETS)
def test_every_kind_is_trained_tested_predicted_and_reported(cohort, tmp_path, kind):
    options, metric, least = KINDS[kind]
    task_options = {"data": str(cohort / "features"), "labels": str(cohort / "labels.csv"), "kind": kind, "count": 3} | options
    config = Mil.config(
        "ab-mil", task_options, model_options={"widths": [16]}, epochs=15, batch=4, lr=2e-2, gradient="full", tensorboard=False
    )
    result = Trainer(Mil(**config.task_options), config, tmp_path / "run", shown=False).run()
    assert result.metrics[metric] > least, result.metrics
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    quick, trained = ([line for line in lines if line["kind"] == part] for part in ("validation", "train"))
    assert {"loss", "selection", "epoch"} <= set(quick[0])
    assert [line["epoch"] for line in trained] == [line["epoch"] for line in quick] == list(range(1, len(quick) + 1))
    target = read_target(tmp_path / "run")
    assert target == target_from(json.loads(json.dumps(target.to_dict())))
    done = call("predict", str(tmp_path / "run"), str(cohort / "features"), "--out", str(tmp_path / "p.csv"))
    assert done.exit_code == 0, done.output
    with (tmp_path / "p.csv").open() as file:
        everything = {row.pop("id"): row for row in csv.DictReader(file)}
    with (tmp_path / "run" / "predictions.csv").open() as file:
        tested = list(csv.DictReader(file))
    assert len(everything) == 48
    assert len(tested) == 16
    for row in tested:  # the same answers, whichever way they were computed
        for name, value in everything[row["id"]].items():
            assert row[name] == value or float(row[name]) == pytest.approx(float(value), rel=1e-4, abs=1e-5)
    write_report([tmp_path / "run"], tmp_path / "report.html", tmp_path / "figures")
    drawn = " ".join(path.name for path in (tmp_path / "figures").iterdir())
    figure = {"regression": "predictions", "cox": "kaplan-meier", "discrete-time": "kaplan-meier"}.get(kind, "roc-curves")
    assert figure in drawn


@pytest.mark.parametrize(
    ("kind", "options", "error", "message"),
    [
        ("classes", {"columns": "none"}, DataError, "has none of the columns none"),
        ("multilabel", {}, ConfigurationError, "several labels at once need their columns"),
        ("multilabel", {"columns": ["score"]}, DataError, "labels must be 0, 1 or empty; got 10"),
        ("regression", {"columns": "label"}, DataError, "labels must be numbers; got '(normal|tumor)'"),
        ("cox", {"columns": ["time"]}, ConfigurationError, "survival needs two columns"),
        ("cox", {"columns": ["time", "score"]}, DataError, "a time of at least 0, and score that is 0 or 1"),
        ("binary", {"columns": "grade"}, DataError, "for more than two, task.kind=classes"),
        ("grades", {}, ConfigurationError, "unknown kind of labels 'grades': choose one of binary, classes"),
    ],
)
def test_tables_that_cannot_be_say_why(cohort, kind, options, error, message):
    with pytest.raises(error, match=message):
        Mil(data=str(cohort / "features"), labels=str(cohort / "labels.csv"), kind=kind, **options)


def test_censorship_is_the_opposite_of_an_event():
    rows = [{"survival_months": "3", "censorship": "1"}, {"survival_months": "5.5", "censorship": "0"}]
    assert target_class("cox").read(rows, (), None, "x")[1].tolist() == [[3.0, 0.0], [5.5, 1.0]]


# -- runs in epochs ---------------------------------------------------------------------------------------------------


def test_epochs_become_steps_and_patience_ends_a_run(tmp_path):
    config = TrainConfig("mil", "ab-mil", epochs=5, batch=4, select="-loss", patience=2)
    assert config.in_steps(50).steps == 60
    assert config.in_steps(50).evaluate_every == 12
    assert not config.in_steps(50).changed_since(json.loads(json.dumps(config.to_dict())))
    with pytest.raises(ConfigurationError, match="patience needs select"):
        TrainConfig("mil", "ab-mil", patience=2)
    with pytest.raises(ConfigurationError, match="draws its training sets without end"):
        TrainConfig("clustering", "deepsets", epochs=2).in_steps(None)
    values = torch.arange(24) % 2
    task = Mil(bags=Bags([torch.randn(5, 3) for _ in values], values), count=4, validation=0.25)
    options = {"model_options": {"widths": [4]}, "lr": 1e-9, "patience": 3, "tensorboard": False}
    result = Trainer(task, Mil.config("deepsets", epochs=50, **options), tmp_path / "run", shown=False).run()
    assert result.done
    assert result.step < 50 * task.size  # nothing is learned at this rate
    again = Trainer(task, Mil.config("deepsets", epochs=50, **options), tmp_path / "run", shown=False).run()
    assert (again.done, again.step, again.metrics) == (True, result.step, result.metrics)


def test_given_steps_take_the_place_of_epochs():
    config = Mil.config("ab-mil", steps=7)
    assert (config.steps, config.epochs, config.patience) == (7, None, None)
    assert Mil.config("ab-mil", {"validation": 0}).select is None  # the test bags choose nothing
    assert Mil.config("ab-mil", {"kind": "cox"}).batch > 1
    assert (Mil.config("ab-mil").gradient, Mil.config("ab-mil").select) == ("exact", "-loss")


def test_a_model_without_a_kind_of_labels_gives_logits_only(tmp_path):
    task = Mil(bags=Bags([torch.randn(5, 3) for _ in range(8)], torch.arange(8) % 2), count=2)
    task.build("ab-mil", widths=[4]).save_pretrained(tmp_path / "model")
    np.save(tmp_path / "a.npy", np.zeros((4, 3), np.float32))
    arguments = ["predict", str(tmp_path / "model"), str(tmp_path / "a.npy"), "--out", str(tmp_path / "p.csv")]
    code, error = code_of(*arguments)
    assert code == 2
    assert "does not say what its outputs mean" in " ".join(error.split())
    assert call(*arguments, "--logits").exit_code == 0
    assert (tmp_path / "p.csv").read_text().splitlines()[0] == "id,logit_0"
