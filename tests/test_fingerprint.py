"""Equal fingerprints mean equal encoders: all that a module computes with counts, in every process alike."""

import functools
import os
import subprocess
import sys
import types
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import prune

import setstream as ss
from setstream.errors import ConfigurationError, MismatchError
from setstream.nn.backbones import Backbone
from setstream.states.compat import fingerprint_0_1
from setstream.states.fingerprint import Origin


class Phi(nn.Module):
    """A linear layer and whatever a user may keep beside it."""

    def __init__(self, **attributes):
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(2, 4)
        for name, value in attributes.items():
            setattr(self, name, value)

    def forward(self, x):
        return self.layer(x)


def encoder(phi):
    return ss.SetEncoder(phi, ss.DeepSets("sum")).eval()


def fingerprint(**attributes):
    return encoder(Phi(**attributes)).empty(1).fingerprint


@dataclass
class Settings:
    scale: float = 1.0


class Slotted:
    __slots__ = ("scale",)

    def __init__(self, scale):
        self.scale = scale


class Mode(Enum):
    A = 1
    B = 2


def double(x):
    return 2 * x


def triple(x):
    return 3 * x


PAIRS = {
    "a list": ([1.0, 2.0], [1.0, 3.0]),
    "a dict": ({"a": 1}, {"a": 2}),
    "a nested one": ({"a": [1, {"b": (2, 3)}]}, {"a": [1, {"b": (2, 4)}]}),
    "an array": (np.zeros(3), np.ones(3)),
    "an array of another type": (np.zeros(3, np.float32), np.zeros(3)),
    "a tensor": (torch.zeros(3), torch.ones(3)),
    "tensors in a list": ([torch.zeros(3)], [torch.ones(3)]),
    "a function": (double, triple),
    "a function of torch": (F.relu, F.gelu),
    "a builtin": (torch.relu, torch.tanh),
    "a partial": (functools.partial(F.leaky_relu, negative_slope=0.1), functools.partial(F.leaky_relu, negative_slope=0.2)),
    "a set": ({1, 2}, {1, 3}),
    "a dataclass": (Settings(1.0), Settings(2.0)),
    "an object with slots": (Slotted(1.0), Slotted(2.0)),
    "an enum": (Mode.A, Mode.B),
    "a class": (nn.ReLU, nn.GELU),
    "a dtype": (torch.float32, torch.float64),
    "a path": (Path("a"), Path("b")),
    "bytes": (b"a", b"b"),
    "modules in a list": ([nn.Dropout(0.1)], [nn.Dropout(0.2)]),
    "a method": (Settings(1.0).__eq__, Settings(2.0).__eq__),
    "a number of numpy": (np.float32(1.0), np.float32(2.0)),
}


@pytest.mark.parametrize("name", ["value", "_value"])
@pytest.mark.parametrize("pair", PAIRS.values(), ids=PAIRS)
def test_every_attribute_counts(pair, name):
    one, other = ({name: value} for value in pair)
    assert fingerprint(**one) == fingerprint(**one)
    assert fingerprint(**one) != fingerprint(**other)


