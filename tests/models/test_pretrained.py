"""Models in folders: built again from config.json, never by code that a file chose."""

import ast
import json
import subprocess
import sys
from functools import partial
from importlib import import_module
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import setstream as ss
from setstream.errors import ConfigurationError
from setstream.integrations.sklearn import SetClassifier
from setstream.models.weights import on_meta
from setstream.tasks.clustering import Clustering
from setstream.tasks.loading import open_model
from setstream.tasks.mil.task import Bags, Mil
from setstream.training.task import SavedRun, read_run
from tests.models.builders import build, build_encoder, build_with_values

HERE = "tests.models.builders"
#: The modules whose MODELS a file may name (those of documents read a language model), and options that they need.
SHIPPED = {
    "sklearn": ("integrations.sklearn.network", {"in_dim": 3, "outputs": 2}),
    "clustering": ("tasks.clustering.models", {}),
    "completion": ("tasks.completion.models", {}),
    "mil": ("tasks.mil.models", {"in_dim": 3}),
}


def test_a_models_own_builder_is_named_twice(tmp_path):
    model = build(slots=3).eval()
    x = torch.randn(2, 10, 2)
    state = torch.random.get_rng_state()
    model.save_pretrained(tmp_path / "own", builder=build, options={"slots": 3}, about={"steps": 7})
    assert torch.equal(torch.random.get_rng_state(), state)
    assert sorted(path.name for path in (tmp_path / "own").iterdir()) == ["config.json", "model.safetensors"]
    config = json.loads((tmp_path / "own" / "config.json").read_text())
    assert (config["builder"], config["options"], config["about"]) == (f"{HERE}:build", {"slots": 3}, {"steps": 7})
    with pytest.raises(ConfigurationError, match="not part of setstream: if you trust it, name it yourself"):
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
    with pytest.raises(ConfigurationError, match="builds a SetEncoder; expected a SetModel"):
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
    pytest.importorskip("huggingface_hub")
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
    with pytest.raises(ConfigurationError, match="the builder of this model is not known"):
        model.save_pretrained(tmp_path / "a")
    with pytest.raises(ConfigurationError, match="cannot be found again by another process"):
        model.save_pretrained(tmp_path / "a", builder=lambda: model)
    with pytest.raises(ConfigurationError, match="which JSON can hold"):
        model.save_pretrained(tmp_path / "a", builder=build, options={"width": torch.tensor(8)})
    with pytest.raises(ConfigurationError, match="cannot be built with these options"):
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
    for builder in ("os:system", "setstream._utils.atomic:os", "setstream.models.pretrained:find", "evil:MODELS[x]"):
        config.write_text(json.dumps({"builder": builder, "options": {}}))
        with pytest.raises(ConfigurationError, match="not part of setstream"):
            ss.SetModel.from_pretrained(tmp_path / "b")
    config.write_text(json.dumps({"task": "clustering", "model": "deepsets"}))
    with pytest.raises(ConfigurationError, match="open_model"):
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


# -- a file may name what is ours, and nothing else -------------------------------------------------------------------------

MIL = "setstream.tasks.mil.models:MODELS[deepsets]"


def hostile(mark):
    """Options that would run a command if a file could choose the backbone."""
    return {"backbone": "subprocess:getoutput", "backbone_options": {"cmd": f"touch {mark}"}}


def saved_folder(folder, builder, options):
    Mil(bags=Bags([torch.randn(5, 3) for _ in range(20)], torch.arange(20) % 2)).build("deepsets").save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps({"builder": builder, "options": options}))


def run_folder(folder, **options):
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"task": "mil", "model": "deepsets"} | options))
    (folder / "result.json").write_text(json.dumps({"metrics": {}, "step": 1, "seconds": 1.0}))
    save_file({"weight": torch.zeros(1)}, folder / "model.safetensors")
    return folder


def test_a_saved_models_options_run_nothing(tmp_path):
    saved_folder(tmp_path / "bags", MIL, hostile(tmp_path / "mark"))
    for opened in (ss.SetModel.from_pretrained, lambda place: open_model(str(place))):
        with pytest.raises(ConfigurationError, match="names the backbone 'subprocess:getoutput', which is not part"):
            opened(tmp_path / "bags")
    with pytest.raises(ConfigurationError, match="names the backbone"):  # who builds it is one question, what it takes another
        ss.SetModel.from_pretrained(tmp_path / "bags", builder=MIL)
    assert not (tmp_path / "mark").exists()


@pytest.mark.parametrize(
    "builder",
    [
        "setstream.cli.__main__:MODELS[x]",
        "setstream.report:import_module",
        "setstream._utils.import_path:OURS",
        "tests.evil:MODELS[x]",
    ],
)
def test_a_saved_models_builder_is_an_entry_of_a_known_registry(tmp_path, builder):
    saved_folder(tmp_path / "bags", builder, {})
    with pytest.raises(ConfigurationError, match="not part of setstream"):
        ss.SetModel.from_pretrained(tmp_path / "bags")


