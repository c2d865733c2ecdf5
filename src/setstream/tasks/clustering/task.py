"""Amortised clustering: from a set of points to the mixture they were drawn from.

    loss = - mean_j log Σ_k π_k N(x_j; μ_k, σ_k),     (π, μ, σ) = model(points)

There are no labels: the likelihood of the set's own points is the loss. The score is the gap between the model's NLL and that
of the true parameters, the oracle. The report also shows one set streamed in the paper's four ways.
"""

import json
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from setstream._utils.optional import need
from setstream.models.model import SetModel
from setstream.pools.base import AVERAGE
from setstream.report.page import Page, animate, pyplot
from setstream.report.runs import Group, add_results, group_by, metric
from setstream.tasks.clustering.mixtures import DiagonalMixture, Sample, sample
from setstream.tasks.clustering.models import MODELS
from setstream.tasks.clustering.released import MODELS as RELEASED
from setstream.tasks.registry import RenamedModels, predict_in_chunks
from setstream.training.task import Batch, Encode, Task, mix

TEST_BATCH = 100
#: The paper's names, and what they mean.
STREAMS = {"single point": "one at a time", "class": "cluster after cluster", "chunk": "eight at a time"}
STREAMS |= {"one each": "one of each cluster at a time"}
CHUNK, FRAMES = 8, 24
#: Whose streams are shown: the models of the paper's first figure, and the best one.
SHOWN = ("set-transformer", "deepsets", "sse", "umbc+set-transformer", "umbc+em")


