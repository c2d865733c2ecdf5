"""One training step of the clustering model: setstream against the paper's form written plainly, in one run.

    python benchmarks/step.py
    python benchmarks/step.py --points 512 4096 16384
    python benchmarks/step.py --layers 3

Batch 10, gradient sets of 8, UMBC with 4 slots and 4 heads, width 128, a head of three SABs, Adam. The plain step draws a
random order, gives the first 8 elements a graph and encodes the rest at once, as the released experiments do. It projects
every element, writes attention as softmax(QKᵀ)V, evaluates the mixture's likelihood with dense inverse covariance matrices and
takes torch's default Adam. With --chunks, the plain step that goes through all chunks one by one, as the algorithm is printed,
is timed, too. Modes of setstream are timed beside it, and two bounds: the same unbiased step by hand, with all of the library's
savings and without its generality (one layout, one pool, equal sets, no checks), and a step without any encoder: what head,
likelihood and Adam take.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections.abc import Callable
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor, nn

import setstream as ss
from setstream.training import keep_freed_memory

STEPS_A_TURN = 8
BATCH, GRADIENT_SET, CLUSTERS, WIDTH = 10, 8, 4, 128


Encode = Callable[[ss.SetEncoder, Tensor], Tensor]
HeadCall = Callable[..., tuple[Tensor, Tensor, Tensor]]


class Head(nn.Module):
    """Three SABs and a linear layer to the parameters of a mixture: logits, means and log standard deviations."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(ss.nn.SAB(WIDTH) for _ in range(3)))
        self.out = nn.Linear(WIDTH, 5)

    def forward(self, z: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Mixture parameters, one component a slot."""
        logits, means, scales = self.out(self.blocks(z)).split([1, 2, 2], dim=-1)
        return logits.squeeze(-1), means, scales


def model(layers: int = 1) -> ss.SetModel:
    """The clustering model, with a phi of some layers."""
    torch.manual_seed(0)
    widths = [2, *[WIDTH] * layers]
    phi = [module for pair in pairwise(widths) for module in (nn.Linear(*pair), nn.ReLU())]
    pool = ss.UMBC(WIDTH, CLUSTERS, WIDTH, WIDTH, heads=4, slots="gaussian", slot_residual=True, norm_after=True)
    return ss.SetModel(ss.SetEncoder(nn.Sequential(*phi), pool), Head())


def likelihood(parameters: tuple[Tensor, Tensor, Tensor], x: Tensor) -> Tensor:
    """Mean negative log-likelihood of x (B, N, 2) under diagonal mixtures: one product with [x², x, 1]."""
    logits, means, scales = parameters
    precision = (-2 * scales).exp()
    weighted = means * precision
    constant = logits.log_softmax(-1) - scales.sum(-1) - math.log(2 * math.pi) - 0.5 * (means * weighted).sum(-1)
    coefficients = torch.cat([-0.5 * precision, weighted, constant.unsqueeze(-1)], -1)  # (B, K, 5)
    powers = torch.cat([x.square(), x, torch.ones_like(x[..., :1])], -1)  # (B, N, 5)
    return -torch.bmm(coefficients, powers.mT).logsumexp(1).mean()


def plain_head(head: Head, z: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The same head, its attention written out."""
    for block in head.blocks:
        assert isinstance(block, ss.nn.SAB)
        attention = block.block.attention
        q, k, v = (
            layer(z).unflatten(-1, (attention.heads, -1)).transpose(1, 2).contiguous()
            for layer in (attention.query, attention.key, attention.value)
        )
        weights = torch.softmax(q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1]), dim=-1)
        h = z + attention.out((weights @ v).transpose(1, 2).flatten(2))
        z = h + block.block.feed_forward(h)
    logits, means, scales = head.out(z).split([1, 2, 2], dim=-1)
    return logits.squeeze(-1), means, scales


def dense_likelihood(parameters: tuple[Tensor, Tensor, Tensor], x: Tensor) -> Tensor:
    """The same with dense covariance matrices, their inverses and determinants."""
    logits, means, scales = parameters
    covariance = torch.diag_embed((2 * scales).exp())  # (B, K, 2, 2)
    inverse, logdet = torch.linalg.inv(covariance), torch.logdet(covariance)
    distance = x[:, :, None] - means[:, None]  # (B, N, K, 2)
    quadratic = torch.einsum("bnki,bkij,bnkj->bnk", distance, inverse, distance)
    terms = logits.log_softmax(-1)[:, None] - 0.5 * (quadratic + logdet[:, None] + 2 * math.log(2 * math.pi))
    return -terms.logsumexp(-1).mean()


def plain_encode(encoder: ss.SetEncoder, x: Tensor, one_by_one: bool = False) -> Tensor:
    """The paper's estimator in its direct form: one chunk with a graph, the others at once, or one after another, without."""
    pool = encoder.pool
    assert isinstance(pool, ss.UMBC)
    noise = pool.slots.draw(len(x), x.device)
    q = pool.query_norm(pool.query(pool.slots(noise))).unflatten(-1, (4, -1)).transpose(1, 2)
    order = torch.randperm(x.shape[1])
    factor = x.shape[1] / GRADIENT_SET
    rest = [x.shape[1] - GRADIENT_SET]
    chunks = [x[:, part] for part in (order.split(GRADIENT_SET) if one_by_one else order.split([GRADIENT_SET, *rest]))]

    def sums(chunk: Tensor) -> tuple[Tensor, Tensor]:
        features = encoder.phi(chunk)
        k, v = (layer(features).unflatten(-1, (4, -1)).transpose(1, 2) for layer in (pool.key, pool.value))
        weights = torch.exp(q @ k.mT / q.shape[-1] ** 0.5)
        return weights @ v, weights.sum(-1, keepdim=True)

    numerator, normaliser = sums(chunks[0])
    numerator = numerator * factor - (numerator * (factor - 1)).detach()
    normaliser = normaliser * factor - (normaliser * (factor - 1)).detach()
    with torch.no_grad():
        others = [sums(chunk) for chunk in chunks[1:]]
    numerator = numerator + sum(n for n, _ in others)
    normaliser = normaliser + sum(c for _, c in others)
    z = (numerator / normaliser).transpose(1, 2).flatten(2) + q.transpose(1, 2).flatten(2)
    out: Tensor = pool.norm(z)
    return out


