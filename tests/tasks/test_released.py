"""The models as the authors released them, layer by layer as docs/recipes.md has them."""

import pytest
import torch
from torch import nn

import setstream as ss
from setstream.tasks.clustering.released import ISAB, MAB, MODELS, PMA
from setstream.tasks.clustering.task import Clustering


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
    assert [type(block) for (block,) in model.head.body] == [MAB] * 3
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