def test_buffers_that_are_not_saved_count():
    """Our own backbone normalises by such: with another mean it is another encoder."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Flatten(), nn.Linear(3 * 4 * 4, 4))
    one, other = (encoder(Backbone(net, 4, mean=(mean,) * 3)) for mean in (0.0, 0.25))
    x = torch.rand(1, 5, 3, 4, 4)
    with torch.no_grad(), pytest.raises(MismatchError, match="different encoders"):
        one.update(None, x) + other.update(None, x)
    with torch.no_grad(), pytest.raises(MismatchError, match="another encoder"):
        other.finalize(ss.State.from_bytes(one.update(None, x).to_bytes()))


def test_pools_of_ones_own_count_with_their_attributes():
    def pool(weigh):
        torch.manual_seed(0)
        return encoder_with(ss.UMBC(4, num_slots=2, activation=ss.Activation("mine", weigh)))

    def encoder_with(own):
        torch.manual_seed(0)
        return ss.SetEncoder(nn.Linear(2, 4), own).eval()

    assert pool(F.softplus).empty(1).fingerprint != pool(torch.exp).empty(1).fingerprint

    class Scaled(ss.DeepSets):
        def __init__(self, scale):
            super().__init__("sum")
            self.scale = scale

    assert encoder_with(Scaled(1.0)).empty(1).fingerprint != encoder_with(Scaled(2.0)).empty(1).fingerprint
    assert encoder_with(ss.DeepSets("sum")).empty(1).fingerprint == encoder_with(ss.DeepSets("sum", 4)).empty(1).fingerprint


def test_what_cannot_be_hashed_gives_no_fingerprint():
    def local(x):
        return x

    for value in (lambda x: x, local, torch.Generator(), [iter(())], {"a": open}):
        own = encoder(Phi(value=value))
        state = own.update(None, torch.ones(1, 3, 2)) + own.update(None, torch.ones(1, 4, 2))  # in memory, nobody asks
        assert own.finalize(state).shape == (1, 4)
        if value == {"a": open}:
            assert state.fingerprint
            continue
        with pytest.raises(ConfigurationError, match=r"no fingerprint: phi.value.* is .*not_in_fingerprint = \('value"):
            state.to_bytes()
    phi = Phi(value=lambda x: x)
    phi.not_in_fingerprint = ("value",)
    assert encoder(phi).empty(1).fingerprint == fingerprint()


def test_what_does_not_change_the_answer_does_not_count():
    phi = Phi()
    plain = encoder(phi).empty(1).fingerprint
    phi.layer.weight.requires_grad_(False)
    assert encoder(phi).empty(1).fingerprint == plain
    assert ss.SetEncoder(phi, ss.DeepSets("sum"), check_finite=False).train().empty(1).fingerprint == plain
    assert fingerprint(value=(1, 2)) == fingerprint(value=[1, 2])  # options that went through a file
    assert fingerprint(home=torch.device("cpu")) == fingerprint(home=torch.device("cuda"))

    class Counting(Phi):
        not_in_fingerprint = ("calls",)

        def forward(self, x):
            self.calls = getattr(self, "calls", 0) + 1
            return super().forward(x)

    own = encoder(Counting())
    state = own.update(own.update(None, torch.ones(1, 3, 2)), torch.ones(1, 3, 2))
    assert own.phi.calls == 2
    assert state.count.tolist() == [6]


def test_things_that_hold_themselves():
    value = {"a": 1}
    value["self"] = value
    again = {"a": 1}
    again["self"] = again
    assert fingerprint(value=value) == fingerprint(value=again)
    own = encoder(Phi(value=value))
    assert own._current_origin().current(look=True)


@pytest.mark.parametrize("name", ["value", "_value"])
@pytest.mark.parametrize(
    "change",
    [
        lambda phi, name: setattr(phi, name, [9]),
        lambda phi, name: getattr(phi, name)[0].append(3.0),
        lambda phi, name: getattr(phi, name)[1].fill_(5.0),
        lambda phi, name: getattr(phi, name)[2].fill(5.0),
        lambda phi, name: getattr(phi, name)[3].update(a=2),
        lambda phi, name: setattr(getattr(phi, name)[4], "scale", 3.0),
        lambda phi, name: setattr(phi, "new", 1),
    ],
)
def test_a_change_after_a_state_was_made_is_noticed(change, name):
    own = encoder(Phi(**{name: [[1.0], torch.ones(3), np.ones(3), {"a": 1}, Settings()]}))
    state = own.update(None, torch.ones(1, 3, 2))
    assert own._current_origin() is state.origin
    change(own.phi, name)
    with pytest.raises(MismatchError, match=r"changed after this state was made \(phi\.(_?value|new)\)"):
        state.to_bytes()
    with pytest.raises(MismatchError, match="changed after this state was made"):
        own.update(state, torch.ones(1, 3, 2))


KINDS = {
    "lstm": "nn.LSTM(3, 4, 2)",
    "attention": "nn.MultiheadAttention(4, 2)",
    "layer": "nn.TransformerEncoderLayer(4, 2, 8)",
    "weight norm": "torch.nn.utils.parametrizations.weight_norm(nn.Linear(2, 2))",
    "script": "torch.jit.script(nn.Linear(2, 2))",
    "graph": "torch.fx.symbolic_trace(nn.Linear(2, 2))",
    "backbone": "ss.nn.backbones.backbone('small', width=8)",
    "sets": "Phi(value={'a', 'b', 'c', 1, 2}, other={'x': {'q', 'r', 's'}})",
}
CODE = """
import copy, torch, setstream as ss, setstream.nn.backbones
from torch import nn
from tests.test_fingerprint import Phi

for text in %r:
    torch.manual_seed(0)
    own = ss.SetEncoder(eval(text), ss.DeepSets("sum")).eval()
    print(own.empty(1).fingerprint, copy.deepcopy(own).empty(1).fingerprint == own.empty(1).fingerprint)
