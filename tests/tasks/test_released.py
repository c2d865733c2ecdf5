"""The models as the authors released them, layer by layer as docs/recipes.md has them."""

import re
from pathlib import Path

import pytest
import torch
from torch import nn

import setstream as ss
from setstream.cli.sweep import read_sweep
from setstream.tasks.clustering.released import MODELS
from setstream.tasks.clustering.task import Clustering
from setstream.tasks.completion import Completion
from setstream.tasks.released import ISAB, MAB, PMA, SAB, NormedSlots
from tests.tasks.recipes import TASKS, differences, recipe

ROOT = Path(__file__).parents[2]


def layers(module: nn.Module) -> list[str]:
    """The layers that hold weights or a nonlinearity, in order, as short names."""
    short = []
    for layer in module.modules():
        if isinstance(layer, nn.Linear):
            short.append(f"{layer.in_features}-{layer.out_features}{'' if layer.bias is not None else ' no bias'}")
        elif isinstance(layer, nn.ReLU | nn.LayerNorm):
            short.append(type(layer).__name__)
    return short


def built(name: str) -> ss.SetModel:
    return Clustering().build(name)


@pytest.mark.parametrize("name", sorted(set(MODELS) - {"set-transformer-released"}))
def test_phi_has_two_linear_layers(name):
    assert layers(built(name).encoder.phi) == ["2-128", "ReLU", "128-128"]


@pytest.mark.parametrize("name", MODELS)
def test_the_third_output_is_a_variance_of_at_least_a_hundredth(name):
    head = built(name).head
    raw = torch.tensor([-50.0, 0.0, 3.0])
    expected = torch.nn.functional.softplus(raw).clamp(min=0.01).sqrt()
    torch.testing.assert_close(head.scales(raw), expected)


@pytest.mark.parametrize("name", [name for name in MODELS if name.startswith(("sse", "umbc"))])
def test_slots_are_a_gaussian_each_with_a_query_bias_and_no_layer_norm_on_queries(name):
    pool = built(name).encoder.pool
    for layer in [pool] if isinstance(pool, ss.UMBC) else pool.layers:
        assert (layer.slots.kind, layer.num_slots, layer.heads) == ("gaussian", 4, 4)
        assert layer.slots.mean.shape == (4, 128)
        assert layer.slots.fixed is None
        assert layer.query.bias is not None
        assert isinstance(layer.query_norm, nn.Identity)
        assert layer.slot_residual
        assert isinstance(layer.norm, nn.LayerNorm)
        assert layer.activation.normalise
        assert layer.activation.name == ("softmax" if name.startswith("umbc") else "slot-sigmoid")


def test_all_sets_of_a_batch_share_one_draw_of_the_slots():
    encoder = built("sse-released").encoder.train()
    noise = encoder.empty(5).accumulators["draw"]["noise"]
    assert noise.shape == (5, 4, 128)
    assert torch.equal(noise, noise[:1].expand_as(noise))
    other = ss.SetEncoder(nn.Identity(), ss.UMBC(8, 4, slots="gaussian")).train().empty(2).accumulators["draw"]["noise"]
    assert not torch.equal(other[0], other[1])


def test_hierarchical_sse_is_four_encoders_and_one_linear_layer():
    model = built("sse-hierarchical-released")
    assert len(model.encoder.pool.layers) == 4
    assert layers(model.head) == ["128-5"]


def test_deepsets_has_a_layer_norm_after_the_mean():
    assert layers(built("deepsets-released").head) == ["LayerNorm", *["128-128", "ReLU"] * 3, "128-20"]


def test_sse_decodes_each_slot_by_three_layers():
    assert layers(built("sse-released").head) == [*["128-128", "ReLU"] * 3, "128-5"]


def test_the_set_transformer_reads_points_by_one_isab_with_layer_norm_throughout():
    model = built("set-transformer-released")
    assert isinstance(model.encoder.phi, nn.Identity)
    isab, pma = model.encoder.pool.module.modules_
    assert isinstance(isab, ISAB)
    assert isinstance(pma, PMA)
    assert (isab.gather.seeds.shape, isab.gather.block.key.in_features) == ((16, 128), 2)
    assert pma.seeds.shape == (4, 128)
    assert [type(block) for block in model.head.body] == [SAB] * 3
    blocks = [block for block in model.modules() if isinstance(block, MAB)]
    assert len(blocks) == 6
    assert all(isinstance(norm, nn.LayerNorm) for block in blocks for norm in (block.norm1, block.norm2))


