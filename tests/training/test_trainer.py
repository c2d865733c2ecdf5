"""The trainer: bit-for-bit resuming, interruption, loss that is not finite, folders that hold another run."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from setstream._utils.atomic import locked
from setstream.errors import ConfigurationError, NonFiniteError
from setstream.tasks.clustering import Clustering
from setstream.training import TrainConfig, Trainer
from setstream.training.checkpoint import Checkpoints, weights_of
from setstream.training.record import read_metrics
from tests.kills import kill_after

ROOT = Path(__file__).parents[2]


def config(**options):
    standard = {"steps": 60, "batch": 2, "checkpoint_every": 7, "log_every": 5, "evaluate_every": 25, "tensorboard": False}
    return TrainConfig("clustering", options.pop("model", "umbc+set-transformer"), **(standard | options))


def task(**options):
    return Clustering(**({"points": 32, "test_points": 16, "test_sets": 4} | options))


def train(folder, **options):
    return Trainer(task(), config(**options), folder, shown=False).run()


def weights(folder):
    return load_file(Path(folder) / "model.safetensors")


def assert_same_weights(a, b):
    assert a.keys() == b.keys()
    for name in a:
        assert torch.equal(a[name], b[name]), name


@pytest.mark.parametrize(("options", "expected"), [({}, 1), ({"threads": 3}, 3)])
def test_small_models_use_one_thread_and_the_callers_threads_come_back(tmp_path, options, expected):
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        train(tmp_path, steps=2, **options)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
    assert json.loads((tmp_path / "environment.json").read_text())["threads"] == expected


def test_a_run_folder_holds_everything(tmp_path):
    result = train(tmp_path, tensorboard=True)
    assert result.done
    assert set(result.metrics) >= {"nll", "oracle", "gap"}
    for name in ("config.json", "environment.json", "metrics.jsonl", "model.safetensors", "result.json", "tensorboard"):
        assert (tmp_path / name).exists(), name
    assert [line["step"] for line in read_metrics(tmp_path, "train")] == list(range(5, 61, 5))
    assert [line["step"] for line in read_metrics(tmp_path, "test")] == [25, 50]
    assert Checkpoints(tmp_path / "checkpoints").steps() == [56, 60]
    again = TrainConfig.from_dict(json.loads((tmp_path / "config.json").read_text()))
    assert again == config(tensorboard=True)


def test_the_same_seed_gives_the_same_weights_and_another_does_not(tmp_path):
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        train(tmp_path / name, seed=seed, steps=10)
    assert_same_weights(weights(tmp_path / "a"), weights(tmp_path / "b"))
    assert any(not torch.equal(x, weights(tmp_path / "c")[name]) for name, x in weights(tmp_path / "a").items())


def kill_and_resume(folder, kills, seed, **options):
    """Train in children that are killed at random steps, each resuming it; then to the end. Gives their checkpoints."""
    rng, reached = random.Random(seed), []

    def work(tick):
        clustering = task()
        draw = clustering.batch
        clustering.batch = lambda *arguments: tick() or draw(*arguments)
        Trainer(clustering, config(**options), folder, shown=False).run()

    for _ in range(kills):
        assert kill_after(work, ticks=rng.randrange(30), lines=rng.randrange(3000))
        reached.append(max(Checkpoints(folder / "checkpoints").steps(), default=0))
    train(folder, **options)
    return reached


def without_memory(folder):
    """The lines of metrics.jsonl, except for the memory of the process, which is another one."""
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [{name: value for name, value in line.items() if name != "memory_mib"} for line in lines]


@pytest.mark.parametrize("gradient", ["unbiased", "importance"])
def test_killing_and_resuming_gives_the_same_weights_bit_for_bit(tmp_path, gradient):
    """Twenty SIGKILLs at random steps over both modes, in a process without threads, which can be forked."""
    script = f"""
import torch
torch.set_num_threads(1)
from pathlib import Path
from tests.training.test_trainer import kill_and_resume, train
folder = Path({str(tmp_path)!r})
train(folder / "whole", steps=200, gradient={gradient!r})
print(*kill_and_resume(folder / "killed", kills=10, seed=3, steps=200, gradient={gradient!r}))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=300, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-3000:]
    reached = [int(step) for step in done.stdout.split()]
    assert len(set(reached)) >= 3, reached  # they were killed at work, and each resumed the one before
    assert_same_weights(weights(tmp_path / "killed"), weights(tmp_path / "whole"))
    assert without_memory(tmp_path / "killed") == without_memory(tmp_path / "whole")