"""


def test_real_modules_have_fingerprints_that_are_equal_in_another_process(capsys):
    code = CODE % (list(KINDS.values()),)
    exec(code, {})
    one = capsys.readouterr().out.splitlines()
    command = [sys.executable, "-W", "ignore", "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=os.environ | {"PYTHONHASHSEED": "1"})
    assert done.returncode == 0, done.stderr
    assert dict(zip(KINDS, one, strict=True)) == dict(zip(KINDS, done.stdout.splitlines(), strict=True))
    assert len(set(one)) == len(KINDS)
    assert all(line.startswith("2:") and line.endswith(" True") for line in one)


def test_language_models_are_the_same_wherever_they_were_found(tmp_path):
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8, "vocab_size": 9}
    made = transformers.BertModel(transformers.BertConfig(**sizes))
    found = [encoder(made).empty(1).fingerprint]
    for place in ("a", "b"):
        made.save_pretrained(tmp_path / place)
        made = transformers.BertModel.from_pretrained(tmp_path / place, dtype=torch.float32)
        found.append(encoder(made).empty(1).fingerprint)
    made.config.layer_norm_eps = 0.5
    assert len(set(found)) == 1
    assert encoder(made).empty(1).fingerprint != found[0]


@pytest.mark.slow
def test_a_compiled_module_is_the_same():
    assert encoder(torch.compile(Phi())).empty(1).fingerprint == fingerprint()


def test_one_copy_from_the_device_for_all_tensors(monkeypatch):
    """On a GPU each copy waits for the device, after every optimiser step."""
    own = encoder(nn.Sequential(*(nn.Linear(2, 2) for _ in range(20))))
    copies = []
    copy = torch.Tensor.cpu
    monkeypatch.setattr(torch.Tensor, "cpu", lambda self: copies.append(self.shape) or copy(self))
    Origin(own)
    assert len(copies) == 1
    for p in own.parameters():
        p.data = p.data * 2  # behind the version counters
    assert len(copies) == 1


def test_a_weight_written_behind_the_counters_is_seen_whatever_its_layout():
    for weight in (torch.randn(4, 2), torch.randn(2, 4).t(), torch.randn(4, 2, dtype=torch.complex64)):
        own = encoder(Phi(value=weight))
        origin = Origin(own)
        weight.data.add_(1)
        version = weight._version
        assert version == weight._version
        assert not origin.current(look=True)


def test_states_of_0_1_are_compared_by_the_fingerprint_of_0_1_and_go_on():
    own, other = encoder(Phi()), encoder(Phi(plain=3))
    state = own.update(None, torch.ones(1, 3, 2))
    old = ss.State(state.accumulators, state.count, Origin(None, fingerprint_0_1(own)))
    assert ":" not in old.fingerprint
    with pytest.raises(MismatchError, match="0.1 saved one of these states"):
        old + ss.State.from_bytes(state.to_bytes())  # nobody here knows the encoder
    with pytest.raises(MismatchError, match="another encoder"):
        other.finalize(old)
    both = old + state
    assert both.fingerprint == state.fingerprint  # from now on one of ours
    old = ss.State(state.accumulators, state.count, Origin(None, fingerprint_0_1(own)))
    own.check_state(old)
    assert old.origin is state.origin


def quantised(k):
    torch.manual_seed(int(k))
    return torch.ao.quantization.quantize_dynamic(nn.Sequential(nn.Linear(3, 8)), {nn.Linear})


class Scaled(nn.Module):
    def __init__(self, k):
        super().__init__()
        self.k, self.t = k, torch.full((3,), k)

    def forward(self, x):
        return x * self.k + self.t


def own_forward(k):
    module = nn.Identity()
    module.forward = types.MethodType(lambda self, x: x * k, module)
    return module


def closing_over(k):
    class Local(nn.Module):
        def forward(self, x):
            return x * k

    return Local()


def hooked(k):
    module = nn.Identity()
    module.register_forward_hook(lambda module, given, found: found * k)
    return module


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize(
    "make",
    [
        quantised,
        lambda k: torch.jit.script(Scaled(k)),
        lambda k: torch.jit.trace(Scaled(k), torch.ones(2, 3)),
        own_forward,
        closing_over,
        hooked,
    ],
)
def test_modules_that_differ_out_of_sight_have_no_equal_fingerprints(make):
    """Another fingerprint, or none."""
    found = []
    for k in (2.0, 3.0):
        encoder = ss.SetEncoder(make(k), ss.DeepSets("mean")).eval()
        try:
            found.append(encoder.update(None, torch.ones(1, 2, 3)).fingerprint)
        except ConfigurationError:
            found.append(object())
    assert found[0] != found[1]


class Gain:
    def __init__(self):
        self.by = 1.0

    def __call__(self, x):
        return x * self.by


class WithParts(nn.Module):
    def __init__(self):
        super().__init__()
        self.gain, self.table, self.shift = Gain(), np.ones((1000, 4)), functools.partial(torch.add, torch.zeros(3))

    def forward(self, x):
        return self.shift(self.gain(x)) * float(self.table[7, 0])


@pytest.mark.parametrize("change", ["gain", "table", "shift"])
def test_changes_inside_attributes_are_noticed(change):
    phi = WithParts()
    encoder = ss.SetEncoder(phi, ss.DeepSets("mean")).eval()
    state = encoder.update(None, torch.ones(1, 2, 3))
    if change == "gain":
        phi.gain.by = 2.0
    elif change == "table":
        phi.table[7] = 5.0
    else:
        phi.shift.args[0].add_(1.0)
    with pytest.raises(MismatchError):
        encoder.update(state, torch.ones(1, 2, 3))


@pytest.mark.parametrize(
    "wrap",
    [nn.utils.weight_norm, nn.utils.spectral_norm, lambda layer: prune.l1_unstructured(layer, "weight", 0.5)],
)
def test_weights_that_are_made_anew_at_every_call_are_no_change(wrap):
    encoder = ss.SetEncoder(nn.Sequential(wrap(nn.Linear(3, 8)), nn.ReLU()), ss.DeepSets("mean")).eval()
    state = encoder.update(encoder.update(None, torch.randn(1, 5, 3)), torch.randn(1, 5, 3))
    assert encoder.finalize(state).shape == (1, 8)
    assert ss.State.from_bytes(state.to_bytes()).fingerprint == state.fingerprint