def test_the_set_transformer_behind_umbc_has_no_layer_norm():
    blocks = [block for block in built("umbc+set-transformer-released").head.modules() if isinstance(block, MAB)]
    assert len(blocks) == 3
    assert all(isinstance(norm, nn.Identity) for block in blocks for norm in (block.norm1, block.norm2))


@pytest.mark.parametrize(("name", "steps"), [("diff-em-released", 3), ("umbc+diff-em-released", 1)])
def test_diff_em_has_five_heads_of_four_components(name, steps):
    (pool,) = (module for module in built(name).modules() if isinstance(module, ss.nn.DiffEM))
    assert (pool.heads, pool.components, pool.steps, pool.strength, pool.output) == (5, 4, steps, 0.01, "best")


def test_a_released_block_adds_the_projected_queries_and_has_no_output_projection():
    torch.manual_seed(0)
    block = MAB(3, 5, 8, heads=2, layer_norm=False).double()
    x, y = torch.randn(2, 4, 3, dtype=torch.float64), torch.randn(2, 6, 5, dtype=torch.float64)
    q, k, v = block.query(x), block.key(y), block.value(y)
    heads = []
    for head in (slice(0, 4), slice(4, 8)):
        weights = (q[..., head] @ k[..., head].mT / 2.0).softmax(-1)
        heads.append(weights @ v[..., head])
    h = q + torch.cat(heads, -1)
    torch.testing.assert_close(block(x, y), h + block.out(h).relu())


def test_a_released_model_can_be_saved_and_loaded(tmp_path):
    model = built("sse-released").eval()
    model.save_pretrained(tmp_path)
    x = torch.randn(2, 30, 2)
    torch.testing.assert_close(ss.SetModel.from_pretrained(tmp_path)(x).means, model(x).means)


@pytest.mark.parametrize("section", TASKS)
def test_the_page_of_recipes_lists_every_difference(section):
    """Its tables are the layers of the models as they are built, all that differ and no others."""
    (text,) = re.findall(rf"^## {section}\n(.*?)(?=^## |\Z)", (ROOT / "docs/recipes.md").read_text(), re.DOTALL | re.MULTILINE)
    listed = [row for row in text.splitlines() if row.count(" | ") == 3 and re.search(r"\| (phi|pool|head) \|", row)]
    assert listed == differences(section)
    plain, all_released = TASKS[section]
    about = text.split("what the text leaves open")[1].split("\n\n")[0]
    assert "| all |" in about or all(f"`{name.removesuffix('-released')}`" in about for name in all_released)
    assert {name.removesuffix("-released") for name in all_released} <= set(plain)


def test_recipes_tell_models_apart():
    """A difference of any kind changes the words: the tables would show it."""
    build, name = Completion().build, "umbc+set-transformer-released"
    changes = {"slots": "learned", "slot_residual": True, "activation": "sigmoid", "num_slots": 64, "norm_after": False}
    changes |= {"slot_norm": True, "query_bias": False, "shared_draw": False, "eval_slots": "fixed", "normalise": False}
    changed = [recipe(build(name, **{option: value}))["pool"] for option, value in changes.items()]
    assert len({recipe(build(name))["pool"], *changed}) == 1 + len(changes)


@pytest.mark.parametrize("section", ["Image completion", "Long documents", "Multiple instance learning"])
def test_one_layer_is_umbc_and_sse(section):
    """Gaussian slots, one draw per batch, a query bias, one head, a layer norm after; the slots are added for slides only."""
    slides = section == "Multiple instance learning"
    for name in [name for name in TASKS[section][1] if name.startswith(("sse", "umbc"))]:
        (pool,) = (module for module in TASKS[section][1][name]().modules() if isinstance(module, ss.UMBC))
        assert (pool.slots.kind, pool.slot_dim, pool.heads, pool.slot_residual) == ("gaussian", 128, 1, slides)
        assert pool.shared_draw
        assert pool.query.bias is not None
        assert isinstance(pool.norm, nn.LayerNorm)
        assert isinstance(pool.query_norm, nn.Identity)
        assert isinstance(pool, NormedSlots) is not slides
        assert pool.activation.normalise
        count = {"Image completion": 128, "Long documents": 256, "Multiple instance learning": 64}[section]
        sigmoid = name.startswith("sse") or section == "Long documents"
        assert pool.num_slots == (1 if name.startswith("sse") else count)
        assert pool.activation.name == ("slot-sigmoid" if sigmoid else "softmax")


