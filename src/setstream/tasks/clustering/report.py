"""The report of clustering runs: NLL, gap to the oracle and memory, learning curves, and streams of one set."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import torch

from setstream.report.page import Page, pyplot
from setstream.report.runs import CONSISTENT, SEEDS, STEPS, Group, add_runs, by_label, group_by, kept_bytes, mean_of, metric
from setstream.tasks.clustering.streams import add_streams
from setstream.tasks.clustering.task import Clustering

if TYPE_CHECKING:
    from matplotlib.figure import Figure

UMBC = "umbc+set-transformer"


def by_steps(runs: Group) -> dict[int, Group]:
    """Runs with the same number of steps together: others cannot be compared."""
    return dict(sorted(group_by(runs, lambda run: run.config.steps).items()))


def add_results(page: Page, runs: Group) -> None:
    """NLL, gap and memory of every kind of run."""
    task, oracle = runs[0].task_as(Clustering), runs[0].metrics["oracle"]

    def kilobytes(group: Group) -> str:
        model, points = group[0].model(), torch.randn(1, 8, task.dim)
        return f"{kept_bytes(lambda: model.head(model.encoder(points)).means.sum(), model.parameters()) / 1024:.0f}"

    columns = CONSISTENT | {"NLL": metric("nll"), "gap to oracle": metric("gap"), "NLL given whole sets": metric("nll_whole")}
    columns |= {"kB kept for 8 points": kilobytes} | SEEDS | STEPS
    note = f"Test sets of {task.test_points:,} points in chunks of {task.test_chunk}. The oracle's NLL on them is {oracle:.3f}."
    add_runs(page, by_label(runs), columns, f"{note} ± over seeds.", order=mean_of("gap"))


def curves_figure(runs: Group) -> Figure:
    """The gap against the step, one line per run, one colour per kind of run."""
    figure, axis = pyplot().subplots(figsize=(10, 4.5), constrained_layout=True)
    for number, (label, group) in enumerate(by_label(runs).items()):
        style = {"color": f"C{number % 10}", "linestyle": ["-", "--", ":"][number // 10 % 3]}
        for run in group:
            axis.plot(*run.curve("gap"), **style, linewidth=1)
        axis.plot([], [], **style, label=label)
    axis.set(xlabel="step", ylabel="gap", yscale="log")
    figure.legend(loc="outside right upper", fontsize=6)
    return figure


def add_report(page: Page, runs: Group) -> None:
    """Tables and figures of finished runs, each kind of mixtures in its own section; streams of the best 2-D models."""
    for options, same_task in group_by(runs, lambda run: json.dumps(run.config.task_options, sort_keys=True)).items():
        page.section("Results" if options == "{}" else f"Results with {options}")
        add_results(page, same_task)
        for steps, same_steps in by_steps(same_task).items():
            page.figure(curves_figure(same_steps), f"gap to the oracle during training, {steps:,} steps")
    shown = {}
    for name in (UMBC, "set-transformer"):
        candidates = [run for run in runs if run.config.model == name and run.task_as(Clustering).dim == 2]
        best = min(candidates, key=lambda run: run.metrics["gap"], default=None)
        if best is not None and best.task_as(Clustering).clusters == 4:
            shown[name] = best.model()
    if shown:
        add_streams(page, shown)
