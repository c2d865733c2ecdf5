import copy
import io
import pickle

import numpy as np
import pytest
import torch
from torch import nn

import setstream as ss
from setstream.errors import (
    BatchStatisticsError,
    ConfigurationError,
    DeviceError,
    MaskError,
    MismatchError,
    NonFiniteError,
    ShapeError,
)


def make(phi=None, pool=None, **options):
    torch.manual_seed(0)
    return ss.SetEncoder(phi or nn.Linear(3, 8), pool or ss.UMBC(8, 4, out_dim=6, heads=2), **options).eval()


def test_shapes_and_one_call():
    encoder = make()
    x = torch.randn(2, 10, 3)
    z = encoder(x)
    assert z.shape == (2, 4, 6)
    torch.testing.assert_close(z, encoder.finalize(encoder.update(None, x)))


@pytest.mark.parametrize("first", [nn.Identity(), nn.LayerNorm(3)], ids=["linear", "norm"])
def test_sets_without_their_axes_are_told_which_ones(first):
    encoder = make(nn.Sequential(first, nn.Linear(3, 8)))
    for shape in ((5, 3), (1, 3), (2, 3)):  # with (1, 3), phi itself takes three numbers for one element
        with pytest.raises(ShapeError, match=r"single numbers.*one set \(N, width\), pass x\[None\].*pass x\[None, None\]"):
            encoder(torch.randn(shape))
    with pytest.raises(ShapeError, match=r"one element x\[None, None\]"):
        encoder(torch.randn(3))
    with pytest.raises(ShapeError, match=r"ss.encode\(encoder, sources, chunk_size=...\)"):
        encoder([ss.data.ArraySource(torch.randn(5, 3))])


# -- elements of every kind -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.uint8])
def test_elements_of_any_dtype(dtype):
    encoder = make()
    x = torch.randint(0, 5, (2, 10, 3)).to(dtype)
    z = encoder(x)
    assert z.dtype == torch.float32
    torch.testing.assert_close(z, encoder(x.float()))
    assert torch.isfinite(make(nn.Identity(), ss.DeepSets("mean"))(x)).all()
    assert torch.isfinite(make(nn.Identity(), ss.UMBC(3, 4))(x)).all()


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_encoders_of_any_dtype(dtype):
    encoder = make().to(dtype)
    x = torch.randn(2, 10, 3)
    z = encoder(x)
    assert z.dtype == dtype
    torch.testing.assert_close(z.float(), make()(x), rtol=0.1, atol=0.1)


def test_elements_may_be_images():
    phi = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 8))
    encoder = make(phi)
    images = torch.randint(0, 256, (2, 5, 3, 9, 9), dtype=torch.uint8)
    assert encoder(images).shape == (2, 4, 6)
    ragged = [images[0], images[1, :2]]
    torch.testing.assert_close(encoder(ragged)[0], encoder(images)[0])


def test_elements_may_be_token_ids():
    encoder = make(nn.Embedding(100, 8))
    tokens = torch.randint(0, 100, (2, 12))
    z = encoder(tokens)
    torch.testing.assert_close(encoder((tokens.flatten(), torch.tensor([0, 12, 24]))), z)
    torch.testing.assert_close(encoder([tokens[0], tokens[1]]), z)


def test_numpy_arrays_come_in_as_they_are():
    encoder = make()
    x = np.random.default_rng(0).normal(size=(2, 10, 3))
    z = encoder(x)
    torch.testing.assert_close(encoder([x[0], x[1]]), z)
    torch.testing.assert_close(encoder((x.reshape(20, 3), np.array([0, 10, 20]))), z)


def test_a_batch_of_very_different_sizes():
    encoder = make()
    sets = [torch.randn(n, 3) for n in (1, 1000, 0, 3, 17, 1, 64, 65, 0, 900)]
    z = encoder(sets)
    for index, x in enumerate(sets):
        torch.testing.assert_close(z[index], encoder([x])[0], rtol=1e-4, atol=1e-5)


def test_empty_and_wholly_masked_sets():
    for pool in (ss.UMBC(8, 4), ss.DeepSets("mean"), ss.DeepSets("max"), ss.SSE(8, 4), ss.ChunkMean(ss.nn.SetTransformer(8))):
        encoder = make(pool=pool)
        x = torch.randn(2, 6, 3)
        mask = torch.tensor([[False] * 6, [True] * 6])
        z = encoder(x, mask)
        assert torch.equal(z[0], torch.zeros_like(z[0]))
        torch.testing.assert_close(z[1], encoder(x)[1], rtol=1e-4, atol=1e-5)
        if pool.in_dim is not None:
            assert torch.equal(encoder(torch.zeros(2, 0, 3)), torch.zeros_like(z))
    assert make(pool=ss.DeepSets("max"))(torch.zeros(2, 0, 3)).shape == (2, 8)


