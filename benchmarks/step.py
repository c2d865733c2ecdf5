"""One training step of the clustering model: ours against the paper's form written plainly, in one run.

    python benchmarks/step.py

Batch 10, sets of 512 points, gradient sets of 8, UMBC with 4 slots and 4 heads, width 128, a head of three SABs, Adam. The
plain step projects every element, goes through the chunks one by one, as the algorithm of the paper does, and evaluates the
mixture's likelihood with dense inverse covariance matrices. Modes of ours are timed beside it.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn

import setstream as ss

BATCH, POINTS, GRADIENT_SET, CLUSTERS, WIDTH = 10, 512, 8, 4, 128


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


def model() -> ss.SetModel:
    torch.manual_seed(0)
    pool = ss.UMBC(WIDTH, CLUSTERS, WIDTH, WIDTH, heads=4, slots="gaussian", slot_residual=True, norm_after=True)
    return ss.SetModel(ss.SetEncoder(nn.Sequential(nn.Linear(2, WIDTH), nn.ReLU()), pool), Head())


def likelihood(parameters: tuple[Tensor, Tensor, Tensor], x: Tensor) -> Tensor:
    """Mean negative log-likelihood of x (B, N, 2) under diagonal mixtures, by products."""
    logits, means, scales = parameters
    precision = (-2 * scales).exp()
    quadratic = x.square() @ precision.mT - 2 * x @ (means * precision).mT + (means.square() * precision).sum(-1)[:, None]
    constant = logits.log_softmax(-1) - scales.sum(-1) - math.log(2 * math.pi)
    return -(constant[:, None] - 0.5 * quadratic).logsumexp(-1).mean()


def dense_likelihood(parameters: tuple[Tensor, Tensor, Tensor], x: Tensor) -> Tensor:
    """The same with dense covariance matrices, their inverses and determinants."""
    logits, means, scales = parameters
    covariance = torch.diag_embed((2 * scales).exp())  # (B, K, 2, 2)
    inverse, logdet = torch.linalg.inv(covariance), torch.logdet(covariance)
    distance = x[:, :, None] - means[:, None]  # (B, N, K, 2)
    quadratic = torch.einsum("bnki,bkij,bnkj->bnk", distance, inverse, distance)
    terms = logits.log_softmax(-1)[:, None] - 0.5 * (quadratic + logdet[:, None] + 2 * math.log(2 * math.pi))
    return -terms.logsumexp(-1).mean()


def plain_encode(encoder: ss.SetEncoder, x: Tensor) -> Tensor:
    """The paper's estimator in its direct form: all chunks one after another, one of them with a graph."""
    pool = encoder.pool
    assert isinstance(pool, ss.UMBC)
    noise = pool.slots.draw(len(x), x.device)
    q = pool.query_norm(pool.query(pool.slots(noise))).unflatten(-1, (4, -1)).transpose(1, 2)
    order = torch.randperm(POINTS)
    chunks = [x[:, part] for part in order.split(GRADIENT_SET)]

    def sums(chunk: Tensor) -> tuple[Tensor, Tensor]:
        features = encoder.phi(chunk)
        k, v = (layer(features).unflatten(-1, (4, -1)).transpose(1, 2) for layer in (pool.key, pool.value))
        weights = torch.exp(q @ k.mT / q.shape[-1] ** 0.5)
        return weights @ v, weights.sum(-1, keepdim=True)

    numerator, normaliser = sums(chunks[0])
    factor = len(chunks)
    numerator = numerator * factor - (numerator * (factor - 1)).detach()
    normaliser = normaliser * factor - (normaliser * (factor - 1)).detach()
    with torch.no_grad():
        rest = [sums(chunk) for chunk in chunks[1:]]
    numerator = numerator + sum(n for n, _ in rest)
    normaliser = normaliser + sum(c for _, c in rest)
    z = (numerator / normaliser).transpose(1, 2).flatten(2) + q.transpose(1, 2).flatten(2)
    out: Tensor = pool.norm(z)
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    x = torch.randn(BATCH, POINTS, 2) * 2

    def step(encode: Callable[[ss.SetEncoder, Tensor], Tensor], loss: Callable[..., Tensor]) -> Callable[[], None]:
        mine = model().train()
        optimizer = torch.optim.Adam(mine.parameters(), 1e-3)

        def run() -> None:
            optimizer.zero_grad()
            loss(mine.head(encode(mine.encoder, x)), x).backward()
            optimizer.step()

        return run

    def ours(gradient: str) -> Callable[[ss.SetEncoder, Tensor], Tensor]:
        return lambda encoder, x: ss.encode(encoder, x, chunk_size=GRADIENT_SET, gradient=gradient)

    contestants = {"plain, unbiased": step(plain_encode, dense_likelihood)}
    contestants |= {g: step(ours(g), likelihood) for g in ("unbiased", "importance", "full")}
    contestants["exact, chunks of 256"] = step(
        lambda encoder, x: ss.encode(encoder, x, chunk_size=256, gradient="exact"), likelihood
    )
    times: dict[str, list[float]] = {name: [] for name in contestants}
    for _ in range(options.rounds):
        for name, run in contestants.items():
            run()
            start = time.perf_counter()
            run()
            times[name].append(time.perf_counter() - start)
    median = {name: statistics.median(values) for name, values in times.items()}
    print(f"torch {torch.__version__}, {options.threads} threads, {options.rounds} rounds\n")
    print("| step | ms | against plain |\n|---|---|---|")
    for name, seconds in median.items():
        print(f"| {name} | {seconds * 1e3:.2f} | {median['plain, unbiased'] / seconds:.2f}x |")


if __name__ == "__main__":
    main()
