"""Random sequences of adding, decaying and removing, on every pool, against a float64 recomputation from the raw elements.

A sequence is one set of a batch: at each step it gains a chunk, decays, or loses a chunk that it gained before, cut anew.
Values are heavy-tailed (up to 10^8) where attention does not look, and logits reach several hundred. After all steps each set's
sums must be those of its elements with their weights, within the promised tolerance, unless the removal was refused. Errors
are relative to the sums of the elements' norms: where large elements that are still there cancel, no float32 knows better.
"""

import copy

import pytest
import torch
from torch import nn

import setstream as ss
from setstream.errors import ConfigurationError, PrecisionError, RemovalError
from setstream.pools import ACTIVATIONS
from setstream.pools.base import named_tensors
from setstream.states.accumulators import REMOVAL_TOLERANCE, LogSums
from tests.laws.strategies import SOFTPLUS, queries

WIDTH, STEPS, LONGEST = 6, 8, 3

POOLS = {
    **{f"umbc-{name}": lambda name=name: ss.UMBC(WIDTH, 3, heads=2, activation=name, fold=True) for name in ACTIVATIONS},
    "umbc-direct": lambda: ss.UMBC(WIDTH, 3, heads=2, fold=False),
    "umbc-softplus": lambda: ss.UMBC(WIDTH, 3, activation=SOFTPLUS),
    "sse": lambda: ss.SSE(WIDTH, 3),
    "hierarchical": lambda: ss.HierarchicalSSE(WIDTH, (3, 2)),
    "mean": lambda: ss.DeepSets("mean"),
    "sum": lambda: ss.DeepSets("sum"),
    "max": lambda: ss.DeepSets("max"),
    "min": lambda: ss.DeepSets("min"),
    "projected": lambda: ss.Projected(nn.Linear(WIDTH, 2), ss.DeepSets("mean")),
    "parallel": lambda: ss.Parallel(bag=ss.UMBC(WIDTH, 3), total=ss.DeepSets("sum")),
    "parallel-max": lambda: ss.Parallel(bag=ss.UMBC(WIDTH, 3), most=ss.DeepSets("max")),
    "chunk-mean": lambda: ss.ChunkMean(First(WIDTH, 4)),
}


class First(nn.Linear):
    """A linear layer on the first element of a chunk: a set function that needs its whole chunk."""

    def forward(self, x, mask=None):
        return super().forward(x[:, 0])


def make(name):
    """An encoder whose last feature is for the values only: queries do not look at it."""
    torch.manual_seed(3)
    phi = nn.Linear(WIDTH, WIDTH)
    pool = POOLS[name]()
    with torch.no_grad():
        phi.weight[-1, :-1] = phi.weight[:-1, -1] = 0.0
        for module in pool.modules():
            if isinstance(module, ss.UMBC):
                module.key.weight.mul_(4.0)[:, -1] = 0.0
                module.value.weight.copy_(torch.eye(WIDTH))  # the direct form pools projected features
    return ss.SetEncoder(phi, pool).eval()


def elements(sets, generator):
    """(B, n, WIDTH), n in 1 to LONGEST: ordinary, of large logits, or of very large values."""
    x = torch.randn(sets, LONGEST, WIDTH, generator=generator)
    kind = torch.rand(sets, LONGEST, generator=generator)
    size = torch.rand(sets, LONGEST, generator=generator)
    x[..., :-1] *= torch.where(kind < 0.15, 10 ** (1.5 * size), 1.0).unsqueeze(-1)
    x[..., -1] *= torch.where(kind > 0.75, 10 ** (8 * size), 1.0)
    lengths = torch.randint(1, LONGEST + 1, (sets,), generator=generator)
    return x, torch.arange(LONGEST) < lengths[:, None]


def by_head(pool, rows):
    """(B, n, d) to (B, H, n, d/H)."""
    return rows.unflatten(-1, (pool.heads, -1)).transpose(1, 2)


