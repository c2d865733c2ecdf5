"""The evidence of the clustering experiment: tables and figures of finished runs.

Numbers of the paper are those of its Table 1 (Willette et al., ICML 2023), on 1,024 points, where the oracle has about 1.55.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from setstream.models.model import SetModel
from setstream.report.costs import kept_bytes, milliseconds
from setstream.report.page import Page
from setstream.report.plotting import LINES, pyplot
from setstream.report.runs import FinishedRun, by_label, mean_and_spread
from setstream.tasks.clustering.classical import em_nll
from setstream.tasks.clustering.mixtures import sample
from setstream.tasks.clustering.partitions import partition_variance, variance_figure
from setstream.tasks.clustering.stream_figures import add_streams
from setstream.tasks.clustering.task import Clustering

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: NLL, memory (kB) and time (ms) in the paper's Table 1.
PAPER = {
    "deepsets": (2.43, 16, 0.46),
    "sse": (2.13, 61, 0.83),
    "sse-hierarchical": (2.38, 125, 0.84),
    "fspool": (3.52, 43, 0.79),
    "diff-em": (5.58, 476, 7.11),
    "set-transformer": (11.6, 225, 2.26),
    "umbc+fspool": (2.01, 70, 1.18),
    "umbc+diff-em": (2.13, 502, 8.57),
    "umbc+set-transformer": (1.84, 100, 1.63),
}
PAPER_ORACLE = 1.55
PAPER_SCHEDULE = 50_000, 8  # steps, points in a gradient set
UMBC = "umbc+set-transformer"
SIZES = [64, 128, 256, 512, 1024, 2048]


# -- (a) the table ----------------------------------------------------------------------------------------------------


def cost_of_a_chunk(model: SetModel, dim: int = 2) -> tuple[float, float]:
    """Kilobytes that autograd keeps, and milliseconds forward, for one chunk of eight points."""
    x = torch.randn(1, 8, dim)
    kept = kept_bytes(lambda: model.head(model.encoder(x)).means.sum(), model.parameters())
    with torch.no_grad():
        return kept / 1024, milliseconds(lambda: model.head(model.encoder(x)))


def results_table(page: Page, runs: list[FinishedRun]) -> None:
    """NLL and gap of every kind of run, with the paper's beside them."""
    rows = []
    for label, group in by_label(runs).items():
        model, config = group[0].model(), group[0].config
        memory, duration = cost_of_a_chunk(model, group[0].task(Clustering).dim)
        paper = PAPER.get(config.model)
        schedule = (config.steps, config.chunk_size) == PAPER_SCHEDULE
        plain = schedule and not config.model_options and config.gradient in ("unbiased", "subset")
        same = plain and (config.gradient == "unbiased") == model.encoder.pool.consistent
        whole = [run.metrics["nll_whole"] for run in group if "nll_whole" in run.metrics]
        rows.append(
            [
                label,
                "yes" if model.encoder.pool.consistent else "no",
                mean_and_spread([run.metrics["nll"] for run in group]),
                mean_and_spread([run.metrics["gap"] for run in group]),
                f"{paper[0]:.2f}" if paper and same else "",
                f"{paper[0] - PAPER_ORACLE:.2f}" if paper and same else "",
                mean_and_spread(whole) if whole else "",
                f"{memory:.0f}",
                f"{duration:.2f}",
                str(len(group)),
                f"{config.steps:,}",
            ]
        )
    rows.sort(key=lambda row: float(row[3].split()[0]))
    columns = ["model (gradient)", "MBC", "NLL", "gap to oracle", "paper's NLL", "paper's gap", "NLL given whole sets"]
    columns += ["kB kept for 8 points", "ms for 8 points", "seeds", "steps"]
    task, oracle = runs[0].task(Clustering), runs[0].metrics["oracle"]
    tests = f"Test sets of {task.test_points:,} points in chunks of {task.test_chunk}"
    page.table(columns, rows, f"{tests}; the oracle has {oracle:.3f} on them. ± over seeds.")


