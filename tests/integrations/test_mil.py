"""Weights in the layouts of CLAM, MIL-Lab and torchmil, beside plain reference forwards of these models on whole bags."""

from itertools import pairwise

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import setstream as ss
from setstream.errors import ConfigurationError, DataError
from setstream.integrations import mil
from tests.integrations.test_onnx import Runner

IN, WIDTH, HIDDEN = 12, 10, 7


class Attention(nn.Module):
    """The scores of CLAM's and MIL-Lab's attention (N, branches), with their names; dropout shifts the numbers of layers."""

    def __init__(self, gated, dropout, branches):
        super().__init__()
        drop = [nn.Dropout(0.25)] if dropout else []
        if gated:
            self.attention_a = nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.Tanh(), *drop)
            self.attention_b = nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.Sigmoid(), *drop)
            self.attention_c = nn.Linear(HIDDEN, branches)
        else:
            self.module = nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.Tanh(), *drop, nn.Linear(HIDDEN, branches))
        self.gated = gated

    def forward(self, h):
        return self.attention_c(self.attention_a(h) * self.attention_b(h)) if self.gated else self.module(h)


class Clam(nn.Module):
    """CLAM_SB or CLAM_MB; releases before 2023 have no dropout between the layer and the attention unless it is used."""

    def __init__(self, gated=True, dropout=True, multiple=False, between=True, classes=3):
        super().__init__()
        attention = Attention(gated, dropout, classes if multiple else 1)
        self.attention_net = nn.Sequential(nn.Linear(IN, WIDTH), nn.ReLU(), *([nn.Dropout(0.25)] if between else []), attention)
        one = [nn.Linear(WIDTH, 1) for _ in range(classes)]
        self.classifiers = nn.ModuleList(one) if multiple else nn.Linear(WIDTH, classes)
        self.instance_classifiers = nn.ModuleList(nn.Linear(WIDTH, 2) for _ in range(classes))

    def forward(self, x):
        *before, attention = self.attention_net
        h = nn.Sequential(*before)(x)
        weights = attention(h).softmax(0).T
        pooled = weights @ h
        if isinstance(self.classifiers, nn.Linear):
            return self.classifiers(pooled)[0], weights
        return torch.cat([layer(row) for layer, row in zip(self.classifiers, pooled, strict=True)]), weights


class MilLab(nn.Module):
    """MIL-Lab's ABMIL, with which FEATHER is published."""

    def __init__(self, gated=True, layers=1, heads=1, classes=4):
        super().__init__()
        sizes = [IN] + [WIDTH] * layers
        parts = [part for pair in pairwise(sizes) for part in (nn.Linear(*pair), nn.ReLU(), nn.Dropout(0.25))]
        self.patch_embed = nn.Sequential(*parts[:-1])
        self.global_attn = Attention(gated, True, heads)
        if classes:
            self.classifier = nn.Linear(WIDTH * heads, classes)

    def forward(self, x):
        h = self.patch_embed(x)
        weights = self.global_attn(h).softmax(0).T
        pooled = (weights @ h).flatten()
        return self.classifier(pooled) if hasattr(self, "classifier") else pooled, weights


class Lazy(nn.Module):
    """torchmil's linear layer has its weights one level deeper."""

    def __init__(self, *sizes):
        super().__init__()
        self.module = nn.Linear(*sizes)

    def forward(self, x):
        return self.module(x)


class TorchMil(nn.Module):
    """torchmil's ABMIL."""

    def __init__(self, gated=True, extractor=None):
        super().__init__()
        self.feat_ext = nn.Identity() if extractor is None else extractor
        width = IN if extractor is None else WIDTH
        self.pool = nn.Module()
        self.pool.fc1, self.pool.fc2 = Lazy(width, HIDDEN), nn.Linear(HIDDEN, 1, bias=False)
        if gated:
            self.pool.fc_gated = Lazy(width, HIDDEN)
        self.classifier = Lazy(width, 1)

    def forward(self, x):
        h = self.feat_ext(x)
        keys = torch.tanh(self.pool.fc1(h))
        keys = keys * torch.sigmoid(self.pool.fc_gated(h)) if hasattr(self.pool, "fc_gated") else keys
        weights = self.pool.fc2(keys).softmax(0).T
        return self.classifier(weights @ h)[0], weights


def extractor():
    return nn.Sequential(nn.Linear(IN, WIDTH), nn.GELU())


