"""The evidence of the needle bags: accuracy against the rate of needles, for every way of training."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import torch

from setstream.report.page import Page
from setstream.report.plotting import pyplot
from setstream.report.runs import FinishedRun, mean_and_spread

if TYPE_CHECKING:
    from matplotlib.figure import Figure

METRICS = ("accuracy", "auroc", "f1")


def kind_of(run: FinishedRun) -> str:
    """How a run was trained, in a few words."""
    if "features" in run.config.task_options:
        return "frozen features"
    if run.config.gradient in ("full", "exact"):
        return run.config.gradient
    return f"{run.config.gradient}, {run.config.chunk_size * run.config.grad_chunks} with a graph"


def by_kind_and_rate(runs: list[FinishedRun]) -> dict[str, dict[float, list[FinishedRun]]]:
    """Runs that differ in their seeds only, together."""
    found: dict[str, dict[float, list[FinishedRun]]] = {}
    for run in runs:
        rate = float(run.config.task_options.get("rate", 0.003))
        found.setdefault(kind_of(run), {}).setdefault(rate, []).append(run)
    return {kind: dict(sorted(rates.items())) for kind, rates in found.items()}


def accuracy_figure(runs: list[FinishedRun]) -> Figure:
    """Mean accuracy over the seeds, and from the worst to the best of them."""
    plt = pyplot()
    figure, axes = plt.subplots(figsize=(6, 4), constrained_layout=True)
    for kind, rates in by_kind_and_rate(runs).items():
        values = [[run.metrics["accuracy"] for run in own] for own in rates.values()]
        means = [sum(own) / len(own) for own in values]
        spans = [
            [mean - min(own) for mean, own in zip(means, values, strict=True)],
            [max(own) - mean for mean, own in zip(means, values, strict=True)],
        ]
        axes.errorbar([1000 * rate for rate in rates], means, spans, marker="o", capsize=3, label=kind)
    axes.axhline(0.5, color="0.7", linewidth=1)
    axes.set(xlabel="needles in a thousand images of a positive bag", ylabel="accuracy on test bags")
    axes.legend()
    found: Figure = figure
    return found


def differences(runs: list[FinishedRun], metric: str) -> list[list[str]]:
    """By how much each way of training beats each other, over runs of the same rate and seed: they saw the same bags."""
    scores: dict[str, dict[tuple[float, int], float]] = {}
    for kind, rates in by_kind_and_rate(runs).items():
        scores[kind] = {(rate, run.config.seed): run.metrics[metric] for rate, own in rates.items() for run in own}
    rows = []
    for one, other in itertools.permutations(scores, 2):
        gains = torch.tensor([scores[one][pair] - scores[other][pair] for pair in scores[one].keys() & scores[other].keys()])
        if len(gains) > 1 and float(gains.mean()) >= 0:
            error = float(gains.std() / len(gains) ** 0.5)
            shown = [f"{float(gains.mean()):+.3f} ± {error:.3f}", f"{int((gains > 0).sum())} of {len(gains)}"]
            rows.append([one, other, *shown])
    return rows


def add_evidence(page: Page, runs: list[FinishedRun]) -> None:
    """The figure, and the numbers behind it."""
    page.section("needles")
    page.figure(
        accuracy_figure(runs), "Accuracy against the rate of needles: mean over seeds, bars from the worst to the best."
    )
    rows = []
    for kind, rates in by_kind_and_rate(runs).items():
        for rate, own in rates.items():
            cells = [mean_and_spread([run.metrics[name] for run in own]) for name in METRICS]
            seconds = mean_and_spread([run.seconds() for run in own])
            rows.append([kind, f"{1000 * rate:g}", *cells, seconds, str(len(own))])
    page.table(["training", "needles in 1000", *METRICS, "seconds", "seeds"], rows)
    for metric in ("auroc", "accuracy"):
        caption = f"Gain in {metric}: mean and standard error over pairs of the same rate and seed, which saw the same bags."
        page.table(["this", "beats", "by", "in pairs"], differences(runs, metric), caption)
