"""The evidence of the image completion experiment: NLL and memory against the size of the context, and pictures."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from setstream.encode import encode
from setstream.model import SetModel
from setstream.report.animation import animate
from setstream.report.costs import kept_bytes
from setstream.report.page import Page
from setstream.report.plotting import LINES, pyplot
from setstream.report.runs import FinishedRun, by_label, mean_and_spread
from setstream.tasks.completion.task import Completion, places

if TYPE_CHECKING:
    from matplotlib.figure import Figure

UMBC = "umbc+set-transformer"
GALLERY = (50, 100, 200, 500, 1000)  # pixels of a small image
LARGE = 4096  # from here on, the same shares of all pixels


def as_the_paper_trains(run: FinishedRun) -> bool:
    """Whether a model learned by the gradient that the paper's main figure gives it: unbiased where it is consistent."""
    return run.config.gradient == ("unbiased" if run.model().encoder.pool.consistent else "subset")


# -- numbers ----------------------------------------------------------------------------------------------------------


def curve(group: list[FinishedRun]) -> tuple[list[int], list[float], list[float]]:
    """Context sizes, mean NLL over seeds and images, and its standard error over images."""
    task = group[0].task(Completion)
    losses = [torch.stack([task.losses(run.model(), n) for run in group]).mean(0) for n in task.test_contexts]
    return task.test_contexts, [float(own.mean()) for own in losses], [float(own.std() / len(own) ** 0.5) for own in losses]


def results_table(page: Page, runs: list[FinishedRun]) -> None:
    """NLL by context of every kind of run."""
    sizes = runs[0].task(Completion).test_contexts
    rows = []
    for label, group in by_label(runs).items():
        cells = [mean_and_spread([run.metrics[f"nll_{n}"] for run in group]) for n in sizes]
        error = f"{group[0].metrics.get('nll_error', float('nan')):.3f}"
        consistent = "yes" if group[0].model().encoder.pool.consistent else "no"
        rows.append([label, consistent, *cells, error, str(len(group)), f"{group[0].config.steps:,}"])
    rows.sort(key=lambda row: float(row[1 + len(sizes)].split()[0]))
    columns = ["model (gradient)", "MBC", *(f"NLL at {n}" for n in sizes), "standard error", "seeds", "steps"]
    task = runs[0].task(Completion)
    tests = f"Nats a pixel on {task.tests():,} test images, context in chunks of {task.test_chunk}"
    page.table(columns, rows, f"{tests}. ± over seeds; the error is over images.")


def contexts_figure(runs: list[FinishedRun]) -> Figure:
    """NLL against the size of the context, a line for each kind of run."""
    plt = pyplot()
    figure, axis = plt.subplots(figsize=(7, 4.5), constrained_layout=True)
    for label, group in by_label(runs).items():
        sizes, nll, error = curve(group)
        axis.errorbar(sizes, nll, error, fmt=LINES[group[0].config.gradient] + "o", markersize=3, capsize=2, label=label)
    axis.set(xlabel="pixels in the context", ylabel="NLL, nats a pixel")
    axis.legend(fontsize=7)
    return figure


def kept_kilobytes(model: SetModel, context: Tensor, chunk: int) -> float:
    """What a training step keeps of the encoder: one chunk's worth where the model is consistent, all where it is not."""
    gradient = "unbiased" if model.encoder.pool.consistent else "full"
    model.train()
    kept = kept_bytes(lambda: encode(model.encoder, context, chunk_size=chunk, gradient=gradient))
    model.eval()
    return kept / 1024


def memory_figure(runs: list[FinishedRun]) -> Figure:
    """NLL against memory; larger markers are larger contexts."""
    plt = pyplot()
    figure, axis = plt.subplots(figsize=(7, 4.5), constrained_layout=True)
    for label, group in by_label(runs).items():
        sizes, nll, _ = curve(group)
        task, model = group[0].task(Completion), group[0].model()
        pixels = task.test_pixels(0, 1)
        memory = [kept_kilobytes(model, pixels[:, :size], task.test_chunk) for size in sizes]
        line = axis.plot(memory, nll, linewidth=0.8)[0]
        axis.scatter(memory, nll, [size / 4 for size in sizes], color=line.get_color(), label=label, alpha=0.7)
    axis.set(xscale="log", xlabel="kB kept by the encoder for one image in training", ylabel="NLL, nats a pixel")
    axis.legend(fontsize=7)
    return figure


# -- pictures ---------------------------------------------------------------------------------------------------------


def show(axis: Any, picture: Tensor, title: str = "") -> None:
    """An image (C, H, W) in [0, 1]."""
    axis.clear()
    axis.imshow(picture.clamp(0, 1).permute(1, 2, 0).squeeze(-1).numpy(), cmap="gray", vmin=0, vmax=1, interpolation="nearest")
    axis.set(xticks=[], yticks=[])
    axis.set_title(title, fontsize=7)


