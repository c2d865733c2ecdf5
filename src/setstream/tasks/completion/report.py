"""The report of image completion runs: NLL by the size of the context, learning curves, and pictures of completions."""

from typing import Any

import torch
from torch import Tensor

from setstream.models.model import SetModel
from setstream.report.page import Page, pyplot
from setstream.report.runs import CONSISTENT, SEEDS, STEPS, Group, add_runs, by_label, curves_figure, mean_of, metric
from setstream.tasks.completion.field import Field
from setstream.tasks.completion.task import Completion, places

SHOWN = ("umbc+set-transformer", "umbc+anchors")  # models whose completions are shown as pictures
GALLERY = (50, 100, 200, 500, 1000)  # context sizes that are shown of a small image
LARGE = 4096  # images of at least this many pixels are shown with the same shares of their pixels
LARGEST_DEVIATION = 0.3  # in pictures; the standard deviation of a uniform distribution on [0, 1] is 0.29
PICTURES = ("context", "mean", "uncertainty")


def show(axis: Any, picture: Tensor, title: str = "", label: str = "", **options: Any) -> None:
    """An image (C, H, W) with values in [0, 1]."""
    axis.clear()
    options = {"cmap": "gray", "vmin": 0, "vmax": 1} | options
    axis.imshow(picture.clamp(0, 1).permute(1, 2, 0).squeeze(-1).numpy(), interpolation="nearest", **options)
    axis.set(xticks=[], yticks=[])
    axis.set_title(title, fontsize=7)
    axis.set_ylabel(label, fontsize=7)


def revealed(pixels: Tensor, count: int, shape: tuple[int, ...]) -> Tensor:
    """The first `count` pixels (N, 2 + C) of an image on a grey ground: (C, H, W)."""
    _, height, width = shape
    picture = torch.full(shape, 0.5)
    x, y = (pixels[:count, :2] * torch.tensor([width, height])).long().T
    picture[:, y, x] = pixels[:count, 2:].T
    return picture


def show_completion(axes: Any, pixels: Tensor, count: int, field: Field, shape: tuple[int, ...], labelled: bool) -> None:
    """One below the other: the first `count` pixels (N, 2 + C) of an image, and the mean and deviation of the prediction."""
    predicted = field.at(places(*shape[1:]).unsqueeze(0))
    mean, deviation = (values[0].T.unflatten(1, shape[1:]) for values in (predicted.mean, predicted.stddev))
    labels = PICTURES if labelled else ("", "", "")
    show(axes[0], revealed(pixels, count, shape), f"{count:,} pixels", labels[0])
    show(axes[1], mean, label=labels[1])
    show(axes[2], deviation.mean(0, keepdim=True), label=labels[2], cmap="magma", vmax=LARGEST_DEVIATION)


def shown_images(task: Completion, images: int) -> tuple[list[int], tuple[int, ...], list[int]]:
    """The numbers of some test images, evenly spaced (neighbours may show one scene), their shape, and sizes of contexts."""
    images, shape = min(images, task.tests()), tuple(task.images["test"].pixels.shape[1:])
    pixels = shape[1] * shape[2]
    sizes = [size * pixels // 1024 for size in GALLERY] if pixels >= LARGE else [size for size in GALLERY if size <= pixels]
    return [task.tests() * number // images for number in range(images)], shape, sizes


@torch.no_grad()
def gallery_figure(task: Completion, model: SetModel, images: int = 3) -> Any:
    """For some test images: context, mean, uncertainty, for growing contexts, and the truth."""
    numbers, shape, sizes = shown_images(task, images)
    grid = (3 * len(numbers), len(sizes) + 1)
    figure, axes = pyplot().subplots(*grid, figsize=(1.25 * grid[1], 1.2 * grid[0]), constrained_layout=True, squeeze=False)
    for row, number in enumerate(numbers):
        rows = axes[3 * row : 3 * row + 3]
        pixels = task.test_pixels(number, number + 1)
        for column, size in enumerate(sizes):
            show_completion(rows[:, column], pixels[0], size, task.predict(model, pixels[:, :size]), shape, column == 0)
        show(rows[0][-1], task.images["test"].pixels[number] / 255, "truth")
        for axis in rows[1:, -1]:
            axis.axis("off")
    return figure


def add_report(page: Page, runs: Group) -> None:
    """Table, learning curves and pictures of finished runs on one data set."""
    task = runs[0].task_as(Completion)
    columns = CONSISTENT | {f"NLL at {n}": metric(f"nll_{n}") for n in task.test_contexts}
    columns |= {"standard error": lambda group: f"{group[0].metrics.get('nll_error', float('nan')):.3f}"} | SEEDS | STEPS
    note = f"Nats per pixel on {task.tests():,} test images, with the context in chunks of {task.test_chunk}."
    note += " ± over seeds; the standard error is over images."
    page.section("Results")
    add_runs(page, by_label(runs), columns, note, order=mean_of(f"nll_{task.test_contexts[-1]}"))
    page.figure(curves_figure(runs, "nll", ylabel="NLL, nats per pixel"), "NLL during training")
    best = {run.config.model: run for run in sorted(runs, key=lambda run: run.metrics["nll"], reverse=True)}
    for name in [name for name in SHOWN if name in best]:
        page.section(f"Completions by {name}")
        picture = gallery_figure(best[name].task_as(Completion), best[name].model())
        page.figure(picture, f"context, mean, uncertainty and truth of test images, {name}")
