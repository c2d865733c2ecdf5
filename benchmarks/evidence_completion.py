"""The evidence for docs/results/completion.md, from finished runs: paired differences, gradients, chunk sizes, memory, and
completions while pixels stream in.

python benchmarks/evidence.py completion runs/completion --out evidence.html --figures figures
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from benchmarks.evidence_common import kept_bytes
from torch import Tensor

from setstream.gradients.encode import encode
from setstream.models.model import SetModel
from setstream.pools.base import AVERAGE
from setstream.report.page import Page, animate, pyplot
from setstream.report.runs import FinishedRun, by_label
from setstream.tasks.completion.field import Field
from setstream.tasks.completion.task import SHOWN, Completion, places
from setstream.training.config import TrainConfig

if TYPE_CHECKING:
    from matplotlib.figure import Figure

UMBC = "umbc+set-transformer"
GALLERY = (50, 100, 200, 500, 1000)  # context sizes that are shown of a small image
LARGE = 4096  # images of at least this many pixels are shown with the same shares of their pixels
LARGEST_DEVIATION = 0.3  # in pictures; the standard deviation of a uniform distribution on [0, 1] is 0.29
PICTURES = ("context", "mean", "uncertainty")
#: How each gradient is drawn.
LINES = {"full": "-", "exact": "-", "unbiased": "--", "importance": "-.", "subset": ":"}


@dataclass(frozen=True)
class Tested:
    """Runs that differ in their seed only, and the NLL of each test image at each size of context: (contexts, images)."""

    runs: list[FinishedRun]
    task: Completion
    losses: Tensor

    @classmethod
    def test(cls, runs: list[FinishedRun]) -> Tested:
        """Test all runs, and average over the seeds."""
        task = runs[0].task_as(Completion)
        models = [run.model() for run in runs]
        rows = [torch.stack([task.losses(model, n) for model in models]).mean(0) for n in task.test_contexts]
        return cls(runs, task, torch.stack(rows))

    @property
    def config(self) -> TrainConfig:
        """The options that the runs share."""
        return self.runs[0].config

    def test_set(self) -> tuple[object, ...]:
        """The options that determine the test images and contexts."""
        task = self.task
        return task.data, task.folder, task.side, task.tests(), task.test_contexts, task.test_chunk, task.test_seed


def mean_and_error(losses: Tensor) -> tuple[list[float], list[float]]:
    """The mean of each row (contexts, images), and its standard error over the images."""
    return losses.mean(1).tolist(), (losses.std(1) / losses.shape[1] ** 0.5).tolist()


def add_differences(page: Page, tested: dict[str, Tested], reference: str) -> None:
    """Paired differences to the reference, with 95% intervals over the images, for runs with the same test images."""
    rows = []
    for label, other in tested.items():
        if label != reference and other.test_set() == tested[reference].test_set():
            means, errors = mean_and_error(other.losses - tested[reference].losses)
            rows.append([label, *(f"{mean:+.3f} ± {1.96 * error:.3f}" for mean, error in zip(means, errors, strict=True))])
    if rows:
        task = tested[reference].task
        page.table(
            ["model (gradient)", *(f"at {n}" for n in task.test_contexts)],
            rows,
            f"NLL minus that of {reference} on the same images and contexts; ± 1.96 standard errors over {task.tests():,} "
            "images. The variation between training seeds is not included.",
        )


def add_chunk_sizes(page: Page, tested: dict[str, Tested], images: int = 100) -> None:
    """The NLL of the largest context by the size of the chunks."""
    task = next(iter(tested.values())).task
    largest, tests = max(task.test_contexts), min(images, task.tests())
    sizes = sorted({1, 10, task.test_chunk, largest})
    rows = []
    for label, kind in tested.items():
        model = kind.runs[0].model()
        losses = torch.stack([kind.task.losses(model, largest, tests, chunk=size).double() for size in sizes])
        difference = float((losses - losses[-1]).abs().max())
        rows.append([label, *(f"{nll:.4f}" for nll in losses.mean(1).tolist()), f"{difference:.1e}"])
    columns = ["model (gradient)", *(f"chunks of {size}" for size in sizes), "largest difference for an image"]
    page.table(columns, rows, f"NLL of {tests} images with a context of {largest} pixels, by the size of its chunks.")


def contexts_figure(tested: dict[str, Tested]) -> Figure:
    """NLL against the size of the context, a line per kind of run."""
    figure, axis = pyplot().subplots(figsize=(7, 4.5), constrained_layout=True)
    for label, kind in tested.items():
        means, errors = mean_and_error(kind.losses)
        style = LINES[kind.config.gradient] + "o"
        axis.errorbar(kind.task.test_contexts, means, errors, fmt=style, markersize=3, capsize=2, label=label)
    axis.set(xlabel="pixels in the context", ylabel="NLL, nats per pixel")
    figure.legend(fontsize=7, loc="outside lower center", ncols=2)
    return figure


def log_scale(axis: Any) -> None:
    """Make the x or y axis (axes.xaxis, axes.yaxis) logarithmic, with plain numbers at 1, 2 and 5 times a power of ten."""
    from matplotlib.ticker import LogLocator, NullLocator

    getattr(axis.axes, f"set_{axis.axis_name}scale")("log")
    axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter("{x:,.10g}")


def kept_kilobytes(model: SetModel, context: Tensor, chunk: int) -> float:
    """What a training step keeps of the encoder: one chunk where the model is consistent, otherwise the whole context."""
    gradient = "unbiased" if model.encoder.pool.consistent else "full"
    model.train()
    kept = kept_bytes(lambda: encode(model.encoder, context, chunk_size=chunk, gradient=gradient), model.parameters())
    model.eval()
    return kept / 1024


def memory_figure(tested: dict[str, Tested]) -> Figure:
    """Memory against the size of the context; and NLL against memory, with larger markers for larger contexts."""
    figure, (growth, price) = pyplot().subplots(1, 2, figsize=(11, 4.5), constrained_layout=True)
    for label, kind in tested.items():
        model, pixels, sizes = kind.runs[0].model(), kind.task.test_pixels(0, 1), kind.task.test_contexts
        memory = [kept_kilobytes(model, pixels[:, :size], kind.task.test_chunk) for size in sizes]
        marker, style = ("o", "-") if model.encoder.pool.consistent else ("s", ":")
        color = growth.plot(sizes, memory, marker + style, markersize=4, label=label)[0].get_color()
        nll, _ = mean_and_error(kind.losses)
        price.plot(memory, nll, style, color=color, linewidth=0.8)
        price.scatter(memory, nll, [size / 4 for size in sizes], color=color, marker=marker, alpha=0.7)
    kilobytes = "kB kept by the encoder for one image in training"
    growth.set(xlabel="pixels in the context", ylabel=kilobytes)
    price.set(xlabel=kilobytes, ylabel="NLL, nats per pixel")
    log_scale(growth.yaxis)
    log_scale(price.xaxis)
    figure.legend(*growth.get_legend_handles_labels(), fontsize=7, loc="outside lower center", ncols=3)
    return figure


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
    images, shape = min(images, task.tests()), tuple(task.images["test"].shape[1:])
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
        show(rows[0][-1], task.images["test"][number] / 255, "truth")
        for axis in rows[1:, -1]:
            axis.axis("off")
    return figure


@torch.no_grad()
def progress_gif(task: Completion, model: SetModel, images: int = 4, frames: int = 20) -> bytes:
    """The completion of some test images while their pixels stream in; no pixel is read twice."""
    numbers, shape, sizes = shown_images(task, images)
    pixels = [task.test_pixels(number, number + 1) for number in numbers]
    figure, axes = pyplot().subplots(3, len(numbers), figsize=(1.6 * len(numbers), 4.9), squeeze=False)
    figure.subplots_adjust(0.04, 0.02, 0.99, 0.95, 0.05, 0.05)
    ends = [0, *(max(1, round(sizes[-1] ** ((frame + 1) / frames))) for frame in range(frames))]
    streams = [model.stream(chunks=AVERAGE) for _ in numbers]

    def draw(frame: int) -> None:
        for column, (stream, image) in enumerate(zip(streams, pixels, strict=True)):
            if ends[frame + 1] > ends[frame]:
                stream.update(image[:, ends[frame] : ends[frame + 1]])
            show_completion(axes[:, column], image[0], ends[frame + 1], stream.predict(), shape, column == 0)

    return animate(figure, draw, frames, colors=96)


def best_of_each_model(tested: dict[str, Tested]) -> dict[str, Tested]:
    """Where a model was built with several options, those with the lowest NLL."""
    best: dict[str, str] = {}
    for label, kind in sorted(tested.items(), key=lambda item: float(item[1].losses.mean())):
        best.setdefault(kind.config.model, label)
    return {label: kind for label, kind in tested.items() if label in best.values()}


def add_evidence(page: Page, runs: list[FinishedRun]) -> None:
    """All models with the gradient of the paper's main figure: unbiased where a model is consistent, otherwise subset."""
    tested = {label: Tested.test(group) for label, group in by_label(runs).items()}
    as_paper = {
        label: kind
        for label, kind in tested.items()
        if kind.config.gradient == ("unbiased" if kind.runs[0].model().encoder.pool.consistent else "subset")
    }
    main = best_of_each_model(as_paper)
    if main:
        page.figure(contexts_figure(main), "NLL by the size of the context")
        if len(main) < len(as_paper):
            page.text("Of a model built with several options, the one with the lowest NLL on these test images is shown.")
        for reference in [label for label, kind in main.items() if kind.config.model == UMBC]:
            add_differences(page, main, reference)
        page.figure(memory_figure(main), "memory by the size of the context, and NLL by memory")
        add_chunk_sizes(page, main)
    for model, options in ((kind.config.model, kind.config.model_options) for kind in main.values()):
        same_model = {label: kind for label, kind in tested.items() if kind.config.model == model}
        same = {label: kind for label, kind in same_model.items() if kind.config.model_options == options}
        if len(same) > 1:
            page.section(f"Gradients of {model}")
            page.figure(contexts_figure(same), f"NLL by the size of the context, {model}")
            for full in [label for label, kind in same.items() if kind.config.gradient == "full"][:1]:
                add_differences(page, same, full)
    for name in SHOWN:
        best = min((run for run in runs if run.config.model == name), key=lambda run: run.metrics["nll"], default=None)
        if best is not None:
            page.section(f"Completions by {name}")
            task, trained = best.task_as(Completion), best.model()
            page.figure(gallery_figure(task, trained), f"context, mean, uncertainty and truth of test images, {name}")
            page.picture(progress_gif(task, trained), "gif", f"completion while pixels stream in, {name}")
