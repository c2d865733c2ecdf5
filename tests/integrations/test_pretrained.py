"""Models in folders: built again from config.json, never by code that a file chose."""

import json
import subprocess
import sys

import pytest
import torch

import setstream as ss
from setstream.errors import ConfigurationError
from setstream.integrations.sklearn import SetClassifier
from setstream.tasks.clustering import Clustering
from setstream.tasks.loading import open_model
from setstream.tasks.mil.bags import Bags
from setstream.tasks.mil.task import Mil
from tests.integrations.builders import build, build_encoder

HERE = "tests.integrations.builders"


def test_a_models_own_builder_is_named_twice(tmp_path):
    model = build(slots=3).eval()
    x = torch.randn(2, 10, 2)
    state = torch.random.get_rng_state()
    model.save_pretrained(tmp_path / "own", builder=build, options={"slots": 3}, about={"steps": 7})
    assert torch.equal(torch.random.get_rng_state(), state)
    assert sorted(path.name for path in (tmp_path / "own").iterdir()) == ["config.json", "model.safetensors"]
    config = json.loads((tmp_path / "own" / "config.json").read_text())
    assert (config["builder"], config["options"], config["about"]) == (f"{HERE}:build", {"slots": 3}, {"steps": 7})
    with pytest.raises(ConfigurationError, match="no part of setstream: if you trust it, name it yourself"):
        ss.SetModel.from_pretrained(tmp_path / "own")
    for builder in (build, f"{HERE}:build"):
        again = ss.SetModel.from_pretrained(tmp_path / "own", builder=builder)
        assert not again.training
        assert torch.equal(again(x), model(x))
        assert again.encoder.empty(1).fingerprint == model.encoder.empty(1).fingerprint
    again.save_pretrained(tmp_path / "second")  # it knows by now
    assert torch.equal(ss.SetModel.from_pretrained(tmp_path / "second", builder=build)(x), model(x))


def test_the_command_line_opens_a_saved_folder(tmp_path):
    model = Clustering().build("deepsets").eval()
    again = open_model(str(model.save_pretrained(tmp_path / "own")))
    x = torch.randn(1, 9, 2)
    assert torch.equal(again(x).means, model(x).means)


def test_encoders_too(tmp_path):
    encoder = build_encoder().eval()
    encoder.save_pretrained(tmp_path, builder=build_encoder)
    again = ss.SetEncoder.from_pretrained(tmp_path, builder=build_encoder)
    assert (again.empty(1) + encoder.empty(1)).count.tolist() == [0]  # the same encoder, to its states
    with pytest.raises(ConfigurationError, match="builds a SetEncoder; a SetModel was asked for"):
        ss.SetModel.from_pretrained(tmp_path, builder=build_encoder)


def test_models_by_name_know_how_they_were_built(tmp_path):
    clustering = Clustering(test_sets=1).build("umbc+set-transformer").eval()
    clustering.save_pretrained(tmp_path / "clustering", dtype=torch.float16)
    again = ss.SetModel.from_pretrained(tmp_path / "clustering")
    x = torch.randn(1, 50, 2)
    torch.testing.assert_close(again(x).means, clustering(x).means, atol=1e-2, rtol=1e-2)
    assert all(p.dtype == torch.float32 for p in again.parameters())
    bags = Bags([torch.randn(5, 3) for _ in range(20)], torch.arange(20) % 2)
    model = Mil(bags=bags).build("ab-mil", widths=[8]).eval()
    model.save_pretrained(tmp_path / "mil")
    assert json.loads((tmp_path / "mil" / "config.json").read_text())["options"] == {"in_dim": 3, "widths": [8]}
    assert torch.equal(ss.SetModel.from_pretrained(tmp_path / "mil")(bags.bags), model(bags.bags))


