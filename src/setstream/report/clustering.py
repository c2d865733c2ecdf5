"""The evidence of the clustering experiment: tables, figures and an animation.

Numbers of the paper are those of its Table 1 (Willette et al., ICML 2023), on 1,024 points, where the oracle has about 1.55.
"""

from __future__ import annotations

import io
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from setstream.encode import encode
from setstream.encoder import SetEncoder
from setstream.model import SetModel
from setstream.nn import DiffEM, FSPool, SetTransformer
from setstream.pools import UMBC, ChunkMean
from setstream.report.page import Page
from setstream.report.plotting import pyplot
from setstream.report.runs import FinishedRun, by_label, mean_and_spread
from setstream.tasks.clustering.mixtures import DiagonalMixture, Sample, sample
from setstream.tasks.clustering.streams import STREAMS, predictions, stream_order
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
DISTRIBUTIONS = ("normal", "uniform", "exponential", "cauchy")


# -- (a) the table ----------------------------------------------------------------------------------------------------


def cost_of_a_chunk(model: SetModel, rounds: int = 200) -> tuple[float, float]:
    """Kilobytes that autograd keeps, and milliseconds forward, for one chunk of eight points."""
    model.eval()
    x = torch.randn(1, 8, 2)
    kept = 0

    def pack(tensor: Tensor) -> Tensor:
        nonlocal kept
        kept += tensor.numel() * tensor.element_size() if not tensor.is_leaf else 0  # weights are there anyway
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        _ = model.head(model.encoder(x)).means.sum()
    with torch.no_grad():
        times = []
        for _ in range(rounds):
            start = time.perf_counter()
            model.head(model.encoder(x))
            times.append(time.perf_counter() - start)
    return kept / 1024, 1000 * sorted(times)[rounds // 2]


def results_table(page: Page, runs: list[FinishedRun]) -> None:
    """NLL and gap of every kind of run, with the paper's beside them."""
    rows = []
    for label, group in by_label(runs).items():
        model = group[0].model()
        memory, milliseconds = cost_of_a_chunk(model)
        paper = PAPER.get(group[0].config.model)
        plain = not group[0].config.model_options and group[0].config.gradient in ("unbiased", "subset")
        same = plain and (group[0].config.gradient == "unbiased") == model.encoder.pool.consistent
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
                f"{milliseconds:.2f}",
                str(len(group)),
                f"{group[0].config.steps:,}",
            ]
        )
    rows.sort(key=lambda row: float(row[3].split()[0]))
    columns = ["model (gradient)", "MBC", "NLL", "gap to oracle", "paper's NLL", "paper's gap", "NLL given whole sets"]
    columns += ["kB kept for 8 points", "ms for 8 points", "seeds", "steps"]
    oracle = runs[0].metrics["oracle"]
    page.table(columns, rows, f"Test sets of 1,024 points in chunks of 8; the oracle has {oracle:.3f} on them. ± over seeds.")


# -- (b) NLL against the size of the test set -------------------------------------------------------------------------


@torch.no_grad()
def nll_by_size(model: SetModel, sizes: list[int], sets: int = 200, seed: int = 5) -> list[float]:
    """The gap to the oracle on test sets of each size."""
    task = Clustering()
    found = []
    for size in sizes:
        drawn = sample(sets, size, generator=torch.Generator().manual_seed(seed))
        found.append(float((task.predict(model, drawn.points).nll(drawn.points) - drawn.oracle()).mean()))
    return found


def sizes_figure(runs: list[FinishedRun], sizes: list[int]) -> Figure:
    """For each model: full, unbiased and subset gradients, gap against test set size."""
    plt = pyplot()
    names = list(dict.fromkeys(run.config.model for run in runs))
    figure, axes = plt.subplots(1, len(names), figsize=(4.2 * len(names), 3.8), constrained_layout=True, squeeze=False)
    styles = {"full": "-", "exact": "-", "unbiased": "--", "importance": "-.", "subset": ":"}
    for axis, name in zip(axes[0], names, strict=True):
        for label, group in by_label([run for run in runs if run.config.model == name]).items():
            gaps = nll_by_size(group[0].model(), sizes)
            axis.plot(sizes, gaps, styles[group[0].config.gradient] + "o", markersize=3, label=label.split("(")[1].rstrip(")"))
        axis.set(xscale="log", yscale="log", xlabel="points in a test set", title=name)
        axis.legend(fontsize=7)
    axes[0][0].set_ylabel("gap to the oracle")
    return figure


