"""The evidence of the image completion experiment: NLL and memory against the size of the context, and pictures."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from setstream.gradients.encode import encode
from setstream.models.model import SetModel
from setstream.pools.base import AVERAGE
from setstream.report.animation import animate
from setstream.report.costs import kept_bytes
from setstream.report.page import Page
from setstream.report.plotting import LINES, log_scale, pyplot
from setstream.report.runs import FinishedRun, by_label, mean_and_spread
from setstream.tasks.completion.task import Completion, places
from setstream.training.config import TrainConfig

if TYPE_CHECKING:
    from matplotlib.figure import Figure

UMBC = "umbc+set-transformer"
SHOWN = (UMBC, "umbc+anchors")  # whose completions are shown as pictures
GALLERY = (50, 100, 200, 500, 1000)  # pixels of a small image
LARGE = 4096  # from here on, the same shares of all pixels
LARGEST_SHOWN = 0.3  # deviation: that of colours between 0 and 1 that are equally likely


def as_the_paper_trains(run: FinishedRun) -> bool:
    """Whether a model learned by the gradient that the paper's main figure gives it: unbiased where it is consistent."""
    return run.config.gradient == ("unbiased" if run.model().encoder.pool.consistent else "subset")


# -- numbers ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Tested:
    """Runs that differ in their seed only, and the NLL of each test image at each size of context: (contexts, images)."""

    runs: list[FinishedRun]
    task: Completion
    losses: Tensor

    @classmethod
    def test(cls, runs: list[FinishedRun]) -> Tested:
        """The mean over the seeds."""
        task = runs[0].task(Completion)
        models = [run.model() for run in runs]
        rows = [torch.stack([task.losses(model, n) for model in models]).mean(0) for n in task.test_contexts]
        return cls(runs, task, torch.stack(rows))

    @property
    def config(self) -> TrainConfig:
        """What the runs have in common."""
        return self.runs[0].config

    def tests(self) -> tuple[object, ...]:
        """What they were tested on."""
        task = self.task
        return task.data, task.folder, task.side, task.tests(), task.test_contexts, task.test_chunk, task.test_seed

    def means(self) -> tuple[list[float], list[float]]:
        """Mean NLL at each size of context, and its standard error over the images."""
        return mean_and_error(self.losses)


def mean_and_error(losses: Tensor) -> tuple[list[float], list[float]]:
    """Of rows of images: the means, and their standard errors."""
    return losses.mean(1).tolist(), (losses.std(1) / losses.shape[1] ** 0.5).tolist()


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


def differences_table(page: Page, tested: dict[str, Tested], reference: str) -> None:
    """By how much each is worse than the reference, image by image, with 95% intervals over the images.

    Those that were tested on other images or contexts cannot be compared so, and are left out.
    """
    rows = []
    for label, own in tested.items():
        if label != reference and own.tests() == tested[reference].tests():
            means, errors = mean_and_error(own.losses - tested[reference].losses)
            rows.append([label, *(f"{mean:+.3f} ± {1.96 * error:.3f}" for mean, error in zip(means, errors, strict=True))])
    if not rows:
        return
    task = tested[reference].task
    page.table(
        ["model (gradient)", *(f"at {n}" for n in task.test_contexts)],
        rows,
        f"NLL beyond that of {reference} on the same images with the same contexts; ± 1.96 standard errors over "
        f"{task.tests():,} images. What another seed of the training would change is not in it.",
    )


def chunks_table(page: Page, tested: dict[str, Tested], images: int = 100) -> None:
    """Whether the size of the chunks changes the NLL of the largest context."""
    rows = []
    first = next(iter(tested.values())).task
    largest, tests = max(first.test_contexts), min(images, first.tests())
    sizes = sorted({1, 10, first.test_chunk, largest})
    for label, own in tested.items():
        task, model = own.task, own.runs[0].model()
        found = [task.losses(model, largest, tests, chunk=size).double() for size in sizes]
        apart = max(float((losses - found[-1]).abs().max()) for losses in found)
        rows.append([label, *(f"{float(losses.mean()):.4f}" for losses in found), f"{apart:.1e}"])
    page.table(
        ["model (gradient)", *(f"chunks of {size}" for size in sizes), "largest difference of an image"],
        rows,
        f"NLL of {tests} images after {largest} pixels, by the size of the chunks in which they came.",
    )


