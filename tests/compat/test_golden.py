"""What earlier versions wrote is read by this one, and gives the same numbers: states, stores, models, runs."""

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import setstream as ss
from setstream.errors import MismatchError
from setstream.tasks.clustering import Clustering
from setstream.tasks.loading import open_model
from setstream.training import Trainer
from setstream.training.task import read_run
from tests.compat import encoders
from tests.compat.write import SAVED, bag

HERE = Path(__file__).parent
VERSIONS = sorted(path.name for path in HERE.iterdir() if (path / "answers.safetensors").is_file())


@pytest.fixture(params=VERSIONS)
def golden(request):
    return HERE / request.param


def answers(golden):
    return load_file(golden / "answers.safetensors")


def loaded(module, path):
    module.load_state_dict(load_file(path))
    return module.eval()


@pytest.mark.parametrize("name", encoders.POOLS)
def test_states(golden, name):
    encoder = loaded(encoders.build(name), golden / "states" / f"{name}.weights.safetensors")
    state = ss.State.load(golden / "states" / f"{name}.safetensors")
    assert state.count.tolist() == [40]
    with torch.no_grad():
        z = encoder.finalize(state, chunks="average")
        found = {f"states/{name}/{k}": v for k, v in z.items()} if isinstance(z, dict) else {f"states/{name}": z}
        for key, value in found.items():
            torch.testing.assert_close(value, answers(golden)[key])
        # It goes on: the old state and new elements are one set.
        more = encoder.update(state, encoders.elements(3), chunks="average")
        fresh = sum(encoder.update(None, encoders.elements(seed)) for seed in (1, 2, 3))
        expected = encoder.finalize(fresh, chunks="average")
        torch.testing.assert_close(encoder.finalize(more, chunks="average"), expected)
        again = ss.State.from_bytes(more.to_bytes())
        torch.testing.assert_close(encoder.finalize(again, chunks="average"), expected)


def test_an_old_state_whose_chunks_are_no_numbers_is_another_state(golden):
    encoder = loaded(encoders.build("chunk-mean"), golden / "states" / "chunk-mean.weights.safetensors")
    state = ss.State.load(golden / "states" / "chunk-mean.safetensors")
    tensors = state.accumulators["pooled"].tensors
    tensors["chunks"] = tensors["chunks"].bool()
    with pytest.raises(MismatchError):
        encoder.finalize(state, chunks="average")


def test_store(golden, tmp_path):
    shutil.copy(golden / "store.sqlite", tmp_path / "store.sqlite")
    model = loaded(encoders.model(), golden / "store.weights.safetensors")
    with ss.StateStore(tmp_path / "store.sqlite", model) as store:
        assert store.ids() == ["a", "b"]
        for id in "ab":
            torch.testing.assert_close(store.predict(id), answers(golden)[f"store/{id}"])
        assert store.update("a", encoders.elements(2)[0]) == 40
        both = torch.cat([encoders.elements(1), encoders.elements(2)], dim=1)
        with torch.no_grad():
            torch.testing.assert_close(store.predict("a"), model(both))
    with ss.StateStore(tmp_path / "store.sqlite", model) as store:  # what this version made of it opens, too
        assert store.count("a") == 40
    with ss.StateStore(tmp_path / "store.sqlite", model, tile=3600) as store:  # and gets tiles
        assert store.update("a", encoders.elements(2)[0], time=0) == store.count("a") > 40
        assert store.remove("a", until=3600) == 40
        with torch.no_grad():
            torch.testing.assert_close(store.predict("a"), model(both))


@pytest.mark.parametrize("name", [*SAVED, "classifier"])
def test_saved_models(golden, name):
    model = open_model(str(golden / "models" / name))
    with torch.no_grad():
        torch.testing.assert_close(model(bag(SAVED.get(name, {}))), answers(golden)[f"models/{name}"])


def test_finished_run(golden):
    with torch.no_grad():
        means = open_model(str(golden / "run"))(torch.ones(1, 9, 2)).means
    torch.testing.assert_close(means, answers(golden)["run"])


def test_interrupted_run_goes_on(golden, tmp_path):
    """A run that was stopped at step 2 of 4 ends with the weights of the one that was not."""
    shutil.copytree(golden / "interrupted", tmp_path / "run")
    config = read_run(tmp_path / "run")
    trainer = Trainer(Clustering(**config.task_options), config, tmp_path / "run", shown=False)
    assert trainer.run().step == 4
    with torch.no_grad():
        torch.testing.assert_close(trainer.model.eval()(torch.ones(1, 9, 2)).means, answers(golden)["run"])


@pytest.mark.parametrize("folder", ["model", "run"])
def test_models_under_their_old_name(folder):
    """Written by 0.1, which called the clustering model `umbc+fourier` `ours`."""
    renamed = HERE / "0.1" / "renamed"
    with pytest.warns(DeprecationWarning, match="'ours' is now called"), torch.no_grad():
        means = open_model(str(renamed / folder))(torch.ones(1, 9, 2)).means
    torch.testing.assert_close(means, load_file(renamed / "answers.safetensors")[folder])
