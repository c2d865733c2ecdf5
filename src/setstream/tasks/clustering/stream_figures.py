"""One set in four streams: what models say at the end of each, and on the way, as points arrive."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from setstream.models.model import SetModel
from setstream.report.animation import animate
from setstream.report.page import Page
from setstream.report.plotting import pyplot
from setstream.tasks.clustering.mixtures import DiagonalMixture, Sample, sample
from setstream.tasks.clustering.streams import STREAMS, disagreement, predictions, stream_ends, stream_order

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def draw_mixture(axis: Any, points: Tensor, mixture: DiagonalMixture | None, title: str, seen: Tensor | None = None) -> None:
    """Points, and the ellipses of two standard deviations of a mixture."""
    from matplotlib.patches import Ellipse

    axis.clear()
    axis.scatter(*points.T, s=2, c="0.75", linewidths=0)
    if seen is not None and len(seen):
        axis.scatter(*points[seen].T, s=3, c="tab:blue", linewidths=0)
    if mixture is not None:
        weights = mixture.logits[0].softmax(-1)
        for weight, mean, scale in zip(weights.tolist(), mixture.means[0].tolist(), mixture.scales[0].tolist(), strict=True):
            alpha = 0.25 + 0.75 * min(1.0, 2 * weight)
            ellipse = Ellipse(mean[:2], 4 * scale[0], 4 * scale[1], fill=False, edgecolor="tab:red", linewidth=1.5, alpha=alpha)
            axis.add_patch(ellipse)
    axis.set(xlim=(-6, 6), ylim=(-6, 6), xticks=[], yticks=[], aspect="equal")
    axis.set_title(title, fontsize=8)


def streams_figure(models: dict[str, SetModel], drawn: Sample) -> Figure:
    """A row for each model, a column for each stream: what it says at the end."""
    plt = pyplot()
    figure, axes = plt.subplots(
        len(models), len(STREAMS), figsize=(2.3 * len(STREAMS), 2.6 * len(models)), constrained_layout=True, squeeze=False
    )
    for row, (name, model) in zip(axes, models.items(), strict=True):
        ends = stream_ends(model, drawn.points[0], drawn.labels[0])
        for axis, (kind, end) in zip(row, ends.items(), strict=True):
            nll = float(end.nll(drawn.points))
            draw_mixture(axis, drawn.points[0], end, f"{kind} stream, NLL {nll:.2f}")
        row[0].set_ylabel(name, fontsize=9)
    return figure


def streams_gif(models: dict[str, SetModel], drawn: Sample, frames: int = 24) -> bytes:
    """The same, as it happens: points arrive and the ellipses follow."""
    plt = pyplot()
    figure, axes = plt.subplots(len(models), len(STREAMS), figsize=(9, 2.45 * len(models)), squeeze=False)
    figure.subplots_adjust(0.04, 0.02, 0.99, 0.94, 0.05, 0.15)
    roads = {kind: stream_order(kind, drawn.labels[0], torch.Generator().manual_seed(0)) for kind in STREAMS}
    said = {(name, kind): list(predictions(models[name], drawn.points[0], roads[kind])) for name in models for kind in STREAMS}

    def draw(frame: int) -> None:
        for row, name in zip(axes, models, strict=True):
            for axis, kind in zip(row, STREAMS, strict=True):
                turn = max(0, round((frame + 1) / frames * len(roads[kind])) - 1)
                seen = torch.cat(roads[kind][: turn + 1])
                draw_mixture(axis, drawn.points[0], said[name, kind][turn], f"{kind} stream", seen)
            row[0].set_ylabel(name, fontsize=9)

    found = animate(figure, draw, frames)
    plt.close(figure)
    return found


def add_streams(page: Page, models: dict[str, SetModel], seed: int = 3, points: int = 512) -> tuple[Figure, bytes]:
    """The four streams as a figure and an animation."""
    drawn = sample(1, points, generator=torch.Generator().manual_seed(seed))
    figure, gif = streams_figure(models, drawn), streams_gif(models, drawn)
    page.section("Four streams of one set")
    rows = []
    for name, model in models.items():
        ends = stream_ends(model, drawn.points[0], drawn.labels[0])
        nlls = [f"{float(end.nll(drawn.points)):.3f}" for end in ends.values()]
        rows.append([name, *nlls, f"{disagreement(ends, drawn.points):.1e}"])
    oracle = float(drawn.oracle())
    page.table(["model", *(f"{kind} stream" for kind in STREAMS), "disagreement"], rows, f"NLL; the oracle has {oracle:.3f}.")
    page.figure(figure, "what each model says at the end of each stream")
    page.picture(gif, "gif", "the same, as points arrive")
    return figure, gif