MODELS = {
    f"clam {gated=} {dropout=} {multiple=} {between=}": (Clam, (gated, dropout, multiple, between))
    for gated in (True, False)
    for dropout in (True, False)
    for multiple in (True, False)
    for between in (True, False)
}
MODELS |= {"mil-lab": (MilLab, ()), "mil-lab plain": (MilLab, (False, 3)), "mil-lab heads": (MilLab, (True, 2, 3))}
MODELS |= {"mil-lab features": (MilLab, (True, 1, 2, 0)), "torchmil": (TorchMil, ()), "torchmil plain": (TorchMil, (False,))}


def build(name):
    kind, options = MODELS[name]
    torch.manual_seed(0)
    return kind(*options).eval()


def random_parts(size, seed):
    """The elements of a set in a random order, cut at random."""
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(size, generator=generator)
    cuts = torch.randint(1, size, (seed % 9,), generator=generator).unique().tolist()
    return [part for part in order.tensor_split(cuts) if len(part)]


@torch.no_grad()
def agrees(theirs, model, x):
    """Logits and attention of the original to 1e-5 (of the largest weight) over random partitions, parts merged."""
    logits, weights = theirs(x)
    for seed in range(12):
        parts = random_parts(len(x), seed)
        state = sum(
            (model.encoder.update(None, x[part][None]) for part in parts[1:]), model.encoder.update(None, x[parts[0]][None])
        )
        torch.testing.assert_close(model.finalize(state)[0], logits, rtol=1e-5, atol=1e-5)
        attention = torch.empty_like(weights)
        for part in parts:
            attention[:, part] = model.encoder.attention(x[part][None], state)[0, 0]
        assert float((attention - weights).abs().max()) < 1e-5 * float(weights.max())


@pytest.mark.parametrize("name", MODELS)
def test_logits_and_attention_are_those_of_the_original(name, tmp_path):
    theirs, x = build(name), 3 * torch.randn(400, IN)
    torch.save(theirs.state_dict(), tmp_path / "a.pt")
    agrees(theirs, mil.load(tmp_path / "a.pt"), x)


@pytest.mark.parametrize(("prefix", "key"), [("model.", None), ("module.", "state_dict"), ("model.module.", "model")])
def test_prefixes_wrappers_and_kinds_of_files(prefix, key, tmp_path):
    theirs, x = build("mil-lab"), torch.randn(50, IN)
    weights = {prefix + name: tensor for name, tensor in theirs.state_dict().items()}
    save_file(weights, tmp_path / "a.safetensors")
    torch.save(weights if key is None else {key: weights, "epoch": 3}, tmp_path / "a.ckpt")
    for place in (tmp_path / "a.safetensors", str(tmp_path / "a.ckpt"), weights):
        agrees(theirs, mil.load(place), x)


def test_clam_in_data_parallel_with_the_buffers_of_its_instance_loss():
    theirs = Clam()
    weights = {name.replace("attention_net.", "attention_net.module."): value for name, value in theirs.state_dict().items()}
    weights["instance_loss_fn.labels"] = torch.arange(2)
    agrees(theirs.eval(), mil.load(weights), torch.randn(50, IN))


def test_a_feature_extractor_is_the_callers_module():
    theirs = TorchMil(True, extractor()).eval()
    agrees(theirs, mil.load(theirs.state_dict(), phi=extractor()), torch.randn(50, IN))
    with pytest.raises(ConfigurationError, match=r"\(feat_ext\).*'feat_ext.0.bias', 'feat_ext.0.weight'.*pass phi="):
        mil.load(theirs.state_dict())
    with pytest.raises(ConfigurationError, match="leave phi out"):
        mil.load(build("torchmil").state_dict(), phi=extractor())
    with pytest.raises(ConfigurationError, match=r"encoder.phi.0.weight is \(10, 12\), not \(3, 12\)"):
        mil.load(theirs.state_dict(), phi=nn.Sequential(nn.Linear(IN, 3)))


@pytest.mark.parametrize("name", ["clam gated=True dropout=True multiple=True between=True", "mil-lab features", "torchmil"])
def test_what_is_loaded_is_saved_stored_and_trained(name, tmp_path):
    theirs, x = build(name), torch.randn(60, IN)
    mil.load(theirs.state_dict()).save_pretrained(tmp_path / "model")
    model = ss.SetModel.from_pretrained(tmp_path / "model")
    agrees(theirs, model, x)
    with ss.StateStore(tmp_path / "states.db", model) as store:
        for part in random_parts(60, 5):
            store.update("slide", x[part])
        torch.testing.assert_close(store.predict("slide").flatten(), theirs(x)[0], rtol=1e-5, atol=1e-5)
    z = ss.encode(model.train().encoder, x[None], chunk_size=7, gradient="exact")
    model.head(z).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