@pytest.mark.parametrize(
    "options",
    [
        {"task": "subprocess:getoutput", "task_options": {"cmd": "touch mark"}},
        {"task": "tests.models.builders:Marks"},
        {"task_options": {"data": "musk1"}, "model_options": hostile("mark")},
        {"task": "other-classes", "model": "linear"},
    ],
)
def test_a_run_folders_options_run_nothing(tmp_path, monkeypatch, options):
    monkeypatch.chdir(tmp_path)
    bags = Bags([torch.randn(5, 3) for _ in range(20)], torch.arange(20) % 2)
    monkeypatch.setattr("setstream.tasks.mil.task.classic", lambda name: bags)
    folder = run_folder(tmp_path / "run", **options)
    with pytest.raises(ConfigurationError, match="not part of setstream"):
        open_model(str(folder))
    assert not (tmp_path / "mark").exists()


@pytest.mark.parametrize(
    "command",
    [
        ["evaluate", "run"],
        ["encode", "run", "run", "--out", "z.parquet"],
        ["serve", "run"],
        ["slides", "heatmap", "run", "slide.svs", "--features", "run", "--out", "m"],
    ],
)
def test_no_command_runs_what_a_run_folder_names(tmp_path, monkeypatch, command):
    from setstream.cli.commands import app

    if command[0] == "serve":
        pytest.importorskip("fastapi")
    monkeypatch.chdir(tmp_path)
    run_folder(tmp_path / "run", task="tests.models.builders:Marks")
    monkeypatch.setattr("setstream.data.H5Source", lambda path: None)
    monkeypatch.setattr("setstream.data.slides.read_grid", lambda path: None)
    with pytest.raises(ConfigurationError, match=r"--trust tests.models.builders:Marks"):
        app(list(command), standalone_mode=False)
    with pytest.raises(RuntimeError, match="built"):  # named again, it is built
        app([*command, "--trust", "tests.models.builders:Marks"], standalone_mode=False)


def test_what_the_caller_names_again_is_used(tmp_path, monkeypatch):
    """A backbone of one's own: in Python as it is; from a file, when it is named again."""
    bags = Bags([torch.rand(4, 3, 5, 5) for _ in range(20)], torch.arange(20) % 2)
    options = {"backbone": f"{HERE}:flat", "backbone_options": {"side": 5}}
    model = Mil(bags=bags).build("deepsets", **options).eval()
    x = bags.bags[0].unsqueeze(0)
    model.save_pretrained(tmp_path / "saved")
    with pytest.raises(ConfigurationError, match="names the backbone"):
        ss.SetModel.from_pretrained(tmp_path / "saved")
    again = ss.SetModel.from_pretrained(tmp_path / "saved", trust=[f"{HERE}:flat"])
    assert torch.equal(again(x), model(x))
    again.save_pretrained(tmp_path / "second")  # a model from a file knows how it was built
    assert torch.equal(open_model(str(tmp_path / "second"), trust=[f"{HERE}:flat"])(x), model(x))
    monkeypatch.setattr("setstream.tasks.mil.task.classic", lambda name: bags)
    folder = run_folder(tmp_path / "run", model_options=options)
    (folder / "model.safetensors").write_bytes((tmp_path / "saved" / "model.safetensors").read_bytes())
    assert torch.equal(open_model(str(folder), trust=[f"{HERE}:flat"])(x), model(x))
    assert torch.equal(SavedRun(folder, read_run(folder), [f"{HERE}:flat"]).model()(x), model(x))
    with pytest.raises(ConfigurationError, match="trust takes import paths, package.module:name"):
        open_model(str(folder), trust=["flat"])
    with pytest.raises(ConfigurationError, match="names the backbone"):  # what is trusted is that, and nothing near it
        open_model(str(folder), trust=[f"{HERE}:other"])


def test_a_saved_model_needs_no_other_file_of_weights(tmp_path):
    """Its folder has all weights: what the backbone began with is neither needed nor read."""
    bags = Bags([torch.rand(4, 3, 8, 8) for _ in range(20)], torch.arange(20) % 2)
    start = Mil(bags=bags).build("deepsets", backbone="small", backbone_options={"width": 8}).eval()
    start.save_pretrained(tmp_path / "first")
    weights = tmp_path / "first" / "model.safetensors"
    options = {"backbone": "small", "backbone_options": {"width": 8}, "weights": str(weights)}
    model = Mil(bags=bags).build("deepsets", **options).eval()
    model.save_pretrained(tmp_path / "second")
    weights.unlink()
    x = bags.bags[0].unsqueeze(0)
    assert torch.equal(ss.SetModel.from_pretrained(tmp_path / "second")(x), model(x))


