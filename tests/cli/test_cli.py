"""The command line: help with examples, exit codes, runs, sweeps that resume."""

import inspect
import json
import os
import pkgutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from setstream.cli.command import WORK
from setstream.cli.commands import CATALOGUE, app, run
from setstream.cli.serve import states_of
from setstream.cli.sweep import combinations, next_run, read_sweep
from setstream.cli.train import assignments
from setstream.errors import ConfigurationError
from setstream.training.record import read_metrics
from tests.cli.write_catalogue import catalogue_text

SMALL = ["-o", "task.points=32", "-o", "task.test_sets=4", "-o", "task.test_points=16", "-o", "tensorboard=false"]
COMMANDS = [[command.name or command.callback.__name__] for command in app.registered_commands]
COMMANDS += [["slides", command.callback.__name__] for command in app.registered_groups[0].typer_instance.registered_commands]


def call(*arguments):
    return CliRunner().invoke(app, list(arguments))


def code_of(*arguments):
    """The exit code and the error text of the program itself."""
    done = subprocess.run([sys.executable, "-m", "setstream.cli", *arguments], capture_output=True, text=True, timeout=300)
    return done.returncode, done.stderr


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_help_helps(command):
    done = call(*command, "--help")
    assert done.exit_code == 0
    assert "Usage" in done.output


def test_help_and_the_lists_of_names_do_not_import_torch():
    """Of the program and of every command: torch takes seconds to import."""
    code = """
import sys
from typer.testing import CliRunner
from setstream.cli.commands import app
for arguments in (["--help"], ["--version"], ["tasks"], ["models"], ["models", "mil"], *eval(sys.argv[1])):
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0 and done.output, (arguments, done.output)
    assert "torch" not in sys.modules, arguments
"""
    helps = [[*command, "--help"] for command in COMMANDS]
    done = subprocess.run([sys.executable, "-c", code, repr(helps)], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("flags", WORK, ids=lambda flags: flags.__name__)
def test_the_work_of_a_command_takes_its_flags(flags):
    work = inspect.signature(pkgutil.resolve_name(WORK[flags]))
    work.bind(**dict.fromkeys(inspect.signature(flags).parameters))


def test_the_catalogue_is_that_of_the_tasks():
    assert CATALOGUE.read_text() == catalogue_text(), "run python -m tests.cli.write_catalogue"


def test_models_of_a_task_of_your_own_are_listed():
    assert "umbc+set-transformer" in call("models", "setstream.tasks.clustering:Clustering").output


def test_examples_are_in_the_help():
    assert "umbc+set-transformer --out runs/umbc" in call("train", "--help").output.replace("\n", " ").replace("  ", " ")


def test_tasks_and_models_are_listed():
    assert "clustering" in call("tasks").output
    output = call("models", "clustering").output
    assert "umbc+set-transformer" in output
    assert "set-transformer" in output


def test_train_and_evaluate(tmp_path):
    out = str(tmp_path / "run")
    done = call("train", "clustering", "deepsets", "--steps", "5", "--out", out, *SMALL)
    assert done.exit_code == 0, done.output
    found = json.loads(call("evaluate", out, "--json").output)
    assert found == pytest.approx(json.loads((tmp_path / "run" / "result.json").read_text())["metrics"])
    other = json.loads(call("evaluate", out, "--json", "-o", "task.test_seed=5").output)
    assert other["oracle"] != found["oracle"]


def test_flags_win_over_the_file(tmp_path):
    file = tmp_path / "run.toml"
    file.write_text(
        'task = "clustering"\nmodel = "sse"\nsteps = 50\n[task_options]\npoints = 32\ntest_sets = 4\ntest_points = 8\n'
    )
    out = tmp_path / "run"
    done = call("train", "--config", str(file), "--steps", "3", "--out", str(out), "-o", "tensorboard=false")
    assert done.exit_code == 0, done.output
    written = json.loads((out / "config.json").read_text())
    assert (written["steps"], written["model"], written["task_options"]["points"]) == (3, "sse", 32)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train", "clustering"], "needs model"),
        (["train", "clustering", "resnet"], "no model 'resnet'"),
        (["train", "sorting", "deepsets"], "unknown task"),
        (["train", "clustering", "deepsets", "--gradient", "some"], "gradient must be one of"),
        (["train", "clustering", "deepsets", "-o", "lr"], "NAME=VALUE"),
        (["train", "clustering", "deepsets", "-o", "task.colour=3"], "does not take these options"),
        (["evaluate", "nowhere"], "not a run folder"),
        (["sweep", "nowhere.toml"], "no configuration file"),
    ],
)
def test_wrong_options_give_exit_code_two_and_a_message(arguments, message, monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["setstream", *arguments])
    with pytest.raises(SystemExit) as exit_:
        run()
    assert exit_.value.code == 2
    assert message in " ".join(capsys.readouterr().err.split())