def revealed(pixels: Tensor, count: int, shape: tuple[int, ...]) -> Tensor:
    """The first `count` pixels (N, 2 + C) of an image on a grey ground: (C, H, W)."""
    _, height, width = shape
    picture = torch.full(shape, 0.5)
    x, y = (pixels[:count, :2] * torch.tensor([width, height])).long().T
    picture[:, y, x] = pixels[:count, 2:].T
    return picture


@torch.no_grad()
def completed(task: Completion, model: SetModel, context: Tensor, shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation (C, H, W) of the whole image after a context (N, 2 + C)."""
    _, height, width = shape
    said = task.predict(model, context.unsqueeze(0)).at(places(height, width).unsqueeze(0))
    mean, deviation = (values[0].T.unflatten(1, (height, width)) for values in (said.mean, said.stddev))
    return mean, deviation


def context_sizes(pixels: int) -> list[int]:
    """How many pixels are shown of an image that has so many.

    >>> context_sizes(28 * 28), context_sizes(256 * 256)
    ([50, 100, 200, 500], [3200, 6400, 12800, 32000, 64000])
    """
    return [size * pixels // 1024 for size in GALLERY] if pixels >= LARGE else [size for size in GALLERY if size <= pixels]


def gallery_figure(task: Completion, model: SetModel, images: int = 3) -> Figure:
    """For some test images: context, mean, uncertainty, for growing contexts, and the truth."""
    plt = pyplot()
    shape = tuple(task.images["test"].pixels.shape[1:])
    images, sizes = min(images, task.tests()), context_sizes(shape[1] * shape[2])
    figure, axes = plt.subplots(
        3 * images, len(sizes) + 1, figsize=(1.25 * (len(sizes) + 1), 3.9 * images), constrained_layout=True, squeeze=False
    )
    pixels = task.test_pixels(0, images)
    for number in range(images):
        rows = axes[3 * number : 3 * number + 3]
        for column, size in enumerate(sizes):
            mean, deviation = completed(task, model, pixels[number, :size], shape)
            show(rows[0][column], revealed(pixels[number], size, shape), f"{size} pixels")
            show(rows[1][column], mean, "mean")
            show(rows[2][column], deviation.mean(0, keepdim=True) * 3, "uncertainty")
        show(rows[0][-1], task.images["test"].pixels[number] / 255, "truth")
        for row in rows[1:]:
            row[-1].axis("off")
    return figure


def progress_gif(task: Completion, model: SetModel, images: int = 4, frames: int = 20) -> bytes:
    """Pixels stream in, and the completion follows: one state an image, no pixel read twice."""
    plt = pyplot()
    shape = tuple(task.images["test"].pixels.shape[1:])
    images = min(images, task.tests())
    pixels = task.test_pixels(0, images)
    figure, axes = plt.subplots(3, images, figsize=(1.6 * images, 4.9), squeeze=False)
    figure.subplots_adjust(0.02, 0.02, 0.98, 0.94, 0.05, 0.18)
    total = context_sizes(pixels.shape[1])[-1]
    ends = [0, *(max(1, round(total ** ((frame + 1) / frames))) for frame in range(frames))]
    streams = [model.stream() for _ in range(images)]
    grid = places(*shape[1:]).unsqueeze(0)

    def draw(frame: int) -> None:
        for number, stream in enumerate(streams):
            if ends[frame + 1] > ends[frame]:
                stream.update(pixels[number : number + 1, ends[frame] : ends[frame + 1]])
            said = stream.predict().at(grid)
            show(axes[0][number], revealed(pixels[number], ends[frame + 1], shape), f"{ends[frame + 1]} pixels")
            show(axes[1][number], said.mean[0].T.unflatten(1, shape[1:]), "mean")
            show(axes[2][number], said.stddev[0].mean(1, keepdim=True).T.unflatten(1, shape[1:]) * 3, "uncertainty")

    with torch.no_grad():
        found = animate(figure, draw, frames, colors=96)
    plt.close(figure)
    return found


def add_evidence(page: Page, runs: list[FinishedRun]) -> None:
    """Everything that the paper shows of this experiment, and the pictures, from finished runs of one data set."""
    page.section("Results")
    results_table(page, runs)
    main = [run for run in runs if as_the_paper_trains(run)]
    if main:
        page.figure(contexts_figure(main), "NLL by the size of the context")
        page.figure(memory_figure(main), "NLL by memory; larger markers are larger contexts")
    for model in ("deepsets", "sse", UMBC):
        own = [run for run in runs if run.config.model == model and not run.config.model_options]
        if len({run.config.gradient for run in own}) > 1:
            page.section(f"Gradients of {model}")
            page.figure(contexts_figure(own), "full, unbiased and subset gradients")
    best = sorted((run for run in runs if run.config.model == UMBC), key=lambda run: run.metrics["nll"])
    if best:
        page.section("Completions")
        page.figure(
            gallery_figure(best[0].task(Completion), best[0].model()), "context, mean, uncertainty and truth of test images"
        )
        page.picture(progress_gif(best[0].task(Completion), best[0].model()), "gif", "pixels stream in")
