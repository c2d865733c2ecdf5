"""Training in stages: beginning with earlier weights, frozen parts, the best of the evaluations."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from setstream.errors import ConfigurationError
from setstream.tasks.clustering import Clustering
from setstream.training import TrainConfig, Trainer
from setstream.training.record import read_metrics


def task():
    return Clustering(points=32, test_points=16, test_sets=4)


def trainer(folder, **options):
    standard = {"steps": 12, "batch": 2, "tensorboard": False, "evaluate_every": 4}
    return Trainer(task(), TrainConfig("clustering", "umbc+set-transformer", **(standard | options)), folder, shown=False)


def weights(folder):
    return load_file(Path(folder) / "model.safetensors")


def test_what_is_frozen_stays_and_the_rest_goes_on_from_the_earlier_run(tmp_path):
    trainer(tmp_path / "one").run()
    second = trainer(tmp_path / "two", init_from=str(tmp_path / "one"), freeze=["head", "encoder.pool"])
    second.run()
    before, after = weights(tmp_path / "one"), weights(tmp_path / "two")
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed
    assert all(name.startswith("encoder.phi") for name in changed)
    assert all((after[name] - before[name]).abs().max() < 0.1 for name in changed)  # 12 steps of 1e-3 from there
    assert not second.model.head.training
    assert second.model.encoder.phi.training


def test_a_stage_that_was_stopped_goes_on_without_the_earlier_run(tmp_path):
    trainer(tmp_path / "one").run()
    options = {"init_from": str(tmp_path / "one" / "model.safetensors"), "freeze": ["head"], "checkpoint_every": 3}
    trainer(tmp_path / "whole", **options).run()
    stopped = trainer(tmp_path / "stopped", **options)
    original, calls = stopped._train_step, []

    def step(module):
        calls.append(0)
        if len(calls) == 7:
            stopped._stop.set()
        return original(module)

    stopped._train_step = step
    assert not stopped.run().done
    (tmp_path / "one" / "model.safetensors").unlink()
    assert trainer(tmp_path / "stopped", **options).run().done
    for name, tensor in weights(tmp_path / "whole").items():
        assert torch.equal(tensor, weights(tmp_path / "stopped")[name]), name


def test_the_best_evaluation_is_kept(tmp_path):
    """By a metric that is larger at step 8 than at 4, 12 and the end: the weights of step 8 come out."""

    class Best(Clustering):
        steps = 0

        def evaluate(self, model, *, quick=False):
            if quick:
                self.steps += 1
            return super().evaluate(model, quick=quick) | {"score": {1: 1.0, 2: 3.0, 3: 2.0}.get(self.steps, 0.0)}

    config = TrainConfig(
        "clustering",
        "deepsets",
        steps=12,
        batch=2,
        tensorboard=False,
        evaluate_every=4,
        checkpoint_every=4,
        select="score",
    )
    own = Best(points=32, test_points=16, test_sets=4)
    Trainer(own, config, tmp_path, shown=False).run()
    at_8 = load_file(tmp_path / "checkpoints" / "step-00000008" / "weights.safetensors")
    at_12 = load_file(tmp_path / "checkpoints" / "step-00000012" / "weights.safetensors")
    found = weights(tmp_path)
    assert all(torch.equal(found[name], at_8[name]) for name in found)
    assert any(not torch.equal(found[name], at_12[name]) for name in found)
    assert [line["step"] for line in read_metrics(tmp_path, "test")] == [4, 8, 12]
    progress = json.loads((tmp_path / "checkpoints" / "step-00000012" / "progress.json").read_text())
    assert progress["best"] == 3.0


def test_bad_stages_are_explained(tmp_path):
    with pytest.raises(ConfigurationError, match="no parameter's name begins with 'haed'.*encoder.phi"):
        trainer(tmp_path / "a", freeze=["haed"])
    with pytest.raises(ConfigurationError, match="leaves nothing to train"):
        trainer(tmp_path / "a", freeze=["head", "encoder"])
    with pytest.raises(ConfigurationError, match="neither a finished model nor a checkpoint"):
        trainer(tmp_path / "b", init_from=str(tmp_path / "nothing")).run()
    save_file({"head.weight": torch.zeros(3)}, tmp_path / "other.safetensors")
    with pytest.raises(ConfigurationError, match="are of another model.*head.weight"):
        trainer(tmp_path / "c", init_from=str(tmp_path / "other.safetensors")).run()
    model = trainer(tmp_path / "d").model
    part = {name: tensor.clone() for name, tensor in model.state_dict().items() if name.startswith("encoder.phi")}
    save_file(part, tmp_path / "part.safetensors")
    with pytest.raises(ConfigurationError, match="should be frozen.*stay random"):
        trainer(tmp_path / "e", init_from=str(tmp_path / "part.safetensors"), freeze=["head"]).run()
    with pytest.raises(ConfigurationError, match="the evaluation has no 'accuracy'; it has nll"):
        trainer(tmp_path / "f", select="accuracy").run()