def test_fitted_estimators_are_models(tmp_path):
    sets, y = [torch.randn(6, 2).numpy() + label for label in (0, 4) * 5], [0, 1] * 5
    fitted = SetClassifier(widths=(8,), num_slots=2, epochs=1, min_steps=5, random_state=0).fit(sets, y)
    fitted.model_.save_pretrained(tmp_path)
    assert len({file.stat().st_mode for file in tmp_path.iterdir()}) == 1  # who may read one may read the other
    again = ss.SetModel.from_pretrained(tmp_path)
    assert again.options["classes"] == [0, 1]
    x = torch.from_numpy(sets[0]).unsqueeze(0)
    stream = again.stream()
    stream.update(x[:, :2])
    stream.update(x[:, 2:])
    torch.testing.assert_close(stream.predict(), fitted.model_(x), atol=1e-5, rtol=1e-4)


def test_a_model_of_the_hub_comes_from_its_cache(tmp_path):
    """As huggingface_hub lays it out; offline, it reads nothing else."""
    model = Clustering(test_sets=1).build("deepsets").eval()
    commit = "0" * 40
    place = tmp_path / "hub" / "models--someone--clusters"
    model.save_pretrained(place / "snapshots" / commit)
    (place / "refs").mkdir()
    (place / "refs" / "main").write_text(commit)
    code = "import setstream as ss; print(type(ss.SetModel.from_pretrained('someone/clusters').head).__name__)"
    environment = {"HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1", "PYTHONPATH": ":".join(sys.path), "PATH": ""}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert done.stdout.strip() == "MixtureHead", done.stderr


def test_what_cannot_be_described_or_read_is_said(tmp_path, monkeypatch):
    model = build()
    with pytest.raises(ConfigurationError, match="nobody knows how to build this model again"):
        model.save_pretrained(tmp_path / "a")
    with pytest.raises(ConfigurationError, match="cannot be found again by another process"):
        model.save_pretrained(tmp_path / "a", builder=lambda: model)
    with pytest.raises(ConfigurationError, match="which JSON can hold"):
        model.save_pretrained(tmp_path / "a", builder=build, options={"width": torch.tensor(8)})
    with pytest.raises(ConfigurationError, match="does not take these options"):
        model.save_pretrained(tmp_path / "a", builder=build, options={"depth": 8})
    with pytest.raises(ConfigurationError, match="builds another model than this one"):
        model.save_pretrained(tmp_path / "a", builder=build, options={"width": 16})
    with pytest.raises(ConfigurationError, match="options without a builder"):
        model.save_pretrained(tmp_path / "a", options={})
    assert not (tmp_path / "a").exists()
    with pytest.raises(ConfigurationError, match="there is no folder"):
        ss.SetModel.from_pretrained(tmp_path / "a")
    model.save_pretrained(tmp_path / "b", builder=build)
    config = tmp_path / "b" / "config.json"
    for builder in ("os:system", "setstream.durable:os", "setstream.pretrained:find", "evil:MODELS[x]"):
        config.write_text(json.dumps({"builder": builder, "options": {}}))
        with pytest.raises(ConfigurationError, match="no part of setstream"):
            ss.SetModel.from_pretrained(tmp_path / "b")
    config.write_text(json.dumps({"task": "clustering", "model": "deepsets"}))
    with pytest.raises(ConfigurationError, match="trained_model"):
        ss.SetModel.from_pretrained(tmp_path / "b")
    config.write_text(json.dumps({"builder": f"{HERE}:build", "format": 99}))
    with pytest.raises(ConfigurationError, match="newer setstream"):
        ss.SetModel.from_pretrained(tmp_path / "b")
    config.write_text(json.dumps({"builder": f"{HERE}:build", "options": {"width": 16}}))
    with pytest.raises(ConfigurationError, match="not those of this model"):
        ss.SetModel.from_pretrained(tmp_path / "b", builder=build)
    config.write_text("{")
    with pytest.raises(ConfigurationError, match="cannot be read"):
        ss.SetModel.from_pretrained(tmp_path / "b")
    (tmp_path / "b" / "model.safetensors").unlink()
    with pytest.raises(ConfigurationError, match="there is no model.safetensors"):
        ss.SetModel.from_pretrained(tmp_path / "b")
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(ConfigurationError, match=r"pip install 'setstream\[hub\]'"):
        ss.SetModel.from_pretrained("someone/else")