# -- (c) streams ------------------------------------------------------------------------------------------------------


def draw_mixture(axis: Any, points: Tensor, mixture: DiagonalMixture | None, title: str, seen: Tensor | None = None) -> None:
    """Points, and the ellipses of two standard deviations of a mixture."""
    from matplotlib.patches import Ellipse

    axis.clear()
    axis.scatter(*points.T, s=2, c="0.75", linewidths=0)
    if seen is not None and len(seen):
        axis.scatter(*points[seen].T, s=3, c="tab:blue", linewidths=0)
    if mixture is not None:
        weights = mixture.logits[0].softmax(-1)
        for weight, mean, scale in zip(weights.tolist(), mixture.means[0].tolist(), mixture.scales[0].tolist(), strict=True):
            alpha = 0.25 + 0.75 * min(1.0, 2 * weight)
            ellipse = Ellipse(mean[:2], 4 * scale[0], 4 * scale[1], fill=False, edgecolor="tab:red", linewidth=1.5, alpha=alpha)
            axis.add_patch(ellipse)
    axis.set(xlim=(-6, 6), ylim=(-6, 6), xticks=[], yticks=[], aspect="equal")
    axis.set_title(title, fontsize=8)


def stream_ends(models: dict[str, SetModel], drawn: Sample) -> dict[str, dict[str, DiagonalMixture]]:
    """What each model says at the end of each stream of the first set."""
    ends: dict[str, dict[str, DiagonalMixture]] = {}
    for name, model in models.items():
        for kind in STREAMS:
            chunks = stream_order(kind, drawn.labels[0], torch.Generator().manual_seed(0))
            *_, last = predictions(model, drawn.points[0], chunks)
            ends.setdefault(name, {})[kind] = last
    return ends


def disagreement(ends: dict[str, DiagonalMixture], points: Tensor) -> float:
    """How far apart the four streams' log-likelihoods of a point are: largest minus smallest, mean over the points."""
    values = torch.stack([end.log_prob(points) for end in ends.values()])
    return float((values.amax(0) - values.amin(0)).mean())


def streams_figure(models: dict[str, SetModel], drawn: Sample) -> Figure:
    """A row for each model, a column for each stream: what it says at the end."""
    plt = pyplot()
    figure, axes = plt.subplots(
        len(models), len(STREAMS), figsize=(2.3 * len(STREAMS), 2.6 * len(models)), constrained_layout=True, squeeze=False
    )
    ends = stream_ends(models, drawn)
    for row, (name, own) in zip(axes, ends.items(), strict=True):
        for axis, (kind, end) in zip(row, own.items(), strict=True):
            nll = float(end.nll(drawn.points))
            draw_mixture(axis, drawn.points[0], end, f"{kind} stream, NLL {nll:.2f}")
        row[0].set_ylabel(name, fontsize=9)
    return figure