def test_nan_under_the_mask_goes_nowhere():
    encoder = make()
    x, mask = torch.randn(2, 6, 3), torch.ones(2, 6, dtype=torch.bool)
    mask[0, 3:] = False
    clean = encoder(x, mask)
    x[0, 3:] = float("nan")
    torch.testing.assert_close(encoder(x, mask), clean)
    z = encoder(x.requires_grad_(), mask)
    z.sum().backward()
    assert torch.isfinite(x.grad).all()
    assert (x.grad[0, 3:] == 0).all()


# -- gradients and modes ----------------------------------------------------------------------------------------------


def test_gradients_through_chunks_equal_gradients_through_the_whole():
    for pool in (ss.UMBC(8, 4, heads=2, slot_residual=True, norm_after=True), ss.UMBC(8, 4, fold=False), ss.SSE(8, 4)):
        encoder = make(pool=pool).double()
        x = torch.randn(2, 30, 3, dtype=torch.float64)
        parameters = list(encoder.parameters())

        def gradients(z, parameters=parameters):
            return torch.autograd.grad(z.square().sum(), parameters, allow_unused=True)

        whole = gradients(encoder(x))
        chunked = gradients(encoder.finalize(sum(encoder.update(None, c) for c in x.split(7, dim=1))))
        for (name, _), a, b in zip(encoder.named_parameters(), whole, chunked, strict=True):
            if a is None:
                assert b is None
                assert "raw_std" in name  # no draw in eval mode
            else:
                torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-10)


def test_the_gradient_is_the_derivative():
    encoder = make(pool=ss.UMBC(8, 3, out_dim=4, slot_residual=True)).double()
    x = torch.randn(1, 5, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: encoder.finalize(encoder.update(encoder.update(None, x[:, :2]), x[:, 2:])), (x,))


def test_autocast_keeps_the_pool_in_float32():
    encoder = make()
    x = torch.randn(2, 50, 3)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        z = encoder(x)
    assert z.dtype == torch.float32
    torch.testing.assert_close(z, encoder(x), rtol=0.05, atol=0.05)


def test_the_prepared_queries_are_reused_along_a_stream():
    encoder = make()
    x = torch.randn(1, 6, 3)
    with torch.no_grad():
        first = encoder.update(None, x)
        second = encoder.update(first, x)
        assert second.context is first.context
        assert (first + second).context is first.context
    third = encoder.update(second, x)  # with a graph: computed anew, so that the slots get a gradient
    assert third.context is None
    encoder.finalize(third).sum().backward()
    assert encoder.pool.slots.mean.grad is not None


def test_pickle_deepcopy_and_torch_save():
    encoder = make()
    x = torch.randn(2, 5, 3)
    z = encoder(x)
    torch.testing.assert_close(copy.deepcopy(encoder)(x), z)
    torch.testing.assert_close(pickle.loads(pickle.dumps(encoder))(x), z)
    buffer = io.BytesIO()
    torch.save(encoder, buffer)
    buffer.seek(0)
    torch.testing.assert_close(torch.load(buffer, weights_only=False)(x), z)


# -- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sets", "mask", "error", "message"),
    [
        (torch.zeros(2, 5, 4), None, ShapeError, r"width 3; the 10 given elements have shape \(4,\)"),
        (torch.zeros(5), None, ShapeError, r"\(B, N, ...\).*got shape \(5,\)"),
        (torch.zeros(0, 5, 3), None, ShapeError, "batch is empty"),
        ([], None, ShapeError, "batch is empty"),
        ("text", None, ShapeError, "tensor or an array, got str"),
        ([torch.zeros(2, 3), torch.zeros(2, 4)], None, ShapeError, r"set 0 has \(3,\), set 1 has \(4,\)"),
        ([torch.zeros(2, 3), torch.tensor(1.0)], None, ShapeError, "single number"),
        ((torch.zeros(5, 3), torch.tensor([0, 2])), None, ShapeError, r"rise from 0 to len\(x\) = 5; got \[0, 2\]"),
        ((torch.zeros(5, 3), torch.tensor([0, 4, 2, 5])), None, ShapeError, "rise from 0"),
        ((torch.zeros(5, 3), torch.tensor([0])), None, ShapeError, "batch is empty"),
        ((torch.zeros(5, 3), torch.zeros(2, 3)), None, ShapeError, "ragged sets as a list"),
        ((torch.zeros(5, 3),) * 3, None, ShapeError, r"pair \(x, ptr\)"),
        (torch.zeros(2, 5, 3), torch.ones(2, 4, dtype=torch.bool), MaskError, r"\(2, 5\).*got \(2, 4\)"),
        (torch.zeros(2, 5, 3), torch.ones(2, 5), MaskError, "float32: convert it to bool"),
        ([torch.zeros(5, 3)], torch.ones(1, 5, dtype=torch.bool), MaskError, "dense layout"),
    ],
)
def test_bad_sets_are_refused(sets, mask, error, message):
    with pytest.raises(error, match=message):
        make()(sets, mask)


