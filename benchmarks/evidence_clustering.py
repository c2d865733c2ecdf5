"""The evidence for docs/results/clustering.md: gradients and activations of finished runs, EM, and consistency.

    python benchmarks/evidence.py clustering runs/clustering runs/clustering-gradients --out evidence.html --figures figures

- Memory of one chunk, and learning curves by number of steps.
- Gradients, activations: how far runs are from the full gradient on the same test sets, and gaps by test set size.
- EM: scikit-learn's expectation maximisation (diagonal, best of ten starts), fitted to each test set: its gap to the oracle.
- Consistency: the variance of an encoding over random partitions of its set, for untrained models. It is zero, within
  rounding, for consistent encoders.
"""

from __future__ import annotations

import statistics
import warnings
from typing import TYPE_CHECKING

import torch
from benchmarks.evidence_common import by_steps, kept_bytes
from sklearn.exceptions import ConvergenceWarning
from sklearn.mixture import GaussianMixture
from torch import Tensor, nn

from setstream.models.encoder import SetEncoder
from setstream.models.model import SetModel
from setstream.nn import DiffEM, FSPool, SetTransformer
from setstream.pools import UMBC, ChunkMean
from setstream.report.page import Page, pyplot
from setstream.report.runs import FinishedRun, add_runs, by_label, curves_figure, group_by, mean_of, metric
from setstream.tasks.clustering import Clustering, sample
from setstream.tasks.registry import predict_in_chunks

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MODEL = "umbc+set-transformer"
SIZES = [64, 128, 256, 512, 1024, 2048]
CHUNKS = (1, 2, 4, 8, 16, 32)
#: How each gradient is drawn.
LINES = {"full": "-", "exact": "-", "unbiased": "--", "importance": "-.", "subset": ":"}


def gaps(run: FinishedRun) -> Tensor:
    """The gap to the oracle on each of the run's test sets."""
    task = run.task_as(Clustering)
    return task.nll(run.model(), task.tests) - torch.cat([test.oracle() for test in task.tests])


def add_differences(page: Page, runs: list[FinishedRun]) -> None:
    """How far each gradient's model is from that of the full gradient, on the same test sets."""
    found = {label: torch.stack([gaps(run) for run in group]) for label, group in by_label(runs).items()}
    full = next(label for label, group in by_label(runs).items() if group[0].config.gradient == "full")
    rows = []
    for label, gap in sorted(found.items(), key=lambda item: float(item[1].mean())):
        difference = gap.mean(0) - found[full].mean(0)
        error = float(difference.std() / len(difference) ** 0.5)
        seeds = f"{float(gap.mean(1).std()):.3f}" if len(gap) > 1 else ""
        rows.append([label, f"{float(gap.mean()):.3f}", f"{float(difference.mean()):+.4f} ± {error:.4f}", seeds])
    page.table(
        ["model (gradient)", "gap to oracle", "minus the full gradient's", "standard deviation over seeds"],
        rows,
        "± is the standard error of the difference over the test sets; it does not include the variation between seeds.",
    )


def gap_by_size(run: FinishedRun, size: int, sets: int = 200, seed: int = 5) -> float:
    """The gap to the oracle on test sets of `size` points."""
    task = run.task_as(Clustering)
    drawn = task.draw(sets, size, torch.Generator().manual_seed(seed))
    return float((task.nll(run.model(), [drawn]) - drawn.oracle()).mean())


def sizes_figure(runs: list[FinishedRun]) -> Figure:
    """For each model, the gap against the test set size, one line per gradient."""
    models = group_by(runs, lambda run: run.config.model)
    figure, axes = pyplot().subplots(1, len(models), figsize=(4.2 * len(models), 3.8), constrained_layout=True, squeeze=False)
    for axis, (name, model_runs) in zip(axes[0], models.items(), strict=True):
        for label, group in by_label(model_runs).items():
            means = [statistics.mean(gap_by_size(run, size) for run in group) for size in SIZES]
            axis.plot(SIZES, means, LINES[group[0].config.gradient] + "o", markersize=3, label=label.split("(")[1].rstrip(")"))
        axis.set(xscale="log", yscale="log", xlabel="points in a test set", title=name)
        axis.legend(fontsize=7)
    axes[0][0].set_ylabel("gap to the oracle")
    return figure


def add_gradients(page: Page, runs: list[FinishedRun]) -> None:
    """Curves, differences and gaps by test set size, for each number of steps with which several gradients were tried."""
    compared = [run for run in runs if run.config.model in ("deepsets", "sse", MODEL) and not run.config.model_options]
    for steps, same_steps in by_steps(compared).items():
        if len({run.config.gradient for run in same_steps}) < 2:
            continue
        page.section(f"Gradients, {steps:,} steps")
        umbc = [run for run in same_steps if run.config.model == MODEL]
        if any(run.config.gradient == "full" for run in umbc):
            add_differences(page, umbc)
            page.figure(curves_figure(umbc, "gap", ylabel="gap", yscale="log"), f"gap to the oracle during training, {MODEL}")
        page.figure(sizes_figure(same_steps), "gap by test set size and gradient; means over seeds")