def test_ctrl_c_saves_and_the_run_goes_on(tmp_path):
    trainer = Trainer(task(), config(steps=200, checkpoint_every=1000), tmp_path / "a", shown=False)
    losses = trainer.task.loss

    def loss(model, batch, encode):
        if trainer.step == 33:
            os.kill(os.getpid(), signal.SIGINT)
        return losses(model, batch, encode)

    trainer.task.loss = loss
    result = trainer.run()
    assert not result.done
    assert result.step == 34
    assert Checkpoints(tmp_path / "a" / "checkpoints").steps() == [34]
    assert train(tmp_path / "a", steps=200, checkpoint_every=1000).done
    train(tmp_path / "b", steps=200, checkpoint_every=1000)
    assert_same_weights(weights(tmp_path / "a"), weights(tmp_path / "b"))


def test_a_loss_that_is_not_finite_stops_with_the_step_and_a_saved_state(tmp_path):
    trainer = Trainer(task(), config(), tmp_path, shown=False)
    losses = trainer.task.loss
    trainer.task.loss = lambda model, batch, encode: losses(model, batch, encode) * (float("nan") if trainer.step == 12 else 1)
    with pytest.raises(NonFiniteError, match="at step 12.*failed"):
        trainer.run()
    assert Checkpoints(tmp_path / "failed").steps() == [12]
    saved = load_file(tmp_path / "failed" / "step-00000012" / "weights.safetensors")
    assert all(torch.isfinite(tensor).all() for tensor in saved.values())


def test_a_gradient_that_is_not_finite_never_reaches_the_weights(tmp_path):
    trainer = Trainer(task(), config(), tmp_path, shown=False)
    losses = trainer.task.loss

    def loss(model, batch, encode):
        value = losses(model, batch, encode)
        if trainer.step == 12:
            value.register_hook(lambda gradient: gradient * float("nan"))
        return value

    trainer.task.loss = loss
    with pytest.raises(NonFiniteError, match="at step 12.*gradient is not finite"):
        trainer.run()
    for name in ("failed", "checkpoints"):
        folder = Checkpoints(tmp_path / name)
        saved = load_file(folder.folder / f"step-{folder.steps()[-1]:08d}" / "weights.safetensors")
        assert all(torch.isfinite(tensor).all() for tensor in saved.values())


def test_a_finished_run_stays_as_it_is(tmp_path):
    first = train(tmp_path, steps=10)
    before = {name: (tmp_path / name).read_bytes() for name in ("metrics.jsonl", "result.json", "model.safetensors")}
    again = train(tmp_path, steps=10)
    assert again == first
    assert before == {name: (tmp_path / name).read_bytes() for name in before}


def test_two_processes_cannot_train_in_one_folder(tmp_path):
    with locked(tmp_path, "training"), pytest.raises(ConfigurationError, match="another process is training"):
        train(tmp_path)


def test_a_folder_with_another_run_is_refused(tmp_path):
    train(tmp_path, steps=10)
    with pytest.raises(ConfigurationError, match="other options.*lr: 0.001 before, 0.01 now"):
        train(tmp_path, steps=10, lr=0.01)
    with pytest.raises(ConfigurationError, match="already holds a run"):
        Trainer(task(), config(steps=10), tmp_path, shown=False).run(resume=False)
    assert train(tmp_path, steps=10, log_every=3).done  # how often it logs is free


def test_weight_decay_leaves_biases_and_norms_alone(tmp_path):
    trainer = Trainer(task(), config(optimizer="adamw", weight_decay=0.1), tmp_path, shown=False)
    decayed, others = trainer.optimizer.param_groups
    assert decayed["weight_decay"] == 0.1
    assert others["weight_decay"] == 0.0
    assert all(p.dim() > 1 for p in decayed["params"])
    assert all(p.dim() <= 1 for p in others["params"])