def test_wrong_feature_size():
    with pytest.raises(ShapeError, match=r"features \(10, 8\), the pool's in_dim; it returned \(10, 7\)"):
        make(nn.Linear(3, 7))(torch.zeros(2, 5, 3))
    with pytest.raises(ShapeError, match=r"takes features of shape \(B, N, 8\); got \(2, 5, 7\)"):
        ss.UMBC(8, 4)(torch.zeros(2, 5, 7))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_non_finite_input_is_refused_unless_switched_off(bad):
    x = torch.randn(2, 5, 3)
    x[1, 2, 0] = bad
    with pytest.raises(NonFiniteError, match="1 of 10 elements hold NaN or infinity .first: element 7"):
        make()(x)
    unchecked = make(check_finite=False)
    assert not torch.isfinite(unchecked(x)[1]).all()
    assert torch.isfinite(unchecked(x)[0]).all()


def test_large_finite_input_is_not_mistaken_for_infinity():
    encoder = make(nn.Identity(), ss.DeepSets("max"))
    assert torch.isfinite(encoder(torch.full((1, 10, 3), 3e38))).all()


def test_nan_never_leaves_silently():
    class Overflows(nn.Module):
        def forward(self, x):
            return x.repeat(1, 3)[:, :8] * float("inf")

    with pytest.raises(NonFiniteError, match="phi returned NaN or infinity for finite elements"):
        make(Overflows())(torch.ones(1, 4, 3))


@pytest.mark.parametrize("norm", [nn.BatchNorm1d(8), nn.BatchNorm1d(8, track_running_stats=False)])
def test_batch_statistics_are_refused(norm):
    encoder = make(nn.Sequential(nn.Linear(3, 8), norm)).train()
    with pytest.raises(BatchStatisticsError, match="phi.1 is a BatchNorm1d"):
        encoder(torch.randn(2, 5, 3))
    encoder.phi.eval()
    if norm.running_mean is not None:
        ss.testing.check_mini_batch_consistency(encoder, torch.randn(2, 20, 3))
    else:
        with pytest.raises(BatchStatisticsError):
            encoder(torch.randn(2, 5, 3))


def test_state_and_chunk_must_fit():
    encoder = make()
    state = encoder.update(None, torch.randn(2, 5, 3))
    with pytest.raises(ShapeError, match="state holds 2 sets, the chunk 3"):
        encoder.update(state, torch.randn(3, 5, 3))
    with pytest.raises(ShapeError, match="batch = 0"):
        encoder.empty(0)
    with pytest.raises(DeviceError, match="on meta, the encoder is on cpu"):
        encoder(torch.zeros(2, 5, 3, device="meta"))


def test_an_error_loses_nothing():
    encoder = make()
    state = encoder.update(None, torch.randn(1, 5, 3))
    before = state.to_bytes()
    with pytest.raises(NonFiniteError):
        encoder.update(state, torch.full((1, 1, 3), float("nan")))
    assert state.to_bytes() == before


# -- attention --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("activation", ["softmax", "sigmoid", "slot-softmax", "slot-exp"])
@pytest.mark.parametrize("fold", [True, False])
def test_attention_chunk_by_chunk_is_the_attention_of_the_whole(activation, fold):
    pool = ss.UMBC(8, 4, out_dim=8, heads=2, activation=activation, fold=fold, bias=False)
    encoder = make(pool=pool).double()
    x, mask = torch.randn(2, 30, 3).double(), torch.rand(2, 30) > 0.3
    state = encoder.update(None, x, mask)
    chunks = [encoder.attention(x[:, part], state, mask[:, part]) for part in (slice(0, 11), slice(11, 30))]
    weights = torch.cat(chunks, dim=-1)  # (B, H, K, N)
    assert weights.shape == (2, 2, 4, 30)
    torch.testing.assert_close(weights.sum(-1), torch.ones(2, 2, 4, dtype=torch.float64))
    assert (weights.masked_select(~mask[:, None, None].expand_as(weights)) == 0).all()
    values = pool.value(encoder.phi(x)).unflatten(-1, (2, -1)).transpose(1, 2)
    z = (weights @ values).transpose(1, 2).flatten(2)
    torch.testing.assert_close(z, encoder.finalize(state))