def test_an_unknown_command_is_an_error():
    assert call("fly").exit_code == 2


def test_an_interrupted_run_exits_with_130_and_goes_on(tmp_path):
    out = tmp_path / "run"
    options = ["train", "clustering", "deepsets", "--steps", "100000", "--out", str(out), *SMALL, "-o", "log_every=10"]
    process = subprocess.Popen(
        [sys.executable, "-m", "setstream.cli", *options], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    while not read_metrics(out, "train"):  # when it has logged its first steps
        assert process.poll() is None, process.communicate()[1]
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=300)
    assert process.returncode == 130
    assert list((out / "checkpoints").glob("step-*"))
    assert call("evaluate", str(out), "--json").exit_code == 0  # a checkpoint can be tested, too


def test_a_sweep_skips_what_is_done_resumes_the_rest_and_reports_failures(tmp_path):
    file = tmp_path / "sweep.toml"
    file.write_text(
        '[defaults]\ntask = "clustering"\nsteps = 4\ntensorboard = false\n'
        "[defaults.task_options]\npoints = 32\ntest_sets = 4\ntest_points = 8\n"
        '[[runs]]\nname = "good"\nmodel = "deepsets"\n[[runs]]\nname = "bad"\nmodel = "resnet"\n'
    )
    done = call("sweep", str(file), "--out", str(tmp_path / "runs"), "--jobs", "2")
    assert done.exit_code == 1, done.output
    assert "bad failed" in done.output
    stamp = os.stat(tmp_path / "runs" / "good" / "result.json").st_mtime_ns
    file.write_text(file.read_text().replace("resnet", "sse"))
    done = call("sweep", str(file), "--out", str(tmp_path / "runs"))
    assert done.exit_code == 0, done.output
    assert "1 already done" in done.output
    assert os.stat(tmp_path / "runs" / "good" / "result.json").st_mtime_ns == stamp


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[defaults]\n", "must hold"),
        ('[[runs]]\nmodel = "sse"\n', "needs a name"),
        ('[[runs]]\nname = "a"\ntask = "t"\nmodel = "sse"\n[[runs]]\nname = "a"\ntask = "t"\nmodel = "sse"\n', "given twice"),
    ],
)
def test_a_sweep_file_that_cannot_be_says_why(tmp_path, text, message):
    (tmp_path / "sweep.toml").write_text(text)
    code, error = code_of("sweep", str(tmp_path / "sweep.toml"))
    assert code == 2
    assert message in " ".join(error.split())


def test_cross_validation_resumes_and_averages(tmp_path):
    options = ["-o", "task.data=musk1", "-o", "steps=5", "-o", "batch=2", "-o", "gradient=full", "-o", "model.widths=[8]"]
    arguments = ["crossval", "mil", "deepsets", "--out", str(tmp_path), "--folds", "3", "--repeats", "2", *options]
    done = call(*arguments)
    assert done.exit_code == 0, done.output
    assert "accuracy" in done.output
    assert len(list(tmp_path.rglob("result.json"))) == 6
    rows = (tmp_path / "predictions.csv").read_text().splitlines()
    assert rows[0] == "repeat,fold,id,truth,probability,label,threshold"
    assert len(rows) == 1 + 2 * 92  # each of the 92 bags of musk1, once per repeat
    stamps = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("result.json")}
    assert call(*arguments).exit_code == 0
    assert stamps == {path: path.stat().st_mtime_ns for path in tmp_path.rglob("result.json")}


