import pytest
import torch
from torch import nn

import setstream as ss


@pytest.fixture
def model():
    phi = nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.5))
    return ss.SetModel(ss.SetEncoder(phi, ss.UMBC(8, 4, slots="gaussian")), ss.nn.SetTransformer(8, out_dim=2, dropout=0.5))


def test_a_stream_predicts_what_the_model_predicts_and_leaves_its_mode_alone(model):
    x = torch.randn(2, 30, 3)
    model.encoder.phi[1].eval()  # one submodule in another mode than the rest
    modes = [module.training for module in model.modules()]
    stream = model.stream()
    for chunk in x.split(4, dim=1):
        stream.update(chunk)
    prediction = stream.predict()
    assert not prediction.requires_grad
    assert [module.training for module in model.modules()] == modes
    torch.testing.assert_close(prediction, model.eval()(x), rtol=1e-4, atol=1e-5)


def test_an_error_leaves_stream_and_modes_as_they_were(model):
    stream = model.stream()
    stream.update(torch.randn(1, 3, 3))
    with pytest.raises(ss.errors.NonFiniteError):
        stream.update(torch.full((1, 1, 3), float("nan")))
    assert model.training
    assert stream.state.count.tolist() == [3]


def test_a_new_stream_predicts_for_an_empty_set(model):
    torch.testing.assert_close(model.stream().predict(), model.eval()(torch.zeros(1, 0, 3)))


def test_merge_remove_forget_and_resume(model, tmp_path):
    x = torch.randn(2, 30, 3)
    a, b = model.stream(), model.stream()
    a.update(x[:, :10])
    b.merge(a)
    b.update(x[:, 10:])
    torch.testing.assert_close(b.predict(), model.eval()(x), rtol=1e-4, atol=1e-5)
    b.remove(x[:, :10])
    torch.testing.assert_close(b.predict(), model(x[:, 10:]), rtol=1e-3, atol=1e-4)
    a.decay(0.5)
    a.merge(b.state)
    assert a.state.count.tolist() == [30, 30]
    a.state.save(tmp_path / "stream")
    c = model.stream()
    c.state = ss.State.load(tmp_path / "stream")
    torch.testing.assert_close(c.predict(), a.predict())
    assert repr(c) == "SetStream(count=[30, 30])"


def test_a_stream_is_not_merged_into_itself():
    model = ss.SetModel(ss.SetEncoder(nn.Linear(2, 8), ss.UMBC(8, num_slots=2)), nn.Linear(8, 1))
    stream = model.stream()
    stream.update(torch.randn(1, 10, 2))
    with pytest.raises(ss.errors.MismatchError, match="into itself"):
        stream.merge(stream)
    assert stream.state.count.tolist() == [10]


def test_forget_is_the_old_name_of_decay(model):
    a, b = model.stream(), model.stream()
    x = torch.randn(1, 5, 3)
    for stream in (a, b):
        stream.update(x)
    a.decay(0.5)
    with pytest.warns(DeprecationWarning, match="SetStream.forget is now decay"):
        b.forget(0.5)
    assert torch.equal(a.state.tensors()["pooled.numerator"], b.state.tensors()["pooled.numerator"])
