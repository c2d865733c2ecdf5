"""Three graphs in onnxruntime: any batch, any chunk, the numbers of PyTorch."""

import numpy as np
import onnxruntime
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import setstream as ss
from setstream.errors import ConfigurationError, ShapeError
from setstream.integrations import onnx
from setstream.integrations.sklearn import SetClassifier
from setstream.tasks.clustering import pretrained


class Head(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.slots = ss.nn.SetTransformer(8, out_dim=3)

    def forward(self, z):
        return self.slots(z["bag"])[:, 0] + z["most"]


def make_model():
    bag = ss.UMBC(8, num_slots=4, heads=2, slots="gaussian", slot_residual=True, activation="slot-sigmoid")
    pool = ss.Parallel(bag=bag, most=ss.Projected(torch.nn.Linear(8, 3), ss.DeepSets("max")))
    return ss.SetModel(ss.SetEncoder(torch.nn.Sequential(torch.nn.Linear(2, 8), torch.nn.ReLU()), pool), Head())


class Runner:
    """A stream without PyTorch: numpy and onnxruntime."""

    def __init__(self, folder):
        self.graphs = {name: onnxruntime.InferenceSession(folder / f"{name}.onnx") for name in ("update", "merge", "predict")}
        self.nothing = dict(np.load(folder / "empty.npz"))

    def empty(self, batch):
        return {name: np.repeat(rows, batch, axis=0) for name, rows in self.nothing.items()}

    def run(self, graph, feed):
        return dict(zip(self.nothing, self.graphs[graph].run(None, feed), strict=True))

    def update(self, state, chunk):
        return self.run("update", state | {"chunk": chunk})

    def merge(self, state, other):
        return self.run("merge", state | {f"other.{name}": rows for name, rows in other.items()})

    def predict(self, state):
        return self.graphs["predict"].run(None, state)[0]


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    torch.manual_seed(0)
    model = make_model().train()
    folder = onnx.export(model, tmp_path_factory.mktemp("onnx"), torch.zeros(1, 2))
    assert model.training
    assert model.head.training
    return model.eval(), Runner(folder)


@settings(max_examples=25)
@given(
    batch=st.integers(1, 6),
    here=st.lists(st.integers(1, 300), max_size=4),
    there=st.lists(st.integers(1, 40), max_size=3),
    scale=st.sampled_from([0.01, 1.0, 100.0]),
    seed=st.integers(0, 100),
)
def test_a_stream_without_pytorch_predicts_what_pytorch_does(exported, batch, here, there, scale, seed):
    model, runner = exported
    x = torch.randn(batch, sum(here) + sum(there), 2, generator=torch.Generator().manual_seed(seed)) * scale
    chunks = x.split([*here, *there], dim=1) if x.shape[1] else ()
    states = []
    for part in (chunks[: len(here)], chunks[len(here) :]):
        state = runner.empty(batch)
        for chunk in part:
            state = runner.update(state, chunk.numpy())
        states.append(state)
    merged = runner.merge(*states)
    assert merged["count"].tolist() == [x.shape[1]] * batch
    with torch.no_grad():
        wanted = model.double()(x.double())
        plain = model.float()(x)
    found = torch.from_numpy(runner.predict(merged))
    # Against float64, an error of at most twice PyTorch's own in one shot, and a few roundings of the output.
    allowed = 2 * (plain - wanted).abs().max() + 8 * torch.finfo(torch.float32).eps * wanted.abs().max()
    assert (found - wanted).abs().max() <= allowed


def test_states_go_back_and_forth(exported):
    model, runner = exported
    x = torch.randn(2, 30, 2)
    state = runner.update(runner.empty(2), x.numpy())
    ours = ss.pure.to_state(model.encoder, {name: torch.from_numpy(rows) for name, rows in state.items()})
    with torch.no_grad():
        torch.testing.assert_close(model.finalize(ours), model(x), atol=1e-5, rtol=1e-4)


@pytest.mark.slow
def test_mixtures_and_fitted_classifiers_have_named_outputs(tmp_path):
    mixture = pretrained("umbc+set-transformer")
    sets, y = [np.full((3, 2), label, dtype="float32") for label in (0, 4) * 5], ["no", "yes"] * 5
    fitted = SetClassifier(widths=(8,), num_slots=2, epochs=1, min_steps=5, members=1, random_state=0).fit(sets, y)
    x = torch.randn(2, 30, 2)
    for model, outputs in ((mixture, ["output.weights", "output.means", "output.scales"]), (fitted.model_, ["output"])):
        runner = Runner(onnx.export(model, tmp_path / str(len(outputs)), torch.zeros(1, 2)))
        assert [own.name for own in runner.graphs["predict"].get_outputs()] == outputs
        state = runner.update(runner.update(runner.empty(2), x[:, :7].numpy()), x[:, 7:].numpy())
        with torch.no_grad():
            wanted = model(x)
        tensors = wanted.named().values() if len(outputs) > 1 else [wanted]
        for found, own in zip(runner.graphs["predict"].run(None, state), tensors, strict=True):
            np.testing.assert_allclose(found, own.numpy(), atol=1e-5, rtol=1e-4)


def test_what_cannot_be_a_graph_is_said(tmp_path):
    wordy = ss.SetModel(make_model().encoder, type("Words", (torch.nn.Module,), {"forward": lambda self, z: "seven"})())
    with pytest.raises(ConfigurationError, match="the head returns a str; a graph returns tensors"):
        onnx.export(wordy, tmp_path, torch.zeros(1, 2))
    with pytest.raises(ShapeError, match=r"got \(2,\)"):
        onnx.export(make_model(), tmp_path, torch.zeros(2))
    twice = ss.SetModel(ss.SetEncoder(torch.nn.Identity(), ss.SlotAttention(4, num_slots=2, passes=2)), torch.nn.Flatten())
    with pytest.raises(ConfigurationError, match="reads its sets 2 times"):
        onnx.export(twice, tmp_path, torch.zeros(1, 4))
