"""The laws, over every pool, activation, head count, slot kind, dtype, mask and ragged shape."""

import copy
import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import setstream as ss
from setstream import testing
from setstream.errors import LawViolation
from setstream.pools.base import named_tensors
from setstream.testing import laws
from tests.laws.strategies import ELEMENT, WIDTH, encoders, pad, queries, ragged_sets, removable_pools, umbcs


@given(encoders(), ragged_sets(), st.integers(0, 2**31))
def test_any_partition_gives_the_same_answer(encoder, sets, seed):
    testing.check_mini_batch_consistency(encoder, sets, seed=seed, trials=2)


@given(encoders(), ragged_sets(), st.integers(0, 2**31))
def test_any_order_gives_the_same_answer(encoder, sets, seed):
    testing.check_permutation_invariance(encoder, sets, seed=seed, trials=2)


@given(encoders(), ragged_sets(), st.integers(0, 2**31))
def test_states_merge(encoder, sets, seed):
    testing.check_merge(encoder, sets, seed=seed, trials=1)


@given(encoders(pools=umbcs()), ragged_sets(), st.integers(0, 2**31))
def test_slots_are_equivariant(encoder, sets, seed):
    testing.check_slot_equivariance(encoder, sets, seed=seed, trials=1)


@given(encoders(dtypes=(torch.float32,)), ragged_sets())
def test_the_three_layouts_agree(encoder, sets):
    ptr = torch.tensor([0, *np.cumsum([len(x) for x in sets])])
    x, mask = pad(sets)
    with torch.no_grad():
        expected = dict(named_tensors(encoder.double()([s.double() for s in sets])))
    encoder.float()
    for layout in (encoder(sets), encoder((torch.cat(sets), ptr)), encoder(x, mask), encoder([s.numpy() for s in sets])):
        for name, z in named_tensors(layout):
            torch.testing.assert_close(z.double(), expected[name], rtol=1e-4, atol=1e-4 * float(expected[name].abs().max()))


@given(encoders(pools=removable_pools, dtypes=(torch.float32, torch.float64)), ragged_sets(), ragged_sets())
def test_removal_undoes_merging(encoder, sets, others):
    others = (others * 4)[: len(sets)]
    state = encoder.update(None, sets)
    part = encoder.update(None, others)
    try:
        rest = (state + part) - part
    except ss.errors.PrecisionError:
        # Only when the removed elements outweighed the rest by far: then refusing is right.
        pooled, removed = state.accumulators["pooled"], part.accumulators["pooled"]
        share = pooled["normaliser"].log() + pooled["shift"] - (removed["normaliser"].log() + removed["shift"])
        assert share.min() < np.log(2e-3)
        return
    assert torch.equal(rest.count, state.count)
    expected, z, both = (encoder.finalize(s).detach() for s in (state, rest, state + part))
    scale = max(float(expected.abs().max()), float(both.abs().max()), 1e-30)
    assert float((z - expected).abs().max()) <= 2e-3 * scale


