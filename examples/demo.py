"""One set, four streams, one answer: UMBC + Set Transformer beside a Set Transformer that only ever sees chunks.

    python examples/demo.py --out out/demo.png

Draws a mixture of four Gaussians and streams it four ways: point by point, class by class, in random chunks of eight, and
one point of each class at a time. After every chunk both models are asked for their answer. The models are not trained: that
the last answers agree is a law of the architecture, not something to be learned.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import torch
from torch import Tensor, nn

import setstream as ss

CLASSES = 4


def mixture(size: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """`size` points (1, size, 2) of a mixture of four Gaussians, and the class of each (size,)."""
    centres = torch.rand(CLASSES, 2, generator=generator) * 8 - 4
    labels = torch.arange(size) % CLASSES
    points = centres[labels] + 0.5 * torch.randn(size, 2, generator=generator)
    return points[None], labels


def streams(labels: Tensor, generator: torch.Generator) -> dict[str, list[Tensor]]:
    """The four ways to cut and order the set: lists of index chunks."""
    shuffled = torch.randperm(len(labels), generator=generator)
    by_class = [shuffled[labels[shuffled] == c] for c in range(CLASSES)]
    return {
        "single points": list(shuffled.split(1)),
        "class by class": by_class,
        "chunks of 8": list(torch.randperm(len(labels), generator=generator).split(8)),
        "one of each class": list(torch.stack(by_class, dim=1)),
    }


def answers(model: ss.SetModel, points: Tensor, chunks: list[Tensor]) -> Tensor:
    """The model's answer after each chunk: (chunks, outputs)."""
    stream = model.stream()
    seen = []
    for chunk in chunks:
        stream.update(points[:, chunk])
        seen.append(stream.predict().flatten())
    return torch.stack(seen)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("out/demo.png"), help="where to write the figure")
    parser.add_argument("--size", type=int, default=512, help="points in the set, a multiple of 4 (default 512)")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    if options.size < CLASSES or options.size % CLASSES:
        parser.error(f"--size must be a positive multiple of {CLASSES}; got {options.size}")
    torch.manual_seed(options.seed)
    generator = torch.Generator().manual_seed(options.seed)

    def phi() -> nn.Module:
        return nn.Sequential(nn.Linear(2, 64), nn.ReLU())

    umbc = ss.UMBC(64, num_slots=16, heads=4, slot_residual=True)
    models = {
        "UMBC + Set Transformer": ss.SetModel(ss.SetEncoder(phi(), umbc), ss.nn.SetTransformer(64, out_dim=8)),
        "Set Transformer on chunks": ss.SetModel(
            ss.SetEncoder(phi(), ss.ChunkMean(ss.nn.SetTransformer(64))), nn.Linear(64, 8)
        ),
    }
    points, labels = mixture(options.size, generator)
    roads = streams(labels, generator)

    figure, axes = plt.subplots(1, 3, figsize=(12, 3.6), constrained_layout=True)
    axes[0].scatter(*points[0].T, c=labels, s=6, cmap="tab10")
    axes[0].set(title=f"one set of {options.size} points", xticks=[], yticks=[])
    print(
        f"{options.size} points, streamed four ways. Largest difference between the four last answers, and to the whole set:\n"
    )
    for axis, (name, model) in zip(axes[1:], models.items(), strict=True):
        model.eval()
        with torch.no_grad():
            whole = model(points).flatten()
        paths = {road: answers(model, points, chunks) for road, chunks in roads.items()}
        ends = torch.stack([path[-1] for path in paths.values()])
        spread = ends.amax(0) - ends.amin(0)
        worst = int(spread.argmax())  # the output on which the four streams differ most
        for road, path in paths.items():
            progress = torch.tensor([len(chunk) for chunk in roads[road]]).cumsum(0)
            axis.plot(progress, path[:, worst], label=road, linewidth=1.2)
            axis.plot(progress[-1], path[-1, worst], "k.", markersize=6)
        scale = whole.abs().max()
        between = float(spread.max() / scale)
        apart = float((ends - whole).abs().max() / scale)
        verdict = "the same answer" if max(between, apart) < 1e-4 else "another answer each time"
        print(f"  {name:26s} {between:9.1e}  {apart:9.1e}   {verdict}")
        axis.set(title=f"{name}\nfour streams end {between:.0e} apart", xlabel="points seen", ylabel=f"output {worst}")
    axes[1].legend(fontsize=8)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(options.out, dpi=110)
    print(f"\nfigure: {options.out}")


if __name__ == "__main__":
    main()
