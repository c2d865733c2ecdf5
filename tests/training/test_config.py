"""Options of a run: types, choices, files, schedules."""

import pytest

from setstream.errors import ConfigurationError
from setstream.training.config import TrainConfig, read_options
from setstream.training.task import in_epochs, mix


def config(**options):
    return TrainConfig.from_dict({"task": "clustering", "model": "deepsets"} | options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"stepps": 3}, "unknown options"),
        ({"steps": "many"}, "steps must be of type int"),
        ({"steps": True}, "steps must be of type int"),
        ({"steps": 0}, "at least 1"),
        ({"lr": -1.0}, "lr must be positive"),
        ({"gradient": "some"}, "gradient must be one of"),
        ({"optimizer": "lion"}, "optimizer must be one of"),
        ({"amp": "fp8"}, "amp must be one of"),
        ({"gradient": "none"}, "trains nothing; got gradient"),
        ({"clip": 0.0}, "clip must be positive"),
        ({"warmup": -3}, "warmup must not be negative"),
        ({"threads": 0}, "threads must be at least 1"),
        ({"beta1": 5.0}, "beta1 and beta2 lie between 0 and 1; got beta1 = 5.0"),
    ],
)
def test_wrong_options_are_refused_with_a_message(options, message):
    with pytest.raises(ConfigurationError, match=message):
        config(**options)


def test_task_and_model_are_needed():
    with pytest.raises(ConfigurationError, match="needs model and task"):
        TrainConfig.from_dict({})


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.toml", 'task = "clustering"\nmodel = "sse"\nlr = 1\n[model_options]\nnormalise = true\n'),
        ("a.json", '{"task": "clustering", "model": "sse", "lr": 1, "model_options": {"normalise": true}}'),
    ],
)
def test_files_of_both_kinds_say_the_same(tmp_path, name, text):
    (tmp_path / name).write_text(text)
    found = TrainConfig.from_dict(read_options(tmp_path / name))
    assert found == TrainConfig("clustering", "sse", lr=1.0, model_options={"normalise": True})


def test_files_that_cannot_be_read_say_why(tmp_path):
    with pytest.raises(ConfigurationError, match="no configuration file"):
        read_options(tmp_path / "none.toml")
    for name, text in (("bad.toml", "a = "), ("bad.json", "{"), ("list.json", "[1]"), ("a.txt", "")):
        (tmp_path / name).write_text(text)
        with pytest.raises(ConfigurationError):
            read_options(tmp_path / name)


def test_schedules():
    step = config(steps=100, schedule="step", lr=1.0)
    assert [step.rate(n) for n in (0, 69, 70, 99)] == [1.0, 1.0, 0.1, 0.1]
    cosine = config(steps=100, schedule="cosine", lr=1.0, warmup=10, final_factor=0.1)
    rates = [cosine.rate(n) for n in range(100)]
    assert rates[0] == pytest.approx(0.1)
    assert max(rates) == pytest.approx(1.0)
    assert rates[-1] == pytest.approx(0.1, abs=0.01)
    assert rates[10:] == sorted(rates[10:], reverse=True)


def test_batches_depend_on_seed_and_step_alone():
    assert mix(1, 2, 0, 2) == mix(1, 2, 0, 2)
    seeds = {mix(seed, step) for seed in range(30) for step in range(1000)}
    assert len(seeds) == 30_000


def test_every_item_comes_once_per_epoch():
    assert sorted(in_epochs(0, 2, 4) + in_epochs(1, 2, 4)) == [0, 1, 2, 3]
    assert sorted(in_epochs(0, 6, 3)) == [0, 0, 1, 1, 2, 2]