@pytest.mark.parametrize(
    "options",
    [
        {"amp": "bf16"},
        {"clip": 0.1},
        {"schedule": "cosine", "warmup": 3},
        {"gradient": "exact"},
        {"optimizer": "sgd", "lr": 1e-4, "weight_decay": 5e-3},
    ],
)
def test_options_train(tmp_path, options):
    assert train(tmp_path, steps=6, **options).done


def test_a_device_that_is_not_there_is_an_error(tmp_path):
    if not torch.cuda.is_available():
        with pytest.raises(ValueError, match="no CUDA device"):
            train(tmp_path, device="cuda")


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """A run of one process, with the full gradient and slots that are not random."""
    folder = tmp_path_factory.mktemp("alone")
    options = {"steps": 8, "batch": 4, "gradient": "exact", "chunk_size": 16, "checkpoint_every": 4, "log_every": 8}
    options |= {"model_options": {"slots": "learned"}, "task_options": {"points": 32, "test_points": 16, "test_sets": 4}}
    train(folder, parallel="set", **options)
    return folder


def train_by_two(alone, folder, parallel):
    """The same run by two processes under torchrun. Gives the last results of both, and their losses."""
    command = ["setstream.cli", "train", "--config", alone / "config.json", "--out", folder, "--parallel", parallel]
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", *map(str, command)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(launch, capture_output=True, text=True, timeout=200, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    results = [json.loads((run / "result.json").read_text()) for run in (alone, folder)]
    return results, [[line["loss"] for line in read_metrics(run, "train")] for run in (alone, folder)]


@pytest.mark.xdist_group("two processes")
@pytest.mark.parametrize("parallel", ["data", "set"])
def test_two_processes_train_as_one(alone, tmp_path, parallel):
    """To float accuracy. Not the weights: some have a gradient of exactly zero (a bias on all logits), whose rounding error
    Adam blows up."""
    results, losses = train_by_two(alone, tmp_path / "two", parallel)
    assert results[1]["steps_timed"] == 8
    assert results[0]["metrics"]["nll"] == pytest.approx(results[1]["metrics"]["nll"], rel=1e-4)
    if parallel == "set":  # otherwise the first process reports the loss of its own sets
        assert losses[0] == pytest.approx(losses[1], rel=1e-4)


@pytest.mark.xdist_group("two processes")
def test_a_run_goes_on_with_another_number_of_processes(alone, tmp_path):
    """One process to step 4, two to step 8, every set over both: what one process alone reaches."""
    shutil.copytree(alone, tmp_path / "two")
    (tmp_path / "two" / "result.json").unlink()
    shutil.rmtree(tmp_path / "two" / "checkpoints" / "step-00000008")
    results, _ = train_by_two(alone, tmp_path / "two", "set")
    assert results[1]["steps_timed"] == 4
    assert results[0]["metrics"]["nll"] == pytest.approx(results[1]["metrics"]["nll"], rel=1e-4)


# -- a damaged checkpoint --------------------------------------------------------------------------------------------------


def cut(name):
    return lambda place: (place / name).write_bytes((place / name).read_bytes()[:-20])