def streams_gif(models: dict[str, SetModel], drawn: Sample, frames: int = 24) -> bytes:
    """The same, as it happens: points arrive and the ellipses follow."""
    try:
        from PIL import Image
    except ModuleNotFoundError as error:
        from setstream.errors import ConfigurationError

        raise ConfigurationError("the animation needs Pillow: pip install 'setstream[report]'") from error
    plt = pyplot()
    figure, axes = plt.subplots(len(models), len(STREAMS), figsize=(9, 2.45 * len(models)), squeeze=False)
    figure.subplots_adjust(0.03, 0.02, 0.99, 0.93, 0.05, 0.15)
    roads = {kind: stream_order(kind, drawn.labels[0], torch.Generator().manual_seed(0)) for kind in STREAMS}
    said = {(name, kind): list(predictions(models[name], drawn.points[0], roads[kind])) for name in models for kind in STREAMS}
    pictures = []
    for frame in range(1, frames + 1):
        for row, name in zip(axes, models, strict=True):
            for axis, kind in zip(row, STREAMS, strict=True):
                turn = max(0, round(frame / frames * len(roads[kind])) - 1)
                seen = torch.cat(roads[kind][: turn + 1])
                draw_mixture(axis, drawn.points[0], said[name, kind][turn], f"{name}\n{kind} stream", seen)
        buffer = io.BytesIO()
        figure.savefig(buffer, format="png", dpi=72)
        pictures.append(Image.open(buffer).convert("P", palette=Image.Palette.ADAPTIVE, colors=48))
    plt.close(figure)
    out = io.BytesIO()
    pictures[0].save(
        out, format="GIF", save_all=True, append_images=pictures[1:], duration=[160] * (frames - 1) + [2500], loop=0
    )
    return out.getvalue()


# -- (d) variance over partitions -------------------------------------------------------------------------------------


