"""Image completion: all pixels of an image from a set of some of them.

    context   {(p_j, y_j)}  N pixels at random places p in [0, 1]², y in [0, 1]^C          the set
    loss = - mean_p Σ_c log N(y_pc; μ_pc, σ_pc²)       over all pixels, or `targets` of them at random        nats per pixel

The image is the label, and the context is a part of it. The report: NLL by the size of the context, and completed images.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from setstream.data.images import celeba, cifar10, pictures
from setstream.errors import ConfigurationError
from setstream.models.model import SetModel
from setstream.report.page import Page, pyplot
from setstream.report.runs import Group, add_results, metric
from setstream.tasks.completion.field import Field
from setstream.tasks.completion.models import MODELS
from setstream.tasks.completion.released import MODELS as RELEASED
from setstream.tasks.registry import predict_in_chunks
from setstream.training.task import Batch, Encode, Task, mix

DATA = ("cifar10", "celeba", "folder")  # cifar10 is fetched; the others are read from a folder
TEST_BATCH = 50
SHOWN = ("umbc+set-transformer", "umbc+anchors")  # models whose completions are shown as pictures


def places(height: int, width: int) -> Tensor:
    """The middle of every pixel in [0, 1]², row by row: (H W, 2), x and y.

    >>> places(1, 2)
    tensor([[0.2500, 0.5000],
            [0.7500, 0.5000]])
    """
    y, x = torch.meshgrid((torch.arange(height) + 0.5) / height, (torch.arange(width) + 0.5) / width, indexing="ij")
    return torch.stack([x, y], -1).flatten(0, 1)


def as_pixels(images: Tensor) -> Tensor:
    """Images (B, C, H, W) of bytes as sets of pixels (B, H W, 2 + C): place and colour."""
    colours = images.flatten(2).mT.float() / 255
    return torch.cat([places(*images.shape[2:]).to(colours).expand(len(images), -1, -1), colours], -1)


def choose(pixels: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """`count` pixels of each image, at random."""
    order = torch.rand(pixels.shape[:2], generator=generator).topk(count, dim=1).indices
    return pixels.gather(1, order.unsqueeze(-1).expand(-1, -1, pixels.shape[-1]))


@dataclass(eq=False)
class Completion(Task):
    """Images from some of their pixels."""

    name = "completion"
    summary = "images from a set of their pixels, as a conditional neural process (NLL per pixel)"
    report = "setstream.tasks.completion.task:add_report"
    models = MODELS | RELEASED

    data: str = "cifar10"  #: cifar10, celeba or folder; the last two are read from `folder`
    folder: str | None = None
    side: int = 32  #: the images of a folder, and faces, are resized to side x side
    fewest: int = 100  #: pixels in the smallest training context; its size is drawn at each step
    most: int = 500  #: pixels in the largest training context
    targets: int = 0  #: random pixels per step that the loss is computed on; 0: all
    test_images: int = 1000  #: the number of test images; a fifth of them is used during training
    test_contexts: tuple[int, ...] | list[int] = (100, 200, 300, 400, 500)  #: sizes; the metric `nll` is their mean
    test_chunk: int = 100  #: pixels per chunk of the context in a test
    test_seed: int = 1

    def __post_init__(self) -> None:
        if self.data not in DATA:
            raise ConfigurationError(f"unknown data {self.data!r}: choose one of {', '.join(DATA)}")
        if self.data != "cifar10" and self.folder is None:
            raise ConfigurationError(f"the data {self.data!r} are read from a folder: give task.folder=PATH")
        if not 1 <= self.fewest <= self.most:
            raise ConfigurationError(f"context sizes need 1 <= fewest <= most; got {self.fewest} and {self.most}")
        self.test_contexts = list(self.test_contexts)

    @cached_property
    def images(self) -> dict[str, Tensor]:
        """train and test; read at the first use."""
        if self.folder is None or self.data == "cifar10":
            return cifar10()
        return (celeba if self.data == "celeba" else pictures)(self.folder, self.side)

    def batch(self, step: int, size: int, generator: torch.Generator) -> Batch:
        """Random images: a context of each, and the pixels for the loss."""
        train = self.images["train"]
        chosen = torch.randint(len(train), (size,), generator=generator)
        pixels = as_pixels(train[chosen])
        count = int(torch.randint(self.fewest, self.most + 1, (), generator=generator))
        context = choose(pixels, min(count, pixels.shape[1]), generator)
        wanted = 0 < self.targets < pixels.shape[1]
        return {"context": context, "targets": choose(pixels, self.targets, generator) if wanted else pixels}

    def loss(self, model: SetModel, batch: Batch, encode: Encode) -> Tensor:
        return model.head(encode(model.encoder, batch["context"])).nll(batch["targets"]).mean()

    def test_pixels(self, start: int, stop: int) -> Tensor:
        """Test images as pixels, each in another random order: its first n pixels are its context of size n."""
        pixels = as_pixels(self.images["test"][start:stop])
        generator = torch.Generator().manual_seed(mix(self.test_seed, start, 5))
        return choose(pixels, pixels.shape[1], generator)

    def tests(self) -> int:
        return min(self.test_images, len(self.images["test"]))

    @torch.no_grad()
    def losses(self, model: SetModel, context: int, tests: int | None = None, chunk: int | None = None) -> Tensor:
        """Nats per pixel of each test image, given its first `context` pixels; `chunk`: see `predict`."""
        total = self.tests() if tests is None else tests
        batches = (self.test_pixels(start, min(start + TEST_BATCH, total)) for start in range(0, total, TEST_BATCH))
        on_device = (pixels.to(model.encoder.device) for pixels in batches)
        return torch.cat([self.predict(model, pixels[:, :context], chunk).nll(pixels).cpu() for pixels in on_device])

    def predict(self, model: SetModel, context: Tensor, chunk: int | None = None) -> Field:
        """The completed images, given the context (B, N, 2 + C) in chunks of `test_chunk` pixels, or of `chunk`."""
        return predict_in_chunks(model, context.split(chunk or self.test_chunk, dim=1))

    def evaluate(self, model: SetModel, *, quick: bool = False) -> dict[str, float]:
        """NLL for each size of context, and their mean with its standard error over the images."""
        tests = max(1, self.tests() // 5) if quick else self.tests()
        by_context = {context: self.losses(model, context, tests) for context in self.test_contexts}
        images = torch.stack(list(by_context.values())).mean(0)
        metrics = {"nll": float(images.mean())} | {f"nll_{n}": float(losses.mean()) for n, losses in by_context.items()}
        return metrics | ({"nll_error": float(images.std() / len(images) ** 0.5)} if len(images) > 1 else {})


@torch.no_grad()
def gallery_figure(task: Completion, model: SetModel, images: int = 3) -> Any:
    """Some test images, evenly spaced (neighbours may show one scene): the largest context, the prediction, the truth."""
    rows = []
    for number in range(0, task.tests(), -(-task.tests() // images)):
        truth, pixels = task.images["test"][number] / 255, task.test_pixels(number, number + 1)
        _, height, width = truth.shape
        context = pixels[:, : max(task.test_contexts)]
        field = task.predict(model, context).at(places(height, width).unsqueeze(0))
        x, y = (context[0, :, :2] * torch.tensor([width, height])).long().T
        seen = torch.full_like(truth, 0.5)
        seen[:, y, x] = truth[:, y, x]
        mean, deviation = (values[0].T.unflatten(1, (height, width)) for values in (field.mean, field.stddev))
        rows.append(torch.cat([seen, mean, deviation, truth], 2))
    figure, axis = pyplot().subplots(figsize=(6, 1.6 * len(rows)), constrained_layout=True)
    axis.imshow(torch.cat(rows, 1).clamp(0, 1).permute(1, 2, 0).squeeze(-1).numpy(), interpolation="nearest", cmap="gray")
    axis.set(title="context, mean, uncertainty, truth", xticks=[], yticks=[])
    return figure


def add_report(page: Page, runs: Group) -> None:
    """Table, learning curves and pictures of finished runs on one data set."""
    task = runs[0].task_as(Completion)
    columns = {f"NLL at {n}": metric(f"nll_{n}") for n in task.test_contexts}
    columns |= {"standard error": lambda group: f"{group[0].metrics.get('nll_error', float('nan')):.3f}"}
    note = f"Nats per pixel on {task.tests():,} test images, with the context in chunks of {task.test_chunk}."
    note += " ± over seeds; the standard error is over images."
    page.section("Results")
    add_results(page, runs, columns, note, "nll", ylabel="NLL")
    best = {run.config.model: run for run in sorted(runs, key=lambda run: run.metrics["nll"], reverse=True)}
    for name in [name for name in SHOWN if name in best]:
        page.section(f"Completions by {name}")
        picture = gallery_figure(best[name].task_as(Completion), best[name].model())
        page.figure(picture, f"context, mean, uncertainty and truth of test images, {name}")