DAMAGED = ["[1]", "{}", '{"builder": 5}', '{"builder": null, "options": {}}', "[" * 100_000, "\udc80"]
DAMAGED += [json.dumps({"builder": MIL} | own) for own in ({"options": [1]}, {"format": "x"}, {"about": 3})]
DAMAGED += [
    json.dumps({"builder": MIL, "options": own})
    for own in ({"in_dim": -5}, {"in_dim": 10**30}, {"in_dim": {}}, {"dropout": 7}, {"widths": "x"})
]


@pytest.mark.parametrize("config", DAMAGED)
def test_a_damaged_config_is_our_error(tmp_path, config):
    saved_folder(tmp_path, MIL, {})
    (tmp_path / "config.json").write_bytes(config.encode(errors="surrogateescape"))
    with pytest.raises(ConfigurationError):
        ss.SetModel.from_pretrained(tmp_path)
    with pytest.raises(ConfigurationError):
        open_model(str(tmp_path))


# -- a file may not ask for more memory than its weights take -------------------------------------------------------------

HUGE = [
    ("setstream.tasks.clustering.models:MODELS[umbc+set-transformer]", {"dim": 10**7}),
    ("setstream.tasks.clustering.models:MODELS[umbc+fspool]", {"num_slots": 10**7}),
    ("setstream.tasks.completion.models:MODELS[deepsets]", {"width": 10**7}),
    ("setstream.tasks.mil.models:MODELS[deepsets]", {"in_dim": 3, "widths": [10**7, 10**7]}),
    ("setstream.tasks.mil.models:MODELS[deepsets]", {"in_dim": 3, "widths": [4096] * 10_000}),
    ("setstream.tasks.mil.models:MODELS[deepsets]", {"backbone": "resnet18", "backbone_options": {"width": 4096}}),
    ("setstream.integrations.sklearn.network:MODELS[classifier]", {"in_dim": 3, "classes": [0, 1], "num_slots": 10**9}),
]


@pytest.mark.parametrize(("builder", "options"), HUGE)
def test_sizes_are_compared_with_the_weights_before_memory_is_taken(tmp_path, builder, options):
    saved_folder(tmp_path, builder, options)
    with pytest.raises(ConfigurationError, match=r"the weights in .*model.safetensors are not those of this model: "):
        ss.SetModel.from_pretrained(tmp_path)


def test_a_huge_model_beside_small_weights_stays_below_a_gigabyte(tmp_path):
    for number, (builder, options) in enumerate(HUGE):
        saved_folder(tmp_path / str(number), builder, options)
    run = run_folder(tmp_path / "run", task="clustering", model="deepsets", model_options={"dim": 10**7})
    code = f"""
import pathlib, re
from setstream.errors import ConfigurationError
from setstream.tasks.loading import open_model
for folder in [*(pathlib.Path({str(tmp_path)!r}) / str(n) for n in range({len(HUGE)})), {str(run)!r}]:
    try:
        open_model(str(folder))
    except ConfigurationError as error:
        assert "are not those of this model" in str(error), error
    else:
        raise SystemExit(f"{{folder}} was opened")
# Kilobytes at most; ru_maxrss would count the process that this one was forked from.
print(re.search(r"VmHWM:\\s+(\\d+)", pathlib.Path("/proc/self/status").read_text())[1])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 10**6


@pytest.mark.parametrize("name", sorted(SHIPPED))
def test_every_model_that_a_file_may_name_can_be_built_without_memory(name):
    """Otherwise its sizes cannot be compared with its weights."""
    module, options = SHIPPED[name]
    for model, builder in import_module(f"setstream.{module}").MODELS.items():
        given = {"in_dim": 3, "classes": [0, 1]} if model == "classifier" else options
        tensors = on_meta(partial(builder, **given)).state_dict().values()
        assert {tensor.device.type for tensor in tensors} == {"meta"}, model


def test_a_builder_of_ones_own_need_not_run_without_memory(tmp_path):
    model = build_with_values().eval()
    model.save_pretrained(tmp_path, builder=build_with_values)
    again = ss.SetModel.from_pretrained(tmp_path, builder=build_with_values)
    x = torch.randn(1, 5, 2)
    assert torch.equal(again(x), model(x))


def test_the_list_of_what_a_file_may_name_is_ours():
    from setstream._utils.import_path import OURS, TASKS

    assert {place for place in OURS if not place.endswith("[]")} == set(TASKS.values())
    package = Path(ss.__file__).parent
    for place in OURS:
        module = package.parent / place.partition(":")[0].replace(".", "/")
        assert module.is_dir() or module.with_suffix(".py").is_file()
    # One module imports what options name; the others import what their own text or table says.
    callers = {
        str(path.relative_to(package))
        for path in package.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call)
        and getattr(node.func, "id", getattr(node.func, "attr", "")) in ("import_module", "__import__")
    }
    utils = {f"_utils/{name}.py" for name in ("import_path", "moved", "optional")}
    assert callers <= utils | {"__init__.py", "integrations/__init__.py"}, callers