def reference(pool, features, weights):
    """By part name: the mean or sum of float64 features (B, M, D) with weights (B, M), and that of their norms."""
    if isinstance(pool, ss.Parallel):
        return {f"{name}/{key}": z for name, own in pool.pools.items() for key, z in reference(own, features, weights).items()}
    if isinstance(pool, ss.Projected):
        return reference(pool.pool, pool.module(features), weights)
    if isinstance(pool, ss.HierarchicalSSE):
        return reference(pool.first, features, weights)
    if isinstance(pool, ss.DeepSets):
        if pool.pool in ("max", "min"):
            absent = float("-inf") if pool.pool == "max" else float("inf")
            rows = torch.where(weights.unsqueeze(-1) > 0, features, absent)
            extreme = rows.amax(1) if pool.pool == "max" else rows.amin(1)
            return {"pooled": (extreme, extreme.norm(dim=-1))}
        mass = weights.sum(1, keepdim=True) if pool.pool == "mean" else weights.new_ones(())
        rows, norms = (
            (weights.unsqueeze(-1) * values).sum(1) / mass for values in (features, features.norm(dim=-1, keepdim=True))
        )
        return {"pooled": (rows, norms.squeeze(-1))}
    with torch.no_grad():
        scaled = queries(pool, pool.empty(1, torch.device("cpu"))) * (pool.out_dim // pool.heads) ** -0.5
        values = features[:, None] if pool.folded else by_head(pool, nn.functional.linear(features, pool.value.weight))
        logits = pool.activation.weigh(by_head(pool, scaled) @ by_head(pool, pool.key(features)).mT)
        logits = (logits if pool.activation.log else logits.log()) + weights.log()[:, None, None]
        shift = logits.amax(-1, keepdim=True) if pool.activation.normalise else logits.new_zeros(())
        a = (logits - shift).exp()
        mass = a.sum(-1, keepdim=True) if pool.activation.normalise else a.new_ones(())
        rows, norms = (a @ own / mass for own in (values, values.norm(dim=-1, keepdim=True)))
        return {"pooled": (rows, norms.squeeze(-1))}


def pooled(pool, parts):
    """What a state's sums stand for, by part name."""
    if isinstance(pool, ss.Parallel):
        members = {n: {k.removeprefix(n + "/"): p for k, p in parts.items() if k.startswith(n + "/")} for n in pool.pools}
        return {f"{n}/{key}": z for n, own in members.items() for key, z in pooled(pool.pools[n], own).items()}
    if isinstance(pool, ss.Projected):
        return pooled(pool.pool, parts)
    part = parts["pooled"]
    if not isinstance(part, LogSums):
        return {"pooled": part["value"].double()}
    layer = pool.first if isinstance(pool, ss.HierarchicalSSE) else pool
    plain = (
        layer.pool == "sum" if isinstance(layer, ss.DeepSets) else isinstance(layer, ss.UMBC) and not layer.activation.normalise
    )
    return {"pooled": part.true_sums()[0] if plain else part.mean()}


def remove_each(encoder, state, part):
    """The state without the part, but for the sets where that is refused; and which these are."""
    refused = torch.zeros(len(state), dtype=torch.bool)
    for _ in range(3):  # a Parallel names its members one after another
        try:
            return state - part, refused
        except PrecisionError as error:
            refused[error.sets] = True
            nothing = torch.where(refused, len(state), torch.arange(len(state)))
            part = ss.State.cat([part, encoder.empty(1)])[nothing]
    raise AssertionError("a set that loses nothing is refused")


@torch.no_grad()
def run(name, sets, seed):
    """The worst relative error of `sets` sequences, how many removals there were, and how many were refused."""
    generator = torch.Generator().manual_seed(seed)
    encoder = make(name)
    exact = copy.deepcopy(encoder).double()
    chunks, weights = [], torch.zeros(sets, 0, dtype=torch.float64)
    state = encoder.empty(sets)
    removals = refused = 0
    can_lose = True
    chunked = None if encoder.pool.consistent else "average"
    for step in range(STEPS):
        x, mask = elements(sets, generator)
        gains = torch.rand(sets, generator=generator) < (1.0 if step < 2 else 0.5)
        state = encoder.update(state, x, mask & gains[:, None], chunks=chunked)
        chunks.append((x, mask))
        weights = torch.cat([weights, gains.double()[:, None]], 1)
        if not can_lose or step < 1:
            continue
        choice = torch.rand(sets, generator=generator)
        factor = torch.where(choice < 0.3, torch.rand(sets, generator=generator, dtype=torch.float64) * 0.98 + 0.01, 1.0)
        factor = torch.where(choice < 0.03, 1e-30, factor)
        try:
            state = state * factor
        except ConfigurationError:
            can_lose = False
            with pytest.raises(RemovalError):
                state - state
            continue
        weights = weights * factor[:, None]
        if name == "chunk-mean":
            with pytest.raises(RemovalError):
                state - state
            continue
        rows = torch.arange(sets)
        chosen = (weights > 0).double().add(1e-9).multinomial(1, generator=generator)[:, 0]
        loses = (torch.rand(sets, generator=generator) < 0.5) & (weights[rows, chosen] > 0)
        x = torch.stack([x for x, _ in chunks], 1)[rows, chosen]
        mask = torch.stack([mask for _, mask in chunks], 1)[rows, chosen] & loses[:, None]
        part = encoder.update(None, x.flip(1), mask.flip(1))  # in another order, or element by element
        if step % 2:
            part = sum(encoder.update(None, x[:, [i]], mask[:, [i]]) for i in range(LONGEST))
        part = part * torch.where(loses, weights[rows, chosen], 1.0)
        state, bad = remove_each(encoder, state, part)
        done = loses & ~bad
        weights[rows[done], chosen[done]] = 0.0
        removals, refused = removals + int(loses.sum()), refused + int(bad.sum())
    if isinstance(encoder.pool, ss.ChunkMean):
        encoded = torch.stack([exact.pool.module(exact.phi(x.double())) for x, _ in chunks], 1)
        wanted = reference(ss.DeepSets("mean"), encoded, weights)
    else:
        mask = torch.cat([mask for _, mask in chunks], 1)
        by_element = weights.repeat_interleave(LONGEST, 1) * mask
        wanted = reference(exact.pool, exact.phi(torch.cat([x for x, _ in chunks], 1).double()), by_element)
    left = weights.sum(1) > 0
    assert torch.equal(state.count > 0, left)
    worst = 0.0
    for key, value in pooled(encoder.pool, state.accumulators).items():
        rows, scale = (own[left] for own in wanted[key])
        error = torch.linalg.vector_norm(value[left] - rows, dim=-1)
        worst = max(worst, float((error / scale.clamp(min=1e-300)).max()))
    for _, z in named_tensors(encoder.finalize(state, chunks=chunked)):
        assert z.isfinite().all()
    return worst, removals, refused


@pytest.mark.parametrize("sets", [1000, pytest.param(100_000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", POOLS)
def test_sequences_are_right_or_refused(name, sets):
    worst = removals = refused = 0
    for seed, size in enumerate([min(sets, 5000)] * max(1, sets // 5000)):
        error, tried, not_done = run(name, size, seed)
        worst, removals, refused = max(worst, error), removals + tried, refused + not_done
    print(f"{name}: {sets} sequences, {removals} removals, {refused} refused, worst relative error {worst:.1e}")
    assert worst <= REMOVAL_TOLERANCE
    if removals:
        assert 0 < refused < removals / 2  # it does refuse, and does not refuse everything
