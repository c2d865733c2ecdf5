"""GatedAttention: the attention of AB-MIL, in any chunks."""

import pytest
import torch

import setstream as ss
from setstream.errors import ConfigurationError
from setstream.tasks.mil.models import MODELS
from tests.gradients.builders import check_unbiased
from tests.laws.strategies import pad


def whole_and_pool(dtype=torch.float64):
    """The module that needs its whole bag, and the pool with its weights."""
    module = ss.nn.GatedAttention(6, hidden=5).to(dtype)
    pool = ss.GatedAttention(6, hidden=5).to(dtype)
    pool.load_state_dict(module.state_dict())
    return module, pool


@pytest.mark.parametrize("chunk_size", [1, 7, 100])
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, 1e-12), (torch.float32, 1e-6)])
def test_any_chunks_give_the_result_and_the_weights_of_the_whole_bag(chunk_size, dtype, bound):
    module, pool = whole_and_pool(dtype)
    encoder = ss.SetEncoder(torch.nn.Identity(), pool).eval()
    sets = [torch.randn(size, 6, dtype=dtype) for size in (100, 1, 43)]
    x, mask = pad(sets, fill=0.0)
    expected, weights = module.double()(x.double(), mask, return_attention=True)
    state = None
    for chunk, some in zip(x.split(chunk_size, 1), mask.split(chunk_size, 1), strict=True):
        state = encoder.update(state, chunk, some)
    torch.testing.assert_close(encoder.finalize(state).squeeze(1), expected, rtol=0, atol=bound, check_dtype=False)
    pieces = [encoder.attention(*pair[:1], state, pair[1]) for pair in zip(x.split(9, 1), mask.split(9, 1), strict=True)]
    torch.testing.assert_close(torch.cat(pieces, -1)[:, 0, 0], weights, rtol=0, atol=bound, check_dtype=False)


def test_the_logits_of_ab_mil_in_any_chunks_are_those_of_the_whole_bag():
    model = MODELS["ab-mil"](in_dim=6, widths=[16]).eval()
    whole = ss.nn.GatedAttention(16, hidden=64)
    model.encoder.pool.load_state_dict(whole.state_dict())
    bag = torch.randn(1, 300, 6)
    with torch.no_grad():
        expected = model.head.decoder(whole(model.encoder.phi(bag)).unsqueeze(1))
        for size in (1, 7, 300):
            stream = model.stream()
            for chunk in bag[:, torch.randperm(300)].split(size, 1):
                stream.update(chunk)
            torch.testing.assert_close(stream.predict(), expected, rtol=0, atol=1e-6)


def test_weights_of_a_whole_bag_model_of_an_earlier_version_load():
    module, pool = whole_and_pool()
    old = ss.ChunkMean(module, 6).state_dict()
    new = ss.GatedAttention(6, hidden=5).double()
    new.load_state_dict(old)
    for name, tensor in new.state_dict().items():
        assert torch.equal(tensor, pool.state_dict()[name])


@pytest.mark.parametrize("gated", [True, False])
def test_branches_are_attention_distributions_of_their_own(gated):
    pool = ss.GatedAttention(6, hidden=5, branches=3, gated=gated)
    x = torch.randn(2, 30, 6)
    z = pool(x)
    assert z.shape == (2, 3, 6)
    gate = pool.gate(x) if gated else 1.0
    weights = (pool.content(x) * gate @ pool.score.weight.T).softmax(1)
    torch.testing.assert_close(z, weights.mT @ x)


@pytest.mark.parametrize("mode", ["exact", "importance"])
def test_gradients_are_those_of_the_whole_bag(mode):
    _, pool = whole_and_pool()
    encoder = ss.SetEncoder(torch.nn.Linear(3, 6), pool).double()
    ss.testing.check_exact_gradient(encoder, torch.randn(2, 40, 3), chunk_size=40, gradient=mode)


@pytest.mark.parametrize("gradient", ["unbiased", "importance"])
def test_the_sampled_gradients_are_unbiased(gradient):
    """4,000 draws."""
    encoder = ss.SetEncoder(torch.nn.Linear(3, 6), ss.GatedAttention(6, hidden=5))
    check_unbiased(encoder, [torch.randn(24, 3), torch.randn(9, 3)], chunk_size=4, gradient=gradient)


def test_an_empty_set_gives_zeros_and_elements_can_be_removed():
    encoder = ss.SetEncoder(torch.nn.Identity(), ss.GatedAttention(6, hidden=5)).double().eval()
    assert not encoder([torch.zeros(0, 6)]).any()
    x = torch.randn(1, 20, 6, dtype=torch.float64)
    rest = encoder.update(None, x) - encoder.update(None, x[:, :8])
    torch.testing.assert_close(encoder.finalize(rest), encoder(x[:, 8:]))


@pytest.mark.parametrize("options", [{"hidden": 0}, {"branches": 0}, {"in_dim": 0}])
def test_sizes_are_positive(options):
    with pytest.raises(ConfigurationError, match="at least 1"):
        ss.GatedAttention(**({"in_dim": 4} | options))