@dataclass(eq=False)
class Clustering(Task):
    """Mixtures of Gaussians."""

    name = "clustering"
    summary = "mixtures of Gaussians: from a set of points to the mixture that made it (NLL, gap to the oracle)"
    report = "setstream.tasks.clustering.task:add_report"
    models = RenamedModels(MODELS | RELEASED, MODELS.renamed)

    points: int = 512
    clusters: int = 4
    dim: int = 2
    variant: str = "released"  #: how mixtures are drawn, `released` or `text` (see `mixtures.py`)
    test_points: int = 1024
    test_sets: int = 1000  #: a fifth of them is used during training
    test_chunk: int = 8  #: points per chunk in a test; models that are not consistent average over the chunks
    test_seed: int = 1

    def build(self, model: str, **options: object) -> SetModel:
        return super().build(model, **({"clusters": self.clusters, "dim": self.dim} | options))

    def batch(self, step: int, size: int, generator: torch.Generator) -> Batch:
        points = self.points
        if self.variant == "text":
            points = int(torch.randint(self.points // 2, self.points + 1, (), generator=generator))
        return {"points": self.draw(size, points, generator).points}

    def loss(self, model: SetModel, batch: Batch, encode: Encode) -> Tensor:
        x = encode.sees(batch["points"])
        return model.head(encode(model.encoder, x)).nll(x).mean()

    @cached_property
    def tests(self) -> list[Sample]:
        """The test sets, in batches: the same for every model and seed."""
        sizes = {start: min(TEST_BATCH, self.test_sets - start) for start in range(0, self.test_sets, TEST_BATCH)}
        seeds = {start: torch.Generator().manual_seed(mix(self.test_seed, start, 3)) for start in sizes}
        return [self.draw(size, self.test_points, seeds[start]) for start, size in sizes.items()]

    def evaluate(self, model: SetModel, *, quick: bool = False) -> dict[str, float]:
        """NLL, oracle and gap, with sets in chunks; for models that are not consistent, also the NLL with whole sets."""
        tests = self.tests[: max(1, len(self.tests) // 5)] if quick else self.tests
        nll, oracle = self.nll(model, tests), torch.cat([test.oracle() for test in tests])
        metrics = {"nll": float(nll.mean()), "oracle": float(oracle.mean()), "gap": float((nll - oracle).mean())}
        if len(nll) > 1:
            metrics["gap_error"] = float((nll - oracle).std() / len(nll) ** 0.5)
        if not model.encoder.pool.consistent:
            metrics["nll_whole"] = float(self.nll(model, tests, chunk=self.test_points).mean())
        return metrics

    @torch.no_grad()
    def nll(self, model: SetModel, tests: list[Sample], chunk: int | None = None) -> Tensor:
        """The NLL of each test set's points under the model's mixture; `chunk`: see `predict`."""
        device = model.encoder.device
        return torch.cat([self.predict(model, test.points, chunk).nll(test.points.to(device)) for test in tests]).cpu()

    def predict(self, model: SetModel, points: Tensor, chunk: int | None = None) -> DiagonalMixture:
        """The mixtures of sets of points (B, N, D), given in chunks of `test_chunk` points, or of `chunk`."""
        return predict_in_chunks(model, points.to(model.encoder.device).split(chunk or self.test_chunk, dim=1))

    def draw(self, sets: int, points: int, generator: torch.Generator) -> Sample:
        return sample(sets, points, clusters=self.clusters, dim=self.dim, variant=self.variant, generator=generator)


def stream_order(kind: str, labels: Tensor, generator: torch.Generator | None = None) -> list[Tensor]:
    """The chunks of one set, as lists of positions; labels (N,) give the component of each point."""
    if kind not in STREAMS:
        raise ValueError(f"unknown stream {kind!r}: choose one of {', '.join(STREAMS)}")
    shuffled = torch.randperm(len(labels), generator=generator)
    if kind in ("single point", "chunk"):
        return list(shuffled.split(1 if kind == "single point" else CHUNK))
    clusters = [shuffled[labels[shuffled] == label] for label in labels.unique()]
    if kind == "class":
        return [cluster.sort().values for cluster in clusters]
    return [torch.stack([c[turn] for c in clusters if turn < len(c)]) for turn in range(max(map(len, clusters)))]


def frame_turns(chunks: int) -> list[int]:
    """The last chunk that has arrived in each frame of an animation."""
    return [max(0, round((frame + 1) / FRAMES * chunks) - 1) for frame in range(FRAMES)]


@torch.no_grad()
def predictions(model: SetModel, points: Tensor, chunks: list[Tensor]) -> list[DiagonalMixture]:
    """The model's mixture of one set (N, D) in each frame. With several passes, all chunks so far are read again."""
    stream, several = model.stream(chunks=AVERAGE), model.encoder.passes > 1
    turns, found = frame_turns(len(chunks)), {}
    for turn, chunk in enumerate(chunks):
        if not several:
            stream.update(points[chunk].unsqueeze(0))
        if turn in turns:
            so_far = [points[torch.cat(chunks[: turn + 1])].unsqueeze(0)]
            found[turn] = predict_in_chunks(model, so_far) if several else stream.predict()
    return [found[turn] for turn in turns]


def stream_ends(model: SetModel, points: Tensor, labels: Tensor, seed: int = 0) -> dict[str, DiagonalMixture]:
    """The model's mixture of one set (N, D) at the end of each of the four streams."""
    orders = {kind: stream_order(kind, labels, torch.Generator().manual_seed(seed)) for kind in STREAMS}
    return {kind: predict_in_chunks(model, (points[chunk].unsqueeze(0) for chunk in order)) for kind, order in orders.items()}


def disagreement(ends: dict[str, DiagonalMixture], points: Tensor) -> float:
    """Largest minus smallest log-likelihood of a point over the streams' mixtures, mean over the points (1, N, D)."""
    values = torch.stack([end.log_prob(points) for end in ends.values()])
    return float((values.amax(0) - values.amin(0)).mean())


def draw_mixture(axis: Any, points: Tensor, seen: Tensor, mixture: DiagonalMixture, title: str) -> None:
    """Points (N, 2), those that were seen, and the ellipses of two standard deviations of a mixture."""
    ellipse = need("matplotlib.patches", "report", "figures").Ellipse
    axis.clear()
    axis.scatter(*points.T, s=2, c="0.75", linewidths=0)
    axis.scatter(*points[seen].T, s=3, c="tab:blue", linewidths=0)
    weights = mixture.logits[0].softmax(-1)
    for weight, mean, scale in zip(weights.tolist(), mixture.means[0].tolist(), mixture.scales[0].tolist(), strict=True):
        style = {"fill": False, "edgecolor": "tab:red", "linewidth": 1.5, "alpha": 0.25 + 0.75 * min(1.0, 2 * weight)}
        axis.add_patch(ellipse(mean[:2], 4 * scale[0], 4 * scale[1], **style))
    axis.set(xlim=(-6, 6), ylim=(-6, 6), xticks=[], yticks=[], aspect="equal")
    axis.set_title(title, fontsize=8)


def add_streams(page: Page, models: dict[str, SetModel], seed: int = 3, points: int = 512) -> tuple[Any, bytes]:
    """Add a table, a figure (a row per model, a column per stream) and an animation of one set; returns the latter two."""
    drawn = sample(1, points, generator=torch.Generator().manual_seed(seed))
    orders = {kind: stream_order(kind, drawn.labels[0], torch.Generator().manual_seed(0)) for kind in STREAMS}
    size = 2.3 * len(STREAMS), 2.6 * len(models)
    figure, axes = pyplot().subplots(len(models), len(STREAMS), figsize=size, constrained_layout=True, squeeze=False)
    pairs = [(name, kind) for name in models for kind in STREAMS]
    predicted = {(name, kind): predictions(models[name], drawn.points[0], orders[kind]) for name, kind in pairs}

    def draw(frame: int) -> None:
        for axis, (name, kind) in zip(axes.flat, pairs, strict=True):
            turn = frame_turns(len(orders[kind]))[frame]
            mixture, seen = predicted[name, kind][frame], torch.cat(orders[kind][: turn + 1])
            title = f"{kind} stream, NLL {float(mixture.nll(drawn.points)):.2f}"
            draw_mixture(axis, drawn.points[0], seen, mixture, title)
        for row, name in zip(axes, models, strict=True):
            row[0].set_ylabel(name, fontsize=9)

    gif = animate(figure, draw, FRAMES)  # the figure shows the last frame now
    rows = []
    for name in models:
        ends = {kind: predicted[name, kind][-1] for kind in STREAMS}
        nlls = [f"{float(end.nll(drawn.points)):.3f}" for end in ends.values()]
        rows.append([name, *nlls, f"{disagreement(ends, drawn.points):.1e}"])
    note = f"NLL; the oracle's is {float(drawn.oracle()):.3f}."
    page.section("Four streams of one set")
    page.table(["model", *(f"{kind} stream" for kind in STREAMS), "disagreement"], rows, note)
    page.figure(figure, "predicted mixture of each model at the end of each stream")
    page.picture(gif, "gif", "predicted mixtures while points arrive")
    return figure, gif


def add_report(page: Page, runs: Group) -> None:
    """A table and learning curves for each kind of mixtures; streams of the best models of four clusters in the plane."""
    for options, same_task in group_by(runs, lambda run: json.dumps(run.config.task_options, sort_keys=True)).items():
        task, oracle = same_task[0].task_as(Clustering), same_task[0].metrics["oracle"]
        page.section("Results" if options == "{}" else f"Results with {options}")
        nlls = {"NLL": metric("nll"), "gap to oracle": metric("gap"), "NLL given whole sets": metric("nll_whole")}
        note = f"Test sets of {task.test_points:,} points in chunks of {task.test_chunk}. ± over seeds."
        note += f" The oracle's NLL on them is {oracle:.3f}."
        add_results(page, same_task, nlls, note, "gap", ylabel="gap to the oracle", yscale="log")
    tasks = [(run, run.task_as(Clustering)) for run in runs if run.config.model in SHOWN]
    shown = [run for run, task in tasks if (task.dim, task.clusters) == (2, 4)]
    best = {run.config.model: run for run in sorted(shown, key=lambda run: run.metrics["gap"], reverse=True)}
    if best:
        add_streams(page, {name: best[name].model() for name in SHOWN if name in best})