def flip(name):
    def damage(place):
        data = bytearray((place / name).read_bytes())
        data[len(data) // 2] ^= 1
        (place / name).write_bytes(data)

    return damage


DAMAGES = {
    "weights cut short": cut("weights.safetensors"),
    "optimizer cut short": cut("optimizer.pt"),
    "optimizer empty": lambda place: (place / "optimizer.pt").write_bytes(b""),
    "progress empty": lambda place: (place / "progress.json").write_text(""),
    "progress is something else": lambda place: (place / "progress.json").write_text("[1]"),
    "a file is missing": lambda place: (place / "optimizer.pt").unlink(),
    "all files are missing": lambda place: [file.unlink() for file in place.iterdir()],
    "a bit of the weights": flip("weights.safetensors"),
    "a bit of the optimizer": flip("optimizer.pt"),
    "checksums cut short": cut("checksums.json"),
}


@pytest.fixture(scope="module")
def stopped(tmp_path_factory):
    """A run that was stopped after its checkpoints of steps 7 and 14, and one that was not."""
    folder = tmp_path_factory.mktemp("stopped")
    options = {"steps": 20, "model": "deepsets", "schedule": "constant"}
    train(folder / "whole", **options)
    train(folder / "run", **options)
    shutil.rmtree(folder / "run" / "checkpoints" / "step-00000020")
    for name in ("model.safetensors", "result.json"):
        (folder / "run" / name).unlink()
    train(folder / "earlier", **options | {"steps": 7})  # where the checkpoint of step 7 comes from
    shutil.copytree(folder / "earlier" / "checkpoints" / "step-00000007", folder / "run" / "checkpoints" / "step-00000007")
    return folder


@pytest.mark.parametrize("version", ["now", "0.1"])
@pytest.mark.parametrize("name", DAMAGES)
def test_a_run_goes_on_from_the_newest_whole_checkpoint(stopped, tmp_path, name, version):
    shutil.copytree(stopped / "run", tmp_path / "run")
    checkpoints = tmp_path / "run" / "checkpoints"
    if version == "0.1":
        if "checksums" in name or "bit" in name:
            pytest.skip("0.1 wrote no checksums")
        for place in checkpoints.iterdir():
            (place / "checksums.json").unlink()
    DAMAGES[name](checkpoints / "step-00000014")
    assert weights_of(tmp_path / "run").parent.name == "step-00000007"
    with pytest.warns(UserWarning, match="the checkpoint of step 14 is damaged and kept as .*damaged-00000014"):
        train(tmp_path / "run", steps=20, model="deepsets", schedule="constant")
    assert_same_weights(weights(tmp_path / "run"), weights(stopped / "whole"))
    assert Checkpoints(checkpoints).steps() == [14, 20]
    assert Checkpoints(checkpoints).damaged() == {}


def test_checkpoints_that_are_all_damaged_are_an_error_that_says_so(stopped, tmp_path):
    shutil.copytree(stopped / "run", tmp_path / "run")
    for place in (tmp_path / "run" / "checkpoints").iterdir():
        cut("optimizer.pt")(place)
    for _ in range(2):  # nothing is thrown away
        with pytest.raises(
            ConfigurationError, match="no checkpoint in .* is intact .*move it away to train from the beginning"
        ):
            train(tmp_path / "run", steps=20, model="deepsets", schedule="constant")
    with pytest.raises(ConfigurationError, match=r"is intact \(the checksum of optimizer.pt does not match"):
        weights_of(tmp_path / "run")


def test_damaged_files_of_a_finished_run_are_our_errors(stopped, tmp_path):
    for name in ("result.json", "config.json", "model.safetensors"):
        shutil.copytree(stopped / "whole", tmp_path / name)
        cut(name)(tmp_path / name)
        with pytest.raises(ConfigurationError, match=name):
            train(tmp_path / name, steps=20, model="deepsets", schedule="constant")


# -- other systems ---------------------------------------------------------------------------------------------------------


def test_training_and_estimators_without_fcntl(tmp_path):
    """As on Windows: the lock is msvcrt's there."""
    code = """
import subprocess, sys, types
import torch
sys.modules["fcntl"] = None
locks = sys.modules["msvcrt"] = types.ModuleType("msvcrt")
locks.LK_NBLCK, locks.held = 2, []
def locking(number, mode, size):
    if locks.held:
        raise OSError("held")
    locks.held.append(mode)
locks.locking = locking
from setstream.integrations.sklearn import SetClassifier
from setstream.errors import ConfigurationError
from tests.training.test_trainer import train
train(sys.argv[1] + "/a", steps=2, model="deepsets")
assert locks.held == [2]
try:
    train(sys.argv[1] + "/b", steps=2, model="deepsets")
except ConfigurationError as error:
    print(error)
"""
    command = [sys.executable, "-W", "ignore", "-c", code, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert "another process is training in this folder" in done.stdout, done.stderr


def test_a_task_has_the_seed_of_its_run_and_the_caller_keeps_its_own(tmp_path):
    given = Clustering(points=8, test_sets=1)
    trained = Trainer(given, TrainConfig("clustering", "deepsets", seed=3), tmp_path, shown=False).task
    assert (given.seed, trained.seed, trained.points) == (0, 3, 8)
    assert given.with_seed(0) is given
