"""Encoders and sets for the property tests: every pool, activation, head count, slot kind, dtype, mask and ragged shape."""

import torch
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

import setstream as ss
from setstream.pools import ACTIVATIONS

ELEMENT = 3
WIDTH = 8
SOFTPLUS = ss.Activation("softplus", F.softplus)
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)

activations = st.sampled_from([*ACTIVATIONS, SOFTPLUS])


@st.composite
def umbcs(draw, in_dim=WIDTH):
    activation = draw(activations)
    # A sum of unbounded exponentials may overflow, and rightly so: the others are at most one.
    free = activation in ("sigmoid", "slot-softmax", "slot-sigmoid", "slot-exp")
    return ss.UMBC(
        in_dim,
        num_slots=draw(st.integers(1, 5)),
        slot_dim=draw(st.sampled_from([4, 8])),
        out_dim=draw(st.sampled_from([8, 16])),
        heads=draw(st.sampled_from([1, 2, 4])),
        activation=activation,
        slots=draw(st.sampled_from(["learned", "gaussian", "shared-gaussian"])),
        normalise=draw(st.sampled_from([None, True, False] if free else [None, True])),
        eval_slots=draw(st.sampled_from(["mean", "fixed"])),
        slot_norm=draw(st.booleans()),
        slot_residual=draw(st.booleans()),
        norm_after=draw(st.booleans()),
        bias=draw(st.booleans()),
        fold=draw(st.sampled_from([None, True, False])),
    )


@st.composite
def sses(draw, in_dim=WIDTH):
    options = {
        "slot_dim": draw(st.sampled_from([4, 8])),
        "heads": draw(st.sampled_from([1, 2])),
        "normalise": draw(st.sampled_from([None, True])),
        "pool": draw(st.sampled_from([None, "mean", "sum", "max", "min"])),
    }
    if draw(st.booleans()):
        return ss.SSE(in_dim, draw(st.integers(1, 4)), **options)
    return ss.HierarchicalSSE(in_dim, draw(st.sampled_from([(4, 2), (5, 3, 1)])), **options)


deepsets = st.sampled_from(["mean", "sum", "max", "min"]).map(ss.DeepSets)
moments = st.builds(ss.Moments, extrema=st.booleans())
removable_pools = st.one_of(
    umbcs(), sses(), st.sampled_from(["mean", "sum"]).map(ss.DeepSets), st.just(False).map(lambda no: ss.Moments(extrema=no))
)
projected = st.one_of(deepsets, umbcs(in_dim=4)).map(lambda pool: ss.Projected(nn.Linear(WIDTH, 4), pool))
single_pools = st.one_of(umbcs(), sses(), deepsets, moments, projected)


@st.composite
def gated_attentions(draw, in_dim=WIDTH):
    return ss.GatedAttention(in_dim, hidden=4, branches=draw(st.integers(1, 3)), gated=draw(st.booleans()))


@st.composite
def multi_passes(draw):
    """Two or three passes: any first pool with slots, then UMBC with what a module makes of them."""
    number = draw(st.integers(2, 3))
    pools = [draw(umbcs())]
    for _ in range(number - 1):
        options = {"heads": draw(st.sampled_from([1, 2])), "slot_residual": draw(st.booleans())}
        slots = draw(st.sampled_from(["given", "learned"]))
        activation = draw(activations)
        pools.append(ss.UMBC(WIDTH, pools[0].num_slots, 8, 8, activation=activation, normalise=True, slots=slots, **options))
    between = [nn.Linear(pool.out_dim, 8) for pool in pools[:-1]]
    return ss.MultiPass(pools, between, norm=draw(st.booleans()))


single_pools = st.one_of(single_pools, gated_attentions())
one_pass = st.one_of(
    single_pools, st.tuples(umbcs(), single_pools).map(lambda pair: ss.Parallel(first=pair[0], second=pair[1]))
)
pools = st.one_of(one_pass, multi_passes())


@st.composite
def encoders(draw, pools=pools, dtypes=DTYPES):
    """An encoder with random weights; its logits are small or large."""
    torch.manual_seed(draw(st.integers(0, 2**31)))
    pool = draw(pools)
    phi = nn.Sequential(nn.Linear(ELEMENT, WIDTH), draw(st.sampled_from([nn.ReLU(), nn.Tanh(), nn.Identity()])))
    with torch.no_grad():
        phi[0].weight.mul_(draw(st.sampled_from([1.0, 1.0, 10.0])))
    return ss.SetEncoder(phi, pool).to(draw(st.sampled_from(dtypes))).eval()


@st.composite
def ragged_sets(draw, longest=40):
    """Up to four sets of 0 to `longest` elements: a list of float32 tensors."""
    lengths = draw(st.lists(st.integers(0, longest), min_size=1, max_size=4))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    return [torch.randn(length, ELEMENT, generator=generator) for length in lengths]


def pad(sets, fill=float("nan")):
    """Dense layout of ragged sets with rubbish under the mask, in random places."""
    size = max(len(x) for x in sets) + 2
    x = sets[0].new_full((len(sets), size, *sets[0].shape[1:]), fill)
    mask = torch.zeros(len(sets), size, dtype=torch.bool)
    for row, elements in enumerate(sets):
        mask[row, torch.randperm(size)[: len(elements)]] = True
        x[row, mask[row]] = elements
    return x, mask


def queries(pool, state):
    """Q (B or 1, K, d) of a UMBC, from its modules and the draw in the state."""
    draw = state.accumulators.get("draw")
    return pool.query_norm(pool.query(pool.slots(None if draw is None else draw["noise"])))