def test_cross_validation_of_one_split_is_an_error(tmp_path):
    """Every fold would be the same run, and the interval over them would say nothing."""
    (tmp_path / "split.csv").write_text("slide_id,split\na,train\nb,test\n")
    options = ["--out", str(tmp_path / "runs"), "-o", f"task.split={tmp_path / 'split.csv'}"]
    code, error = code_of("crossval", "mil", "deepsets", *options)
    assert code == 2
    assert "every fold would be the same run. Leave it out to cross-validate" in " ".join(error.split())
    assert not (tmp_path / "runs").exists()


def test_a_run_for_each_combination(tmp_path):
    text = """
    [[runs]]
    name = "{model}-{seed}"
    each = { model = ["deepsets", "sse"], seed = [0, 1] }
    task = "clustering"
    model = "{model}"
    seed = "{seed}"

    [[runs]]
    name = "next-{seed}"
    each = { seed = [1] }
    after = ["sse-{seed}"]
    init_from = "{out}/sse-{seed}"
    task = "clustering"
    model = "sse"
    """
    (tmp_path / "sweep.toml").write_text(text)
    *runs, following = read_sweep(tmp_path / "sweep.toml", tmp_path / "runs")
    assert [run.name for run in runs] == ["deepsets-0", "deepsets-1", "sse-0", "sse-1"]
    assert [(run.config.model, run.config.seed) for run in runs] == [("deepsets", 0), ("deepsets", 1), ("sse", 0), ("sse", 1)]
    assert following.after == ["sse-1"]
    assert following.config.init_from == str(tmp_path / "runs" / "sse-1")
    (tmp_path / "sweep.toml").write_text(text.replace("[0, 1]", "0"))
    with pytest.raises(ConfigurationError, match="a list of values; got"):
        read_sweep(tmp_path / "sweep.toml", tmp_path)


@pytest.mark.parametrize("file", sorted((Path(__file__).parents[2] / "sweeps").glob("*.toml")), ids=lambda file: file.stem)
def test_the_sweeps_of_the_repository_can_be_read(file, tmp_path):
    runs = read_sweep(file, tmp_path)
    assert all("{out}" not in json.dumps(run.config.to_dict()) for run in runs)


def test_runs_wait_for_those_that_they_begin_with(tmp_path):
    text = (
        '[defaults]\ntask = "clustering"\nmodel = "deepsets"\n[[runs]]\nname = "one"\n[[runs]]\nname = "two"\nafter = ["one"]'
    )
    (tmp_path / "sweep.toml").write_text(text + '\ninit_from = "{out}/one"')
    one, two = read_sweep(tmp_path / "sweep.toml", tmp_path / "runs")
    assert two.config.init_from == str(tmp_path / "runs" / "one")
    waiting = [one, two]
    assert next_run(waiting, [one, two]) is one
    assert next_run(waiting, [one, two]) is None
    one.folder.mkdir(parents=True)
    (one.folder / "config.json").write_text(json.dumps(one.config.to_dict()))
    (one.folder / "result.json").write_text("{}")
    assert next_run(waiting, [one, two]) is two
    one.failed, waiting = True, [two]
    assert next_run(waiting, [one, two]) is None
    assert two.failed
    assert not waiting
    (tmp_path / "bad.toml").write_text(text.replace('after = ["one"]', 'after = ["three"]'))
    with pytest.raises(ConfigurationError, match="two comes after \\['three'\\]: name runs that are defined above it"):
        read_sweep(tmp_path / "bad.toml", tmp_path)


def test_options_are_json_or_texts():
    options = assignments(["lr=0.01", "amp=true", "model.num_slots=16", "model.slots=learned"])
    assert options == {"lr": 0.01, "amp": True, "model_options": {"num_slots": 16, "slots": "learned"}}


def test_each_combination_of_values_is_a_run():
    runs = combinations({"name": "{gradient}-{n}", "seed": "{n}", "each": {"gradient": ["full"], "n": [0, 1]}})
    assert runs == [{"name": "full-0", "seed": 0}, {"name": "full-1", "seed": 1}]


def test_each_model_has_a_file_for_its_states():
    names = ("runs/mine", "package.module:make", "umbc+set-transformer")
    assert [states_of(name) for name in names] == ["mine.db", "make.db", "umbc+set-transformer.db"]