def curves_figure(runs: list[FinishedRun], metric: str) -> Figure:
    """A test metric against the step, for every kind of run."""
    plt = pyplot()
    figure, axis = plt.subplots(figsize=(10, 4.5), constrained_layout=True)
    for number, (label, group) in enumerate(by_label(runs).items()):
        for run in group:
            steps, values = run.curve(metric)
            axis.plot(steps, values, color=f"C{number % 10}", linestyle=["-", "--", ":"][number // 10 % 3], linewidth=1)
        axis.plot([], [], color=f"C{number % 10}", linestyle=["-", "--", ":"][number // 10 % 3], label=label)
    axis.set(xlabel="step", ylabel=metric, yscale="log")
    figure.legend(loc="outside right upper", fontsize=6)
    return figure


# -- (b) gradients ----------------------------------------------------------------------------------------------------


def by_steps(runs: list[FinishedRun]) -> dict[int, list[FinishedRun]]:
    """Runs of one schedule together: others cannot be compared."""
    return {steps: [run for run in runs if run.config.steps == steps] for steps in sorted({run.config.steps for run in runs})}


@torch.no_grad()
def gaps(run: FinishedRun) -> Tensor:
    """The gap to the oracle on each of the run's test sets."""
    task, model = run.task(Clustering), run.model()
    return torch.cat([task.predict(model, test.points).nll(test.points) - test.oracle() for test in task.tests()])


def gradients_table(page: Page, runs: list[FinishedRun]) -> None:
    """How far each gradient's model is from that of the full gradient, on the same test sets."""
    found = {label: torch.stack([gaps(run) for run in group]) for label, group in by_label(runs).items()}
    full = next(label for label, group in by_label(runs).items() if group[0].config.gradient == "full")
    reference = found[full].mean(0)
    rows = []
    for label, own in found.items():
        apart = own.mean(0) - reference
        error = float(apart.std() / len(apart) ** 0.5)
        seeds = f"{float(own.mean(1).std()):.3f}" if len(own) > 1 else ""
        rows.append([label, f"{float(own.mean()):.3f}", f"{float(apart.mean()):+.4f} ± {error:.4f}", seeds])
    page.table(
        ["model (gradient)", "gap to oracle", "beyond the full gradient's", "deviation between seeds"],
        sorted(rows, key=lambda row: float(row[1])),
        "± is the standard error of the difference over the same test sets; what another seed changes comes on top.",
    )


@torch.no_grad()
def gap_by_size(run: FinishedRun, sizes: list[int], sets: int = 200, seed: int = 5) -> list[float]:
    """The gap to the oracle on test sets of each size."""
    task, model = run.task(Clustering), run.model()
    found = []
    for size in sizes:
        drawn = task.draw(sets, size, torch.Generator().manual_seed(seed))
        found.append(float((task.predict(model, drawn.points).nll(drawn.points) - drawn.oracle()).mean()))
    return found


def sizes_figure(runs: list[FinishedRun], sizes: list[int]) -> Figure:
    """For each model: full, unbiased and subset gradients, gap against test set size."""
    plt = pyplot()
    names = list(dict.fromkeys(run.config.model for run in runs))
    figure, axes = plt.subplots(1, len(names), figsize=(4.2 * len(names), 3.8), constrained_layout=True, squeeze=False)
    for axis, name in zip(axes[0], names, strict=True):
        for label, group in by_label([run for run in runs if run.config.model == name]).items():
            values = torch.tensor([gap_by_size(run, sizes) for run in group]).mean(0).tolist()
            axis.plot(sizes, values, LINES[group[0].config.gradient] + "o", markersize=3, label=label.split("(")[1].rstrip(")"))
        axis.set(xscale="log", yscale="log", xlabel="points in a test set", title=name)
        axis.legend(fontsize=7)
    axes[0][0].set_ylabel("gap to the oracle")
    return figure


def add_gradients(page: Page, runs: list[FinishedRun]) -> None:
    """For each schedule under which several gradients were tried: curves, table and the figure by test set size."""
    compared = [run for run in runs if run.config.model in ("deepsets", "sse", UMBC) and not run.config.model_options]
    for steps, own in by_steps(compared).items():
        if len({run.config.gradient for run in own}) < 2:
            continue
        page.section(f"Gradients, {steps:,} steps")
        umbc = [run for run in own if run.config.model == UMBC]
        if any(run.config.gradient == "full" for run in umbc):
            gradients_table(page, umbc)
            page.figure(curves_figure(umbc, "gap"), f"gap to the oracle while training {UMBC}")
        page.figure(sizes_figure(own, SIZES), "gap by test set size and gradient; means over seeds")


# -- all of it --------------------------------------------------------------------------------------------------------


def add_activations(page: Page, runs: list[FinishedRun]) -> None:
    """The activation ablation, where there was one."""
    tried = [run for run in runs if run.config.model == UMBC and run.config.gradient == "unbiased"]
    for steps, own in by_steps(tried).items():
        named = {str(group[0].config.model_options.get("activation", "softmax")): group for group in by_label(own).values()}
        if len(named) > 1:
            page.section(f"Activations, {steps:,} steps")
            rows = [[name, mean_and_spread([run.metrics["gap"] for run in group])] for name, group in named.items()]
            page.table(["activation", "gap to oracle"], sorted(rows, key=lambda row: float(row[1].split()[0])))


def add_evidence(page: Page, runs: list[FinishedRun], *, em_sets: int = 50) -> None:
    """Everything that the paper shows of this experiment, from finished runs; each kind of mixtures by itself."""
    kinds = list(dict.fromkeys(json.dumps(run.config.task_options, sort_keys=True) for run in runs))
    for kind in kinds:
        own = [run for run in runs if json.dumps(run.config.task_options, sort_keys=True) == kind]
        page.section("Results" if kind == "{}" else f"Results with {kind}")
        results_table(page, own)
        for steps, together in by_steps(own).items():
            page.figure(curves_figure(together, "gap"), f"gap to the oracle while training, {steps:,} steps")
        add_activations(page, own)
        add_gradients(page, own)
    if em_sets:
        drawn = sample(em_sets, 1024, generator=torch.Generator().manual_seed(9))
        gap = em_nll(drawn.points) - drawn.oracle()
        page.section("The classical yardstick")
        page.text(
            f"scikit-learn's EM (diagonal, best of ten starts, fitted to each test set by itself): gap {float(gap.mean()):.3f} "
            f"± {float(gap.std()) / em_sets**0.5:.3f} on {em_sets} sets of 1,024."
        )
    flat = [run for run in runs if run.task(Clustering).dim == 2]  # only those can be drawn
    shown = {}
    for name in (UMBC, "set-transformer"):
        best = sorted((run for run in flat if run.config.model == name), key=lambda run: run.metrics["gap"])
        if best and best[0].task(Clustering).clusters == 4:
            shown[name] = best[0].model()
    if shown:
        add_streams(page, shown)
    page.section("Variance over partitions")
    page.text(
        "One set of 1,024 elements of four distributions, untrained models, 100 random partitions for each number of chunks. A "
        "consistent encoder has no variance beyond rounding."
    )
    page.figure(variance_figure(partition_variance()), "variance of the encoding")