def test_attention_of_sums_and_of_empty_sets():
    encoder = make(pool=ss.SSE(8, 4, out_dim=8)).double()
    x = torch.randn(2, 9, 3).double()
    weights = encoder.attention(x, encoder.update(None, x))
    torch.testing.assert_close(weights.sum(2), torch.ones(2, 1, 9, dtype=torch.float64))  # over the slots
    umbc = make()
    nothing = torch.zeros(2, 9, dtype=torch.bool)
    weights = umbc.attention(x.float(), umbc.update(None, x.float(), nothing), nothing)
    assert torch.equal(weights, torch.zeros(2, 2, 4, 9))


def test_attention_needs_weights():
    encoder = make(pool=ss.DeepSets("mean"))
    x = torch.randn(1, 5, 3)
    with pytest.raises(MismatchError, match="no attention to show"):
        encoder.attention(x, encoder.update(None, x))


def test_attention_is_for_the_sets_of_its_state():
    encoder = make()
    x = torch.randn(2, 5, 3)
    state = encoder.update(None, x)
    for wrong in (x[:1], [x[0]], torch.randn(3, 5, 3)):
        with pytest.raises(ShapeError, match=r"dense chunk \(2, n, ...\)"):
            encoder.attention(wrong, state)
    assert encoder.attention(x[:, :0], state).shape == (2, 2, 4, 0)
    real = np.array([[True] * 3 + [False] * 2] * 2)
    some = encoder.update(None, x, real)
    torch.testing.assert_close(encoder.attention(x, some, real)[..., :3], encoder.attention(x[:, :3], some))
    both = make(pool=ss.Parallel(u=ss.UMBC(8, 4), m=ss.DeepSets("max")))
    assert set(both.attention(x, both.update(None, x))) == {"u"}


def test_wrong_building_blocks_are_refused():
    with pytest.raises(ConfigurationError, match="phi must be a torch.nn.Module; got function"):
        ss.SetEncoder(lambda x: x, ss.DeepSets())
    with pytest.raises(ConfigurationError, match="pool must be an ss.Pool .* got SetTransformer"):
        ss.SetEncoder(nn.Identity(), ss.nn.SetTransformer(8))
    with pytest.raises(MismatchError, match="a State is needed here"):
        make().finalize(None)
    with pytest.raises(ShapeError, match="for one set .N, width., pass x.None."):
        make()(torch.randn(6, 3))
    with pytest.raises(ShapeError, match="it returned tuple"):
        make(nn.LSTM(3, 8))(torch.randn(1, 6, 3))
    with pytest.raises(IndexError) as caught:
        make(nn.Embedding(5, 8))(torch.tensor([[7]]))
    assert "phi was reading 1 elements" in caught.value.__notes__[0]


def test_bare_pools_check_their_input():
    with pytest.raises(MaskError, match=r"bool \(2, 3\)"):
        ss.UMBC(8, 4)(torch.randn(2, 3, 8), torch.ones(1, 3, dtype=torch.bool))
    with pytest.raises(MaskError, match="got torch.float32"):
        ss.DeepSets()(torch.randn(2, 3, 8), torch.ones(2, 3))
    assert ss.DeepSets("mean")(torch.tensor([[[1], [2]]])).item() == 1.5
    x, mask = torch.randn(1, 3, 8), torch.tensor([[True, True, False]])
    x[0, 2] = float("nan")
    torch.testing.assert_close(ss.DeepSets("sum")(x, mask), x[:, :2].sum(1))
    assert torch.isfinite(ss.UMBC(8, 4)(x, mask)).all()


def test_phi_that_makes_nan_does_not_poison_a_stream():
    class Log(nn.Module):
        def forward(self, x):
            return x.log()

    encoder = make(nn.Sequential(Log(), nn.Linear(3, 8)))
    state = encoder.update(None, torch.ones(1, 2, 3))
    with pytest.raises(NonFiniteError, match="phi returned NaN"):
        encoder.update(state, torch.zeros(1, 2, 3))
    assert torch.isfinite(encoder.finalize(state)).all()


class RowsForSets(ss.DeepSets):
    """A pool whose context has a row for each set, and another value in training mode."""

    def prepare(self, state):
        return {"factor": torch.full((len(state), 1, 1), 3.0 if self.training else 2.0)}

    def accumulate(self, context, features, mask):
        return super().accumulate(context, torch.bmm(features, context["factor"].expand(-1, features.shape[-1], 1)), mask)


@torch.no_grad()
def test_a_context_is_that_of_the_batch_and_the_mode():
    encoder, x = ss.SetEncoder(torch.nn.Identity(), RowsForSets("sum", 1)).train(), torch.ones(5, 4, 1)
    for training, batch in ((True, 5), (False, 5), (False, 3), (False, 5), (True, 3)):
        encoder.train(training)
        state = encoder.update(encoder.update(None, x[:batch]), x[:batch])
        assert encoder.finalize(state).flatten().tolist() == [8.0 * (3.0 if training else 2.0)] * batch