def contexts_figure(tested: dict[str, Tested]) -> Figure:
    """NLL against the size of the context, a line for each kind of run."""
    plt = pyplot()
    figure, axis = plt.subplots(figsize=(7, 4.5), constrained_layout=True)
    for label, own in tested.items():
        form = LINES[own.config.gradient] + "o"
        axis.errorbar(own.task.test_contexts, *own.means(), fmt=form, markersize=3, capsize=2, label=label)
    axis.set(xlabel="pixels in the context", ylabel="NLL, nats a pixel")
    figure.legend(fontsize=7, loc="outside lower center", ncols=2)
    return figure


def kept_kilobytes(model: SetModel, context: Tensor, chunk: int) -> float:
    """What a training step keeps of the encoder: one chunk's worth where the model is consistent, all where it is not."""
    gradient = "unbiased" if model.encoder.pool.consistent else "full"
    model.train()
    kept = kept_bytes(lambda: encode(model.encoder, context, chunk_size=chunk, gradient=gradient), model.parameters())
    model.eval()
    return kept / 1024


def memory_figure(tested: dict[str, Tested]) -> Figure:
    """Memory against the size of the context; and NLL against memory, where larger markers are larger contexts."""
    plt = pyplot()
    figure, (growth, price) = plt.subplots(1, 2, figsize=(11, 4.5), constrained_layout=True)
    for label, own in tested.items():
        model, pixels, sizes = own.runs[0].model(), own.task.test_pixels(0, 1), own.task.test_contexts
        memory = [kept_kilobytes(model, pixels[:, :size], own.task.test_chunk) for size in sizes]
        form = "o-" if model.encoder.pool.consistent else "s:"
        line = growth.plot(sizes, memory, form, markersize=4, label=label)[0]
        price.plot(memory, own.means()[0], form[1], color=line.get_color(), linewidth=0.8)
        price.scatter(memory, own.means()[0], [size / 4 for size in sizes], color=line.get_color(), marker=form[0], alpha=0.7)
    growth.set(xlabel="pixels in the context", ylabel="kB kept by the encoder for one image in training")
    price.set(xlabel="kB kept by the encoder for one image in training", ylabel="NLL, nats a pixel")
    log_scale(growth.yaxis)
    log_scale(price.xaxis)
    figure.legend(*growth.get_legend_handles_labels(), fontsize=7, loc="outside lower center", ncols=3)
    return figure


# -- pictures ---------------------------------------------------------------------------------------------------------


def show(axis: Any, picture: Tensor, title: str = "", label: str = "") -> None:
    """An image (C, H, W) in [0, 1]."""
    axis.clear()
    axis.imshow(picture.clamp(0, 1).permute(1, 2, 0).squeeze(-1).numpy(), cmap="gray", vmin=0, vmax=1, interpolation="nearest")
    axis.set(xticks=[], yticks=[])
    axis.set_title(title, fontsize=7)
    axis.set_ylabel(label, fontsize=7)


def show_deviation(axis: Any, deviation: Tensor, label: str = "") -> None:
    """The standard deviation (C, H, W) of the colours, from 0 (dark) to LARGEST_SHOWN."""
    axis.clear()
    axis.imshow(deviation.mean(0).numpy(), cmap="magma", vmin=0, vmax=LARGEST_SHOWN, interpolation="nearest")
    axis.set(xticks=[], yticks=[])
    axis.set_ylabel(label, fontsize=7)


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


