"""The evidence for the needle bags of docs/results/mil.md: accuracy against the rate of needles, for every way of training.

python benchmarks/evidence.py needles runs/needles --out evidence.html --figures figures
"""

import itertools

import torch
from benchmarks.evidence_common import plot_ranges, seconds

from setstream.report.page import Page, pyplot
from setstream.report.runs import SEEDS, FinishedRun, add_runs, group_by, mean_and_sd, metric

METRICS = ("accuracy", "auroc", "f1")


def training(run: FinishedRun) -> str:
    """How a run was trained."""
    if "features" in run.config.task_options:
        return "frozen features"
    if run.config.gradient in ("full", "exact"):
        return run.config.gradient
    return f"{run.config.gradient}, {run.config.chunk_size * run.config.grad_chunks} with a graph"


def rate(run: FinishedRun) -> float:
    """Needles in a thousand images of a positive bag."""
    return 1000 * float(run.config.task_options.get("rate", 0.003))


def differences(runs: list[FinishedRun], metric: str) -> list[list[str]]:
    """Rows of paired differences between ways of training, over runs with the same rate and seed, hence the same bags."""
    scores = {
        kind: {(rate(run), run.config.seed): run.metrics[metric] for run in group}
        for kind, group in group_by(runs, training).items()
    }
    rows = []
    for one, other in itertools.permutations(scores, 2):
        gains = torch.tensor([scores[one][pair] - scores[other][pair] for pair in scores[one].keys() & scores[other].keys()])
        if len(gains) > 1 and float(gains.mean()) >= 0:
            error = float(gains.std() / len(gains) ** 0.5)
            rows.append([one, other, f"{float(gains.mean()):+.3f} ± {error:.3f}", f"{int((gains > 0).sum())} of {len(gains)}"])
    return rows


def add_evidence(page: Page, runs: list[FinishedRun]) -> None:
    """A figure of the accuracy, the metrics, and paired differences between ways of training."""
    page.section("needles")
    figure, axes = pyplot().subplots(figsize=(6, 4), constrained_layout=True)
    for kind, group in group_by(runs, training).items():
        values = {x: [run.metrics["accuracy"] for run in same] for x, same in group_by(group, rate).items()}
        plot_ranges(axes, values, kind)
    axes.axhline(0.5, color="0.7", linewidth=1)
    axes.set(xlabel="needles in a thousand images of a positive bag", ylabel="accuracy on test bags")
    axes.legend()
    page.figure(figure, "Accuracy against the rate of needles: mean over seeds, bars from the lowest to the highest.")
    groups = group_by(sorted(runs, key=rate), lambda run: f"{training(run)}; {rate(run):g}")
    columns = {name: metric(name) for name in METRICS}
    columns |= {"seconds": lambda group: mean_and_sd([seconds(run) for run in group])} | SEEDS
    add_runs(page, groups, columns, "± over seeds.", first="training; needles in 1000")
    for name in ("auroc", "accuracy"):
        note = f"Difference in {name}: mean and standard error over pairs with the same rate and seed, hence the same bags."
        page.table(["training", "minus", "difference", "positive pairs"], differences(runs, name), note)