@pytest.mark.slow
def test_it_is_exported(tmp_path):
    theirs, x = build("torchmil"), torch.randn(1, 20, IN)
    runner = Runner(ss.integrations.onnx.export(mil.load(theirs.state_dict()), tmp_path, x[0]))
    state = runner.empty(1)
    for chunk in x.numpy().reshape(4, 1, 5, IN):
        state = runner.update(state, chunk)
    torch.testing.assert_close(torch.from_numpy(runner.predict(state))[0], theirs(x[0])[0], rtol=1e-5, atol=1e-5)


def changed(name, **changes):
    weights = dict(build(name).state_dict())
    for key, value in changes.items():
        key = key.replace("__", ".")
        weights = {k: v for k, v in weights.items() if k != key} if value is None else weights | {key: value}
    return weights


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ({}, r"not the weights of CLAM \(attention_net.\*\), MIL-Lab"),
        ({"a.weight": torch.ones(1)}, r"their names are \['a.weight'\]"),
        (changed("mil-lab", head__weight=torch.ones(1), b=torch.ones(1)), r"MIL-Lab that is known: \['b', 'head.weight'\]"),
        (changed("mil-lab", global_attn__attention_b__0__bias=None), r"encoder.pool.gate.0.bias is missing, not \(7,\)"),
        (changed("mil-lab", global_attn__attention_b__0__bias=torch.ones(2)), r"gate.0.bias is \(2,\), not \(7,\)"),
        (changed("torchmil", classifier__module__weight=torch.ones(1, 5)), r"head.decoder.weight is \(1, 5\), not \(1, 12\)"),
        (changed("torchmil", pool__fc2__weight=None), r"has the matrices \['encoder.pool.score.weight'\]"),
        (changed("torchmil", pool__fc1__module__weight=torch.ones(3)), r"has the matrices \['encoder.pool.content.0.weight'\]"),
        (
            changed("clam gated=True dropout=True multiple=True between=True", classifiers__1__weight=None),
            r"numbered from 0 and have one shape; got \{0: \(1, 10\), 2: \(1, 10\)\}",
        ),
        (
            {"attention_net.2.attention_a.0.weight": torch.ones(1, 1)}
            | changed("clam gated=True dropout=True multiple=False between=True"),
            "another weight are both encoder.pool.content.0.weight",
        ),
    ],
)
def test_weights_that_do_not_fit_are_listed(weights, message):
    with pytest.raises(ConfigurationError, match=message):
        mil.load(weights)


def test_files_with_more_than_weights_are_refused(tmp_path):
    torch.save(build("torchmil"), tmp_path / "model.pt")
    with pytest.raises(DataError, match=r"model.pt: holds more than weights.*save model.state_dict\(\)"):
        mil.load(tmp_path / "model.pt")
    torch.save([torch.ones(1)], tmp_path / "list.pt")
    with pytest.raises(DataError, match="expected a mapping of names to tensors, a state dict; it holds list"):
        mil.load(tmp_path / "list.pt")
    torch.save({"pool.fc1.module.weight": torch.ones(1, 1).expand(10**6, 10**6)}, tmp_path / "huge.pt")
    with pytest.raises(DataError, match="'pool.fc1.module.weight' is not a tensor that is stored whole"):
        mil.load(tmp_path / "huge.pt")
    for name in ("cut.pt", "cut.safetensors"):
        (tmp_path / name).write_bytes((tmp_path / "model.pt").read_bytes()[:300])
        with pytest.raises(DataError, match="cannot be read|no file of torch"):
            mil.load(tmp_path / name)
    with pytest.raises(DataError, match="there is no such file"):
        mil.load(tmp_path / "nothing.pt")


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("name", ["ABMIL", "CLAM_SB"])
def test_torchmil_itself(name, gated):
    """Needs `pip install torchmil`."""
    models = pytest.importorskip("torchmil.models")
    theirs = getattr(models, name)(in_shape=(IN,), gated=gated).eval()

    def forward(x):
        logit, scores = theirs(x[None], return_att=True)
        return logit, scores.softmax(1)

    agrees(forward, mil.load(theirs.state_dict()), torch.randn(400, IN))