def add_activations(page: Page, runs: list[FinishedRun]) -> None:
    """A table of activations, where several were tried."""
    tried = [run for run in runs if run.config.model == MODEL and run.config.gradient == "unbiased"]
    for steps, same_steps in by_steps(tried).items():
        groups = {str(g[0].config.model_options.get("activation", "softmax")): g for g in by_label(same_steps).values()}
        if len(groups) > 1:
            page.section(f"Activations, {steps:,} steps")
            add_runs(page, groups, {"gap to oracle": metric("gap")}, order=mean_of("gap"), first="activation")


def kept_kilobytes(group: list[FinishedRun]) -> str:
    """What autograd keeps for one chunk of eight points."""
    model, points = group[0].model(), torch.randn(1, 8, group[0].task_as(Clustering).dim)
    return f"{kept_bytes(lambda: model.head(model.encoder(points)).means.sum(), model.parameters()) / 1024:.0f}"


def em_nll(points: Tensor, clusters: int = 4, starts: int = 10, seed: int = 0) -> Tensor:
    """The NLL (B,) of each set's points (B, N, D) under a diagonal mixture that EM fitted to that set.

    EM is fitted to the points that it is tested on, so its NLL may be below the oracle's: the best mixture for a sample fits
    it better than the mixture that it was drawn from.
    """
    values = []
    for rows in points.double().cpu().numpy():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ConvergenceWarning)
            fit = GaussianMixture(clusters, covariance_type="diag", n_init=starts, random_state=seed).fit(rows)
        values.append(-float(fit.score(rows)))
    return points.new_tensor(values)


def draw_distributions(size: int, width: int, generator: torch.Generator) -> Tensor:
    """A set (1, size, width): a quarter each is normal, uniform on (-3, 3), exponential and Cauchy."""
    shape = (size // 4, width)
    parts = [
        torch.randn(shape, generator=generator),
        torch.rand(shape, generator=generator) * 6 - 3,
        torch.empty(shape).exponential_(generator=generator),
        torch.empty(shape).cauchy_(generator=generator),
    ]
    return torch.cat(parts).unsqueeze(0)


@torch.no_grad()
def partition_variance(partitions: int = 100, width: int = 128, size: int = 1024) -> dict[str, dict[int, float]]:
    """For each model and number of chunks: the variance of the encoding over random partitions, mean over its features."""
    generator = torch.Generator().manual_seed(0)
    x = draw_distributions(size, width, generator)
    torch.manual_seed(0)
    models = {
        "UMBC + Set Transformer": SetModel(SetEncoder(nn.Identity(), UMBC(width, 16, heads=4)), SetTransformer(width)),
        "Set Transformer": SetModel(SetEncoder(nn.Identity(), ChunkMean(SetTransformer(width), width)), nn.Identity()),
        "FSPool": SetModel(SetEncoder(nn.Identity(), ChunkMean(FSPool(width), width)), nn.Identity()),
        "Diff EM": SetModel(SetEncoder(nn.Identity(), ChunkMean(DiffEM(width, 1, 5, 3), width)), nn.Identity()),
    }
    variances: dict[str, dict[int, float]] = {name: {} for name in models}
    for name, model in models.items():
        for chunks in CHUNKS:
            orders = [torch.randperm(size, generator=generator) for _ in range(partitions)]
            codes = [predict_in_chunks(model, x[:, order].chunk(chunks, dim=1)).flatten().double() for order in orders]
            variances[name][chunks] = float(torch.stack(codes).var(0).mean())
    return variances


def variance_figure(variances: dict[str, dict[int, float]]) -> Figure:
    """The variances against the number of chunks."""
    figure, axis = pyplot().subplots(figsize=(5.5, 3.6), constrained_layout=True)
    for name, values in variances.items():
        axis.plot(list(values), [max(value, 1e-18) for value in values.values()], "o-", label=name)
    axis.set(xscale="log", yscale="log", xlabel="number of chunks", ylabel="variance over partitions")
    axis.legend(fontsize=8)
    return figure


def add_evidence(page: Page, runs: list[FinishedRun], em_sets: int = 50, partitions: int = 100) -> None:
    """All of it."""
    for options, same_task in group_by(runs, lambda run: str(run.config.task_options)).items():
        page.section(f"Memory, task options {options}")
        add_runs(page, by_label(same_task), {"kB kept for 8 points": kept_kilobytes})
        for steps, same_steps in by_steps(same_task).items():
            page.figure(
                curves_figure(same_steps, "gap", ylabel="gap", yscale="log"),
                f"gap to the oracle during training, {steps:,} steps",
            )
        add_activations(page, same_task)
        add_gradients(page, same_task)
    drawn = sample(em_sets, 1024, generator=torch.Generator().manual_seed(9))
    gap = em_nll(drawn.points) - drawn.oracle()
    page.section("EM")
    error = float(gap.std()) / em_sets**0.5
    page.text(f"Fitted to each test set: gap {float(gap.mean()):.3f} ± {error:.3f} on {em_sets} sets of 1,024 points.")
    page.section("Variance over partitions")
    page.text(f"A set of 1,024 elements, untrained models, {partitions} random partitions for each number of chunks.")
    page.figure(variance_figure(partition_variance(partitions)), "variance of the encoding")