def spaced(task: Completion, images: int) -> list[int]:
    """Numbers of so many test images, far from each other: neighbours may be of one scene."""
    return [task.tests() * number // images for number in range(images)]


def gallery_figure(task: Completion, model: SetModel, images: int = 3) -> Figure:
    """For some test images: context, mean, uncertainty, for growing contexts, and the truth."""
    plt = pyplot()
    shape = tuple(task.images["test"].pixels.shape[1:])
    images, sizes = min(images, task.tests()), context_sizes(shape[1] * shape[2])
    figure, axes = plt.subplots(
        3 * images, len(sizes) + 1, figsize=(1.25 * (len(sizes) + 1), 3.6 * images), constrained_layout=True, squeeze=False
    )
    for number, place in enumerate(spaced(task, images)):
        rows = axes[3 * number : 3 * number + 3]
        pixels = task.test_pixels(place, place + 1)[0]
        for column, size in enumerate(sizes):
            mean, deviation = completed(task, model, pixels[:size], shape)
            labels = ("context", "mean", "uncertainty") if column == 0 else ("", "", "")
            show(rows[0][column], revealed(pixels, size, shape), f"{size:,} pixels", labels[0])
            show(rows[1][column], mean, label=labels[1])
            show_deviation(rows[2][column], deviation, labels[2])
        show(rows[0][-1], task.images["test"].pixels[place] / 255, "truth")
        for row in rows[1:]:
            row[-1].axis("off")
    return figure


def progress_gif(task: Completion, model: SetModel, images: int = 4, frames: int = 20) -> bytes:
    """Pixels stream in, and the completion follows: one state an image, no pixel read twice."""
    plt = pyplot()
    shape = tuple(task.images["test"].pixels.shape[1:])
    images = min(images, task.tests())
    pixels = torch.cat([task.test_pixels(place, place + 1) for place in spaced(task, images)])
    figure, axes = plt.subplots(3, images, figsize=(1.6 * images, 4.9), squeeze=False)
    figure.subplots_adjust(0.04, 0.02, 0.99, 0.95, 0.05, 0.05)
    total = context_sizes(pixels.shape[1])[-1]
    ends = [0, *(max(1, round(total ** ((frame + 1) / frames))) for frame in range(frames))]
    streams = [model.stream(chunks=AVERAGE) for _ in range(images)]
    grid = places(*shape[1:]).unsqueeze(0)

    def draw(frame: int) -> None:
        for number, stream in enumerate(streams):
            if ends[frame + 1] > ends[frame]:
                stream.update(pixels[number : number + 1, ends[frame] : ends[frame + 1]])
            said = stream.predict().at(grid)
            labels = ("context", "mean", "uncertainty") if number == 0 else ("", "", "")
            show(axes[0][number], revealed(pixels[number], ends[frame + 1], shape), f"{ends[frame + 1]:,} pixels", labels[0])
            show(axes[1][number], said.mean[0].T.unflatten(1, shape[1:]), label=labels[1])
            show_deviation(axes[2][number], said.stddev[0].T.unflatten(1, shape[1:]), labels[2])

    with torch.no_grad():
        found = animate(figure, draw, frames, colors=96)
    plt.close(figure)
    return found


def best_of_each_model(tested: dict[str, Tested]) -> dict[str, Tested]:
    """Where a model was built with several options, the ones that did best."""
    found: dict[str, str] = {}
    for label, own in sorted(tested.items(), key=lambda item: float(item[1].losses.mean())):
        found.setdefault(own.config.model, label)
    return {label: own for label, own in tested.items() if label in found.values()}


def add_evidence(page: Page, runs: list[FinishedRun]) -> None:
    """Everything that the paper shows of this experiment, and the pictures, from finished runs of one data set."""
    page.section("Results")
    results_table(page, runs)
    tested = {label: Tested.test(group) for label, group in by_label(runs).items()}
    as_paper = {label: own for label, own in tested.items() if as_the_paper_trains(own.runs[0])}
    main = best_of_each_model(as_paper)
    reference = [label for label, own in main.items() if own.config.model == UMBC]
    if main:
        page.figure(contexts_figure(main), "NLL by the size of the context")
        if len(main) < len(as_paper):
            page.text("Of a model that was built in several ways, the one with the lowest NLL on these test images is shown.")
        if reference:
            differences_table(page, main, reference[0])
        page.figure(memory_figure(main), "memory by the size of the context, and NLL by memory")
        chunks_table(page, main)
    for one in main.values():
        built = one.config.model, one.config.model_options
        own = {label: other for label, other in tested.items() if (other.config.model, other.config.model_options) == built}
        full = [label for label, other in own.items() if other.config.gradient == "full"]
        if len(own) > 1:
            page.section(f"Gradients of {one.config.model}")
            page.figure(contexts_figure(own), f"full, unbiased and subset gradients of {one.config.model}")
            if full:
                differences_table(page, own, full[0])
    for name in SHOWN:
        best = min((run for run in runs if run.config.model == name), key=lambda run: run.metrics["nll"], default=None)
        if best is not None:
            page.section(f"Completions by {name}")
            task, model = best.task(Completion), best.model()
            page.figure(gallery_figure(task, model), f"context, mean, uncertainty and truth of test images, {name}")
            page.picture(progress_gif(task, model), "gif", f"pixels stream in, {name}")