def draw_distributions(size: int, width: int, generator: torch.Generator) -> Tensor:
    """A set of which a quarter each is normal, uniform on (-3, 3), exponential and Cauchy: (1, size, width)."""
    shape = (size // 4, width)
    parts = [
        torch.randn(shape, generator=generator),
        torch.rand(shape, generator=generator) * 6 - 3,
        torch.empty(shape).exponential_(generator=generator),
        torch.empty(shape).cauchy_(generator=generator),
    ]
    return torch.cat(parts).unsqueeze(0)


@torch.no_grad()
def partition_variance(partitions: int = 100, width: int = 128, size: int = 1024) -> dict[str, dict[int, tuple[float, float]]]:
    """Variance of the encoding over random partitions, against the number of chunks: mean and deviation over its features."""
    generator = torch.Generator().manual_seed(0)
    x = draw_distributions(size, width, generator)
    torch.manual_seed(0)
    encoders = {
        "UMBC + Set Transformer": (SetEncoder(nn.Identity(), UMBC(width, 16, heads=4)), SetTransformer(width)),
        "Set Transformer": (SetEncoder(nn.Identity(), ChunkMean(SetTransformer(width), width)), nn.Identity()),
        "FSPool": (SetEncoder(nn.Identity(), ChunkMean(FSPool(width), width)), nn.Identity()),
        "Diff EM": (SetEncoder(nn.Identity(), ChunkMean(DiffEM(width, 1, 5, 3), width)), nn.Identity()),
    }
    found: dict[str, dict[int, tuple[float, float]]] = {}
    for name, (encoder, head) in encoders.items():
        encoder.eval()
        for chunks in (1, 2, 4, 8, 16, 32):
            codes = []
            for _ in range(partitions):
                z = encode(encoder, x, chunk_size=size // chunks, gradient="none", partition="random", generator=generator)
                codes.append(head(z).flatten().double())
            variance = torch.stack(codes).var(0)
            found.setdefault(name, {})[chunks] = (float(variance.mean()), float(variance.std()))
    return found


def variance_figure(found: dict[str, dict[int, tuple[float, float]]]) -> Figure:
    """The variances, on a scale that shows zero."""
    plt = pyplot()
    figure, axis = plt.subplots(figsize=(5.5, 3.6), constrained_layout=True)
    for name, values in found.items():
        chunks = list(values)
        axis.plot(chunks, [max(values[c][0], 1e-18) for c in chunks], "o-", label=name)
    axis.set(xscale="log", yscale="log", xlabel="chunks that the set was cut into", ylabel="variance over 100 partitions")
    axis.legend(fontsize=8)
    return figure


# -- all of it --------------------------------------------------------------------------------------------------------


def curves_figure(runs: list[FinishedRun], metric: str) -> Figure:
    """A test metric against the step, for every kind of run."""
    plt = pyplot()
    figure, axis = plt.subplots(figsize=(8, 4.5), constrained_layout=True)
    for number, (label, group) in enumerate(by_label(runs).items()):
        for run in group:
            steps, values = run.curve(metric)
            axis.plot(steps, values, color=f"C{number % 10}", linestyle=["-", "--", ":"][number // 10 % 3], linewidth=1)
        axis.plot([], [], color=f"C{number % 10}", linestyle=["-", "--", ":"][number // 10 % 3], label=label)
    axis.set(xlabel="step", ylabel=metric, yscale="log")
    axis.legend(fontsize=6, ncol=2)
    return figure


def add_evidence(page: Page, runs: list[FinishedRun], *, em_sets: int = 50) -> None:
    """Everything that the paper shows of this experiment, from finished runs."""
    page.section("Results")
    results_table(page, runs)
    page.figure(curves_figure(runs, "gap"), "gap to the oracle while training")
    activations = [r for r in runs if r.config.model == "umbc+set-transformer" and r.config.gradient == "unbiased"]
    if len({r.config.model_options.get("activation", "softmax") for r in activations}) > 1:
        page.section("Activations")
        rows = [
            [str(g[0].config.model_options.get("activation", "softmax")), mean_and_spread([r.metrics["gap"] for r in g])]
            for g in by_label(activations).values()
        ]
        page.table(["activation", "gap to oracle"], sorted(rows, key=lambda row: row[1]))
    compared = [r for r in runs if r.config.model in ("deepsets", "sse", "umbc+set-transformer") and not r.config.model_options]
    if compared:
        page.section("Against the size of the test set")
        page.figure(sizes_figure(compared, [64, 128, 256, 512, 1024, 2048]), "gap by test set size and gradient")
    if em_sets:
        from setstream.tasks.clustering.classical import em_nll

        drawn = sample(em_sets, 1024, generator=torch.Generator().manual_seed(9))
        gap = em_nll(drawn.points) - drawn.oracle()
        page.section("The classical yardstick")
        page.text(
            f"scikit-learn's EM (diagonal, best of ten starts, fitted to each test set by itself): gap {float(gap.mean()):.3f} "
            f"± {float(gap.std()) / em_sets**0.5:.3f} on {em_sets} sets of 1,024."
        )
    shown = {}
    for name in ("umbc+set-transformer", "set-transformer"):
        best = sorted((r for r in runs if r.config.model == name), key=lambda r: r.metrics["gap"])
        if best:
            shown[name] = best[0].model()
    if shown:
        add_streams(page, shown)
    page.section("Variance over partitions")
    page.text(
        "One set of 1,024 elements of four distributions, untrained models, 100 random partitions for each number of chunks. A "
        "consistent encoder has no variance beyond rounding."
    )
    page.figure(variance_figure(partition_variance()), "variance of the encoding")


def add_streams(page: Page, models: dict[str, SetModel], seed: int = 3, points: int = 512) -> tuple[Figure, bytes]:
    """The four streams as a figure and an animation."""
    drawn = sample(1, points, generator=torch.Generator().manual_seed(seed))
    figure, gif = streams_figure(models, drawn), streams_gif(models, drawn)
    page.section("Four streams of one set")
    rows = []
    for name, ends in stream_ends(models, drawn).items():
        nlls = [f"{float(end.nll(drawn.points)):.3f}" for end in ends.values()]
        rows.append([name, *nlls, f"{disagreement(ends, drawn.points):.1e}"])
    oracle = float(drawn.oracle())
    page.table(["model", *(f"{kind} stream" for kind in STREAMS), "disagreement"], rows, f"NLL; the oracle has {oracle:.3f}.")
    page.figure(figure, "what each model says at the end of each stream")
    page.picture(gif, "gif", "the same, as points arrive")
    return figure, gif


def save(content: bytes, path: Path) -> None:
    """Write bytes, making the folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