def bare_encode(encoder: ss.SetEncoder, x: Tensor) -> Tensor:
    """Our way to the unbiased gradient, by hand: folded queries, all elements at once, the drawn ones again with a graph."""
    pool = encoder.pool
    assert isinstance(pool, ss.UMBC)
    slots = pool.query_norm(pool.query(pool.slots(pool.slots.draw(len(x), x.device))))
    q = slots.unflatten(-1, (4, -1)).transpose(1, 2) * (WIDTH // 4) ** -0.5
    q = (q @ pool.key.weight.view(4, -1, WIDTH)).flatten(1, 2)  # (B, 16, 128)

    def sums(elements: Tensor, queries: Tensor, shift: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        features = encoder.phi(elements)
        logits = torch.bmm(queries, features.mT)
        shift = logits.amax(-1, keepdim=True) if shift is None else shift
        weights = (logits - shift).exp()
        return torch.bmm(weights, features), weights.sum(-1, keepdim=True), shift

    with torch.no_grad():
        all_values, all_weights, shift = sums(x, q, None)
    drawn = torch.randint(x.shape[1], (BATCH, GRADIENT_SET, 1)).expand(-1, -1, 2)
    values, weights, _ = sums(x.gather(1, drawn), q, shift)
    factor = x.shape[1] // GRADIENT_SET
    pooled = (all_values + factor * (values - values.detach())) / (all_weights + factor * (weights - weights.detach()))
    by_head = pooled.unflatten(1, (4, -1)) @ pool.value.weight.view(4, -1, WIDTH).mT
    out: Tensor = pool.norm(by_head.transpose(1, 2).flatten(2) + pool.value.bias + slots)
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--layers", type=int, default=1, help="layers of phi (default 1)")
    parser.add_argument("--points", type=int, nargs="+", default=[512], help="elements per set (default 512)")
    parser.add_argument("--chunks", action="store_true", help="also time the plain step that reads the chunks one by one")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    keep_freed_memory()
    print(f"torch {torch.__version__}, {options.threads} threads, {options.rounds} rounds at {options.points[0]} points")
    for points in options.points:
        rounds = max(3, options.rounds * options.points[0] // points)
        print(f"\n{points} points per set\n\n| step | ms | against plain |\n|---|---|---|")
        median = measure(points, rounds, options.layers, options.chunks)
        for name, seconds in median.items():
            print(f"| {name} | {seconds * 1e3:.2f} | {median['plain, unbiased'] / seconds:.2f}x |", flush=True)


def measure(points: int, rounds: int, layers: int, chunks: bool) -> dict[str, float]:
    """Median seconds of each step."""
    x = torch.randn(BATCH, points, 2) * 2

    def step(encode: Encode, loss: Callable[..., Tensor], head: HeadCall, fused: bool) -> Callable[[], None]:
        mine = model(layers).train()
        optimizer = torch.optim.Adam(mine.parameters(), 1e-3, fused=fused)

        def run() -> None:
            optimizer.zero_grad()
            loss(head(mine.head, encode(mine.encoder, x)), x).backward()
            optimizer.step()

        return run

    def library(gradient: str, chunk_size: int = GRADIENT_SET) -> Callable[[], None]:
        def encode(encoder: ss.SetEncoder, x: Tensor) -> Tensor:
            z: Tensor = ss.encode(encoder, x, chunk_size=chunk_size, gradient=gradient)
            return z

        return step(encode, likelihood, lambda head, z: head(z), fused=True)

    contestants = {"plain, unbiased": step(plain_encode, dense_likelihood, plain_head, fused=False)}
    if chunks:
        one_by_one = partial(plain_encode, one_by_one=True)
        contestants["plain, unbiased, chunk by chunk"] = step(one_by_one, dense_likelihood, plain_head, fused=False)
    contestants |= {gradient: library(gradient) for gradient in ("unbiased", "importance", "full")}
    contestants["exact, chunks of 256"] = library("exact", 256)
    contestants["unbiased, by hand"] = step(bare_encode, likelihood, lambda head, z: head(z), fused=True)
    contestants["no encoder"] = step(
        lambda encoder, x: x.new_zeros(BATCH, CLUSTERS, WIDTH), likelihood, lambda head, z: head(z), fused=True
    )
    times: dict[str, list[float]] = {name: [] for name in contestants}
    for _ in range(rounds):
        for name, run in contestants.items():
            run()  # not timed: it pays for the caches of the contestant before
            for _ in range(STEPS_A_TURN if points < 4096 else 2):
                start = time.perf_counter()
                run()
                times[name].append(time.perf_counter() - start)
    return {name: statistics.median(values) for name, values in times.items()}


if __name__ == "__main__":
    main()