@given(encoders(pools=umbcs()), ragged_sets())
def test_an_empty_set_gives_zeros_and_never_nan(encoder, sets):
    pool = encoder.pool
    state = encoder.update(None, [sets[0][:0], *sets])
    empty = encoder.finalize(state)[0]
    with torch.no_grad():
        residual = queries(pool, state)[0].to(empty.dtype) if pool.slot_residual else torch.zeros_like(empty)
        torch.testing.assert_close(empty, pool.norm(residual), rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("activation", ["softmax", "sigmoid", "slot-softmax", "slot-sigmoid", "slot-exp"])
def test_folded_equals_direct(activation):
    torch.manual_seed(1)
    folded = ss.UMBC(12, 5, 7, 16, 4, activation=activation, fold=True, norm_after=True, slot_residual=True).double()
    direct = ss.UMBC(12, 5, 7, 16, 4, activation=activation, fold=False, norm_after=True, slot_residual=True).double()
    direct.load_state_dict(folded.state_dict())
    x, mask = torch.randn(3, 40, 12, dtype=torch.float64), torch.rand(3, 40) > 0.3
    torch.testing.assert_close(folded(x, mask), direct(x, mask), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("activation", ["softmax", "sigmoid", "slot-softmax", "slot-sigmoid", "slot-exp"])
@pytest.mark.parametrize("normalise", [True, False])
def test_umbc_is_the_formula_of_the_paper(activation, normalise):
    """The definition, written out with all elements projected and no trick at all."""
    pool = ss.UMBC(6, 5, 4, 8, 2, activation=activation, normalise=normalise).double()
    x = torch.randn(2, 9, 6, dtype=torch.float64)
    q = pool.query_norm(pool.query(pool.slots.mean))
    outputs = []
    for head in range(2):
        rows = slice(head * 4, head * 4 + 4)
        logits = q[:, rows] @ pool.key(x)[..., rows].mT / 2.0  # (B, K, N)
        weights = {
            "softmax": logits.exp(),
            "sigmoid": logits.sigmoid(),
            "slot-softmax": logits.softmax(1),
            "slot-sigmoid": logits.sigmoid() / logits.sigmoid().sum(1, keepdim=True),
            "slot-exp": (logits - logits.amax(1, keepdim=True)).exp(),
        }[activation]
        if normalise:
            weights = weights / weights.sum(-1, keepdim=True)
        outputs.append(weights @ pool.value(x)[..., rows])
    torch.testing.assert_close(pool(x), torch.cat(outputs, -1), rtol=1e-10, atol=1e-12)


def test_zero_slots_with_softmax_are_mean_pooling():
    pool = ss.UMBC(8, num_slots=3, out_dim=8, heads=2).double()
    nn.init.zeros_(pool.slots.mean)
    x, mask = torch.randn(2, 30, 8, dtype=torch.float64), torch.rand(2, 30) > 0.5
    mean = ss.DeepSets("mean")(pool.value(x), mask)
    torch.testing.assert_close(pool(x, mask), mean[:, None].expand(-1, 3, -1))


@pytest.mark.parametrize("pooling", [None, "mean", "sum", "max", "min"])
def test_sse_is_its_composition(pooling):
    sse = ss.SSE(8, 4, pool=pooling).eval()
    umbc = ss.UMBC(8, 4, activation="slot-sigmoid", slots="shared-gaussian", eval_slots="fixed").eval()
    umbc.load_state_dict(sse.first.state_dict())
    x = torch.randn(2, 20, 8)
    z = umbc(x)
    reduced = {None: z, "mean": z.mean(1), "sum": z.sum(1), "max": z.amax(1), "min": z.amin(1)}[pooling]
    torch.testing.assert_close(sse(x), reduced)


def test_hierarchical_sse_is_its_composition():
    pool = ss.HierarchicalSSE(8, (6, 3)).eval()
    x = torch.randn(2, 20, 8)
    torch.testing.assert_close(pool(x), pool.layers[1](pool.layers[0](x)))


@pytest.mark.parametrize("activation", ["softmax", "sigmoid", "slot-softmax", "slot-sigmoid", "slot-exp"])
@pytest.mark.parametrize("size", [1e4, -1e4])
@pytest.mark.parametrize("fold", [True, False])
def test_logits_of_ten_thousand(activation, size, fold):
    """Nothing overflows, nothing becomes NaN, gradients stay finite, and the answer is the float64 one."""
    pool = ss.UMBC(4, 3, out_dim=4, activation=activation, fold=fold)
    with torch.no_grad():
        pool.key.weight.mul_(abs(size))
    x = torch.randn(2, 50, 4) * (1 if size > 0 else -1)
    encoder = ss.SetEncoder(nn.Identity(), pool).eval()
    z = encoder(x)
    assert torch.isfinite(z).all()
    expected = copy.deepcopy(pool).double()(x.double()).detach()
    # Logits of 1e4 carry a rounding error of about 1e-3 in float32, which is a relative error of the weights.
    assert float((z.detach() - expected).abs().max()) < 2e-2 * float(expected.abs().max())
    streamed = encoder.finalize(sum(encoder.update(None, chunk) for chunk in x.split(7, dim=1)))
    assert float((streamed.detach() - expected).abs().max()) < 2e-2 * float(expected.abs().max())
    z.sum().backward()
    assert all(torch.isfinite(p.grad).all() for p in pool.parameters())


@pytest.mark.parametrize(
    "pool", [ss.UMBC(8, 4, heads=2), ss.DeepSets("mean"), ss.DeepSets("max"), ss.SSE(8, 4)], ids=["umbc", "mean", "max", "sse"]
)
@torch.no_grad()
def test_a_million_elements(pool):
    encoder = ss.SetEncoder(nn.Identity(), pool)
    torch.manual_seed(2)
    x = torch.randn(1, 1_000_000, 8) + 0.1
    subject = laws.Subject(encoder, x, None)
    state = None
    for chunk in x.split(4096, dim=1):
        state = subject.encoder.update(state, chunk)
    subject.judge("consistency", "chunks of 4096", subject.encoder.finalize(state))
    # Ten thousand single elements on top of the rest: where naive float32 accumulation loses digits.
    state = subject.encoder.update(None, x[:, 10_000:])
    for element in x[:, :10_000].unbind(1):
        state = subject.encoder.update(state, element[:, None])
    subject.judge("consistency", "10^4 single elements", subject.encoder.finalize(state))


def test_chunk_mean_breaks_the_law_and_the_check_says_so():
    encoder = ss.SetEncoder(nn.Linear(ELEMENT, WIDTH), ss.ChunkMean(ss.nn.SetTransformer(WIDTH)))
    with pytest.raises(LawViolation, match=r"mini-batch consistency is broken: with .* is off by .* in one piece .*"):
        testing.check_mini_batch_consistency(encoder, torch.randn(2, 40, ELEMENT))


def test_checks_catch_what_is_wrong():
    class Positional(nn.Module):
        def forward(self, x):
            return x * torch.arange(len(x))[:, None]

    class Forgetful(ss.DeepSets):
        def finalize(self, state):
            return super().finalize(state) / state.count[:, None].clamp(min=1)

    class Greedy(ss.UMBC):
        def finalize(self, state):
            return super().finalize(state) * torch.arange(1.0, self.num_slots + 1)[:, None]

    x = torch.randn(2, 20, 4)
    with pytest.raises(LawViolation, match="permutation invariance is broken"):
        testing.check_permutation_invariance(ss.SetEncoder(Positional(), ss.DeepSets("sum")), x)
    with pytest.raises(LawViolation, match="slot equivariance is broken"):
        testing.check_slot_equivariance(ss.SetEncoder(nn.Identity(), Greedy(4, 3)), x)
    testing.check_merge(ss.SetEncoder(nn.Identity(), Forgetful("sum")), x)  # consistent, if unusual
    with pytest.raises(LawViolation, match="merge is broken"):
        testing.check_merge(ss.SetEncoder(Positional(), ss.DeepSets("sum")), x)


def test_a_state_travels_to_another_process(tmp_path):
    """Saved here, merged there, and the answer is the same."""
    torch.manual_seed(3)
    encoder = ss.SetEncoder(nn.Linear(3, 8), ss.UMBC(8, 4, heads=2)).eval()
    x = torch.randn(2, 60, 3)
    torch.save(encoder.state_dict(), tmp_path / "weights.pt")
    torch.save(x, tmp_path / "x.pt")
    encoder.update(None, x[:, :20]).save(tmp_path / "part.safetensors")
    script = """
import sys, torch, setstream as ss
from torch import nn
folder = sys.argv[1]
encoder = ss.SetEncoder(nn.Linear(3, 8), ss.UMBC(8, 4, heads=2)).eval()
encoder.load_state_dict(torch.load(folder + "/weights.pt"))
x = torch.load(folder + "/x.pt")
state = ss.State.load(folder + "/part.safetensors") + encoder.update(None, x[:, 20:])
torch.save(encoder.finalize(state), folder + "/z.pt")
state.save(folder + "/whole.safetensors")
"""
    subprocess.run([sys.executable, "-c", script, str(tmp_path)], check=True, timeout=120)
    there = torch.load(tmp_path / "z.pt")
    state = encoder.update(encoder.update(None, x[:, :20]), x[:, 20:])
    torch.testing.assert_close(there, encoder.finalize(state), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(encoder.finalize(ss.State.load(tmp_path / "whole.safetensors")), there)


@given(encoders(pools=umbcs(), dtypes=(torch.float32,)), st.integers(0, 2**31))
def test_training_draws_are_shared_by_all_chunks_of_a_pass(encoder, seed):
    """In training mode, too, any partition gives one answer, as long as the draw is one."""
    encoder.train()
    x = torch.randn(3, 24, ELEMENT, generator=torch.Generator().manual_seed(seed))
    start = encoder.empty(3, generator=torch.Generator().manual_seed(seed))
    whole = encoder.finalize(encoder.update(start, x))
    streamed = start
    for chunk in x.split(5, dim=1):
        streamed = encoder.update(streamed, chunk)
    merged = encoder.update(start, x[:, 10:]) + encoder.update(start, x[:, :10])
    scale = float(whole.detach().abs().max())
    for state in (streamed, merged):
        assert float((encoder.finalize(state) - whole).detach().abs().max()) <= 2e-4 * scale