def test_normed_slots_normalise_slots_before_their_projection():
    torch.manual_seed(0)
    pool = NormedSlots(8, 3).double().eval()
    with torch.no_grad():
        pool.slots_norm.weight.uniform_(0.5, 2.0)
    x = torch.randn(2, 20, 8, dtype=torch.float64)
    queries = pool.query(pool.slots_norm(pool.slots.mean))
    weights = (queries @ (x @ pool.key.weight.T).mT / 8**0.5).softmax(-1)
    torch.testing.assert_close(pool(x), pool.norm(weights @ pool.value(x)))
    for gradient in ("exact", "importance"):  # the derivative of the pool goes through the norm
        pool.zero_grad()
        ss.encode(ss.SetEncoder(nn.Identity(), pool), x, chunk_size=20, gradient=gradient).square().sum().backward()
        found = pool.slots_norm.weight.grad.clone()
        pool.zero_grad()
        pool(x).square().sum().backward()
        torch.testing.assert_close(found, pool.slots_norm.weight.grad)


def test_sse_with_one_slot_is_a_mean():
    model = Completion().build("sse-released").eval()
    x = torch.rand(2, 40, 5)
    pool = model.encoder.pool
    expected = pool.norm(pool.value(model.encoder.phi(x)).mean(1, keepdim=True))
    torch.testing.assert_close(model.encoder(x), expected)


def test_ds_mil_without_a_value_layer_pools_the_features_themselves():
    torch.manual_seed(0)
    pool, module = ss.DSMIL(8, value=False).double().eval(), ss.nn.DSMIL(8).double().eval()
    with torch.no_grad():
        module.value.weight.copy_(torch.eye(8))
        module.value.bias.zero_()
    weights = {name: tensor for name, tensor in module.state_dict().items() if not name.startswith("value")}
    pool.load_state_dict(weights)
    x = torch.randn(3, 30, 8, dtype=torch.float64)
    torch.testing.assert_close((pool(x)["instance"] + pool(x)["bag"]) / 2, module(x))


@pytest.mark.parametrize("name", TASKS["Multiple instance learning"][1])
def test_released_models_of_slides_have_both_streams_on_features_with_dropout(name):
    model = TASKS["Multiple instance learning"][1][name]().eval()
    assert [(type(layer), layer.p) for layer in model.encoder.phi.layers] == [(nn.Dropout, 0.5)]
    assert model(torch.randn(2, 10, 256)).shape == (2, 2)


def test_sweeps_have_the_training_options_of_the_release(tmp_path):
    runs = read_sweep(ROOT / "sweeps/documents-released.toml", tmp_path)
    assert {(run.config.optimizer, run.config.lr, run.config.weight_decay, run.config.schedule) for run in runs} == {
        ("adamw", 5e-5, 1e-5, "constant")
    }
    assert {(run.config.clip, run.config.warmup, run.config.select, run.config.batch) for run in runs} == {(None, 0, None, 8)}
    epochs = {(run.config.model, round(run.config.steps * 8 / 2291, 1)) for run in runs}
    assert epochs == {("umbc+bert-released", 30.0), ("deepsets-released", 20.0), ("sse-released", 20.0)}
    for run in runs:
        stage_one = ["head.bert", "encoder.phi.words"] if "bert" in run.name else ["encoder.phi.words"]
        assert run.config.freeze == (stage_one if run.name.endswith("-frozen") else [])
    slides = read_sweep(ROOT / "sweeps/camelyon16-released.toml", tmp_path)
    heads, backbones = ([run.config for run in slides if bool(run.after) is after] for after in (False, True))
    assert {(c.lr, c.beta1, c.beta2, c.steps, c.lr * c.final_factor) for c in heads} == {(5e-4, 0.5, 0.9, 200 * 270, 5e-6)}
    assert {(c.optimizer, c.lr, c.weight_decay, c.steps, c.warmup) for c in backbones} == {("adamw", 1e-5, 1e-2, 2700, 270)}
    assert all(run.config.task_options["threshold"] == "reported" for run in slides)
    classic = read_sweep(ROOT / "sweeps/mil-released.toml", tmp_path)
    assert len({run.config.model for run in classic}) == 5
    fixed = read_sweep(ROOT / "sweeps/completion-released.toml", tmp_path)
    sizes = {(run.config.task_options["fewest"], run.config.task_options["most"]) for run in fixed if "-of-" in run.name}
    assert sizes == {(size, size) for size in (100, 200, 300, 400, 500)}
