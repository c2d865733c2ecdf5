"""The report of image completion runs: NLL by the size of the context, learning curves, and pictures of completions."""

from typing import Any

import torch

from setstream.models.model import SetModel
from setstream.report.page import Page, pyplot
from setstream.report.runs import Group, add_results, metric
from setstream.tasks.completion.task import Completion, places

SHOWN = ("umbc+set-transformer", "umbc+anchors")  # models whose completions are shown as pictures


@torch.no_grad()
def gallery_figure(task: Completion, model: SetModel, images: int = 3) -> Any:
    """Some test images, evenly spaced (neighbours may show one scene): the largest context, the prediction, the truth."""
    images = min(images, task.tests())
    figure, axes = pyplot().subplots(images, 4, figsize=(6, 1.6 * images), constrained_layout=True, squeeze=False)
    for row, number in zip(axes, range(0, task.tests(), -(-task.tests() // images)), strict=False):
        truth, pixels = task.images["test"].pixels[number] / 255, task.test_pixels(number, number + 1)
        _, height, width = truth.shape
        context = pixels[:, : max(task.test_contexts)]
        field = task.predict(model, context).at(places(height, width).unsqueeze(0))
        x, y = (context[0, :, :2] * torch.tensor([width, height])).long().T
        seen = torch.full_like(truth, 0.5)
        seen[:, y, x] = truth[:, y, x]
        mean, deviation = (values[0].T.unflatten(1, (height, width)) for values in (field.mean, field.stddev))
        pictures = {"context": seen, "mean": mean, "uncertainty": deviation, "truth": truth}
        for axis, (title, picture) in zip(row, pictures.items(), strict=True):
            axis.imshow(picture.clamp(0, 1).permute(1, 2, 0).squeeze(-1).numpy(), interpolation="nearest", cmap="gray")
            axis.set(xticks=[], yticks=[])
            axis.set_title(title, fontsize=7)
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
