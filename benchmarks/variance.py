"""Noise and bias of the gradient estimators: how far is one estimate from the full gradient?

    python benchmarks/variance.py                  an untrained and a briefly trained clustering model, and a sparse bag
    python benchmarks/variance.py --steps 3000     trained as long as in the notes
    python benchmarks/variance.py --shipped umbc+passes umbc+set-transformer       trained models that come with the package

For each estimator and gradient-set size: the mean squared distance of one estimate from the full gradient, relative to the
squared norm of the full gradient, over all parameters and over those of phi alone; and the same for the mean of all draws,
which for an unbiased estimator is the noise divided by the number of draws, and for a biased one stays.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from step import likelihood, model
from torch import Tensor, nn

import setstream as ss
from setstream.tasks.clustering import DiagonalMixture, pretrained

ESTIMATORS: dict[str, dict[str, Any]] = {
    "unbiased": {"gradient": "unbiased"},
    "unbiased, 2 chunks": {"gradient": "unbiased", "grad_chunks": 2},
    "unbiased, 2, replacement": {"gradient": "unbiased", "grad_chunks": 2, "replacement": True},
    "importance": {"gradient": "importance"},
    "subset": {"gradient": "subset"},
}

CHOICES: dict[str, dict[str, Any]] = {
    "unbiased": {"gradient": "unbiased"},
    **{f"importance, floor {floor}": {"gradient": "importance", "floor": floor} for floor in (0.001, 0.01, 0.1, 0.3, 1.0)},
}


def mixtures(batch: int, points: int) -> Tensor:
    """Points (batch, points, 2) of mixtures of four Gaussians, as the released experiment draws them."""
    weights = torch.distributions.Dirichlet(torch.ones(4)).sample((batch,))
    labels = torch.multinomial(weights, points, replacement=True)
    centres, spread = torch.rand(batch, 4, 2) * 8 - 4, torch.rand(batch, 4, 2) * 0.5 + 0.1
    index = labels[..., None].expand(-1, -1, 2)
    return centres.gather(1, index) + spread.gather(1, index) * torch.randn(batch, points, 2)


def gradient(own: ss.SetModel, loss: Callable[[Tensor], Tensor], x: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    """All parameters' gradient as one vector, and phi's part of it."""
    parameters = [p for p in own.parameters() if p.requires_grad]
    phi = {id(p) for p in own.encoder.phi.parameters()}
    found = torch.autograd.grad(loss(ss.encode(own.encoder, x, **options)), parameters, allow_unused=True)
    pairs = [(p, torch.zeros_like(p) if g is None else g) for p, g in zip(parameters, found, strict=True)]
    return torch.cat([g.flatten() for _, g in pairs]), torch.cat([g.flatten() for p, g in pairs if id(p) in phi])


def noise_and_bias(estimates: Tensor, full: Tensor) -> tuple[float, float]:
    """Squared distance of estimates (draws, P) from the full gradient (P,), over its squared norm: of one, of their mean."""
    scale = full.square().sum()
    noise = (estimates - full).square().sum(1).mean() / scale
    return float(noise), float((estimates.mean(0) - full).square().sum() / scale)


def report(
    title: str,
    own: ss.SetModel,
    loss: Callable[[Tensor], Tensor],
    x: Tensor,
    sizes: list[int],
    draws: int,
    estimators: dict[str, dict[str, Any]] = ESTIMATORS,
) -> list[tuple[str, int, float, float]]:
    """Print a table; gives (estimator, elements, noise over all parameters, noise over phi's)."""
    own.eval()
    full = gradient(own, loss, x, gradient="full")
    print(f"\n{title}; {draws} draws\n")
    print("| estimator | elements | all: noise | phi: noise | all: of the mean | phi: of the mean |\n|---|---|---|---|---|---|")
    rows = []
    for size in sizes:
        for name, options in estimators.items():
            chunk = size // options.get("grad_chunks", 1)
            found = [gradient(own, loss, x, chunk_size=chunk, partition="random", **options) for _ in range(draws)]
            cells = [noise_and_bias(torch.stack([f[part] for f in found]), full[part]) for part in (0, 1)]
            (noise, bias), (phi_noise, phi_bias) = cells
            rows.append((name, size, noise, phi_noise))
            print(f"| {name} | {size} | {noise:.2g} | {phi_noise:.2g} | {bias:.2g} | {phi_bias:.2g} |", flush=True)
    return rows


def bags(count: int) -> tuple[Tensor, Tensor]:
    """Bags of 1,000 elements; in every other one a single witness, which makes the bag positive."""
    labels = (torch.arange(count) % 2).float()
    x = torch.randn(count, 1000, 16)
    x[:, 0] += 1.25 * labels[:, None]
    return x, labels[:, None, None]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=500, help="training steps before the second table (default 500)")
    parser.add_argument("--draws", type=int, default=200)
    parser.add_argument("--sizes", type=int, nargs="+", default=[8, 64], help="elements of each set that carry the gradient")
    parser.add_argument("--plot", type=Path, help="write a figure, too")
    parser.add_argument("--shipped", nargs="+", default=[], help="shipped clustering models to measure instead")
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(options.threads)
    own, x = model(), mixtures(10, 512)
    for name in options.shipped:
        shipped = pretrained(name)

        def nll(z: Tensor, head: nn.Module = shipped.head) -> Tensor:
            mixture: DiagonalMixture = head(z)
            return mixture.nll(x).mean()

        report(f"{name} as shipped, sets of 512", shipped, nll, x, options.sizes, options.draws)
    if options.shipped:
        return

    def loss(z: Tensor) -> Tensor:
        return likelihood(own.head(z), x)

    report("clustering, untrained, sets of 512", own, loss, x, options.sizes, options.draws)
    optimizer = torch.optim.Adam(own.parameters(), 1e-3, fused=True)
    own.train()
    for _ in range(options.steps):
        batch = mixtures(10, 512)
        optimizer.zero_grad()
        likelihood(own.head(own.encoder(batch)), batch).backward()
        optimizer.step()
    title = f"clustering, after {options.steps} steps, sets of 512"
    clustering = report(title, own, loss, x, options.sizes, options.draws)
    report(f"{title}: floor", own, loss, x, options.sizes[:1], options.draws, CHOICES)

    # A bag of which one element in a thousand matters: attention finds it, and so must the gradient.
    torch.manual_seed(1)
    encoder = ss.SetEncoder(nn.Sequential(nn.Linear(16, 64), nn.ReLU()), ss.UMBC(64, 1, out_dim=64))
    sparse = ss.SetModel(encoder, nn.Linear(64, 1))
    optimizer = torch.optim.Adam(sparse.parameters(), 3e-3)
    cross_entropy = nn.functional.binary_cross_entropy_with_logits
    for _ in range(400):
        examples, labels = bags(16)
        optimizer.zero_grad()
        cross_entropy(sparse.head(encoder(examples)), labels).backward()
        optimizer.step()
    examples, labels = (tensor[1::2] for tensor in bags(16))  # the positive ones
    with torch.no_grad():
        weight = float(encoder.attention(examples, encoder.update(None, examples))[:, 0, 0, 0].mean())
    title = f"eight bags of 1,000 with one witness each, which has {weight:.2f} of the attention"

    def bag_loss(z: Tensor) -> Tensor:
        return cross_entropy(sparse.head(z), labels)

    bag_rows = report(title, sparse, bag_loss, examples, options.sizes, options.draws)
    report(f"{title}: floor", sparse, bag_loss, examples, options.sizes[:1], options.draws, CHOICES)
    if options.plot:
        plot({"clustering, all parameters": clustering, "sparse bag, phi's parameters": bag_rows}, options.plot)


def plot(tables: dict[str, list[tuple[str, int, float, float]]], path: Path) -> None:
    """Noise against gradient-set size, an axis for each table: of all parameters in the first, of phi's in the second."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, len(tables), figsize=(9, 3.6), constrained_layout=True)
    for column, (axis, (title, rows)) in enumerate(zip(axes, tables.items(), strict=True)):
        for name in ESTIMATORS:
            points = [(size, (noise, phi)[column]) for own, size, noise, phi in rows if own == name]
            axis.loglog(*zip(*points, strict=True), "o-", label=name)
        axis.set(xlabel="elements that carry the gradient", title=title)
    axes[0].set_ylabel("relative squared error of one estimate")
    axes[0].legend(fontsize=7)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    main()
