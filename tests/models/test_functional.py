"""The pure functions are the encoder's verbs, and each compiles to one graph."""

import pytest
import torch

import setstream as ss
from setstream import pure
from setstream.errors import MismatchError, ShapeError
from setstream.pools.activations import ACTIVATIONS
from setstream.pools.base import named_tensors

POOLS = {
    **{
        f"umbc-{name}-{'folded' if fold else 'direct'}": (
            lambda name=name, fold=fold: ss.UMBC(
                8, 4, heads=2, activation=name, slots="gaussian", slot_residual=True, norm_after=True, fold=fold
            )
        )
        for name in ACTIVATIONS
        for fold in (True, False)
    },
    "mean": lambda: ss.DeepSets("mean"),
    "max": lambda: ss.DeepSets("max"),
    "sse": lambda: ss.SSE(8, 4, pool="mean"),
    "hierarchical": lambda: ss.HierarchicalSSE(8, (4, 2)),
    "parallel": lambda: ss.Parallel(bag=ss.UMBC(8, 4), most=ss.Projected(torch.nn.Linear(8, 3), ss.DeepSets("max"))),
}


def encoder_of(name):
    return ss.SetEncoder(torch.nn.Sequential(torch.nn.Linear(2, 8), torch.nn.ReLU()), POOLS[name]())


def assert_same(z, wanted):
    for (_, a), (_, b) in zip(named_tensors(z), named_tensors(wanted), strict=True):
        assert a.dtype == b.dtype
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("name", POOLS)
def test_pure_functions_are_the_encoders_verbs(name):
    encoder = encoder_of(name).eval()
    x = torch.randn(3, 20, 2)
    mask = torch.rand(3, 6) < 0.5
    mask[2] = False
    nothing = pure.empty(encoder, 3, x[0])
    tensors = pure.update(encoder, nothing, x[:, :9])
    tensors = pure.update(encoder, tensors, x[:, 9:15].masked_fill(~mask.unsqueeze(-1), 1e6), mask)
    tensors = pure.merge(encoder, tensors, pure.update(encoder, nothing, x[:, 15:]))
    state = encoder.update(None, x[:, :9])
    state = encoder.update(encoder.update(state, x[:, 9:15], mask), x[:, 15:])
    assert_same(pure.finalize(encoder, tensors), encoder.finalize(state))
    assert {key: tensor.shape for key, tensor in nothing.items()} == {key: tensor.shape for key, tensor in tensors.items()}
    again = pure.to_state(encoder, tensors) + encoder.update(None, x)
    assert again.count.tolist() == (state.count + 20).tolist()
    assert_same(encoder.finalize(pure.to_state(encoder, pure.to_tensors(state))), encoder.finalize(state))
    empty = encoder([x[0], x[0, :0]])  # beside another set, an empty one has its width
    empty = {key: z[1:].expand(3, *z.shape[1:]) for key, z in named_tensors(empty)}
    assert_same(dict(named_tensors(pure.finalize(encoder, nothing))), empty)


def test_a_training_pass_keeps_its_draw():
    encoder = encoder_of("umbc-softmax-folded").train()
    x = torch.randn(2, 10, 2)
    tensors = pure.empty(encoder, 2, x[0])
    assert "draw.noise" in tensors
    state = pure.to_state(encoder, tensors)
    for chunk in x.split(4, dim=1):
        tensors, state = pure.update(encoder, tensors, chunk), encoder.update(state, chunk)
    torch.testing.assert_close(pure.finalize(encoder, tensors), encoder.finalize(state), atol=1e-5, rtol=1e-4)


def test_tensors_of_another_encoder_are_refused():
    tensors = pure.empty(encoder_of("mean"), 1, torch.zeros(1, 2))
    with pytest.raises(MismatchError, match="pooled.numerator"):
        pure.to_state(encoder_of("sse").eval(), tensors)
    with pytest.raises(ShapeError, match="'count'"):
        pure.to_state(encoder_of("mean"), {})


# "eager" checks that dynamo finds one graph; "aot_eager" (slow) also traces its way back. Neither needs a C++ compiler.
@pytest.mark.skipif(torch.__version__.startswith("2.6"), reason="dynamo of torch 2.6 cannot trace the accumulators")
@pytest.mark.parametrize(("name", "backend"), [("umbc-softmax-folded", "eager"), ("parallel", "eager")])
def test_update_and_finalize_compile_to_one_graph(name, backend):
    torch._dynamo.reset()
    encoder = encoder_of(name).eval()
    update = torch.compile(pure.update, fullgraph=True, backend=backend, dynamic=True)
    finalize = torch.compile(pure.finalize, fullgraph=True, backend=backend, dynamic=True)
    x = torch.randn(3, 40, 2)
    tensors = pure.empty(encoder, 3, x[0])
    for chunk in x.split([20, 17, 3], dim=1):
        tensors = update(encoder, tensors, chunk)
    z = finalize(encoder, tensors)
    assert_same(z, encoder(x))
    gradient = {}
    for kind, found in (("compiled", z), ("eager", encoder(x))):
        encoder.zero_grad()
        sum(tensor.square().sum() for _, tensor in named_tensors(found)).backward()
        gradient[kind] = encoder.phi[0].weight.grad.clone()
    torch.testing.assert_close(gradient["compiled"], gradient["eager"], atol=1e-4, rtol=1e-3)
    torch._dynamo.reset()


@pytest.mark.slow
@pytest.mark.parametrize("name", POOLS)
def test_every_pool_compiles_to_one_graph(name):
    test_update_and_finalize_compile_to_one_graph(name, "aot_eager")
