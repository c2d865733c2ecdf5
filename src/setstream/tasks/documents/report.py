"""The evidence of the document experiment: F1 and memory, gradient sets, lengths of documents, and the words of slots."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from setstream.models.model import SetModel
from setstream.report.costs import kept_bytes
from setstream.report.page import Page
from setstream.report.plotting import pyplot
from setstream.report.runs import FinishedRun, by_label, mean_and_spread
from setstream.tasks.documents.language import tokenizer_of
from setstream.tasks.documents.task import Documents
from setstream.training.task import Encode

if TYPE_CHECKING:
    from matplotlib.figure import Figure

WITH_SLOTS = ("umbc+bert", "umbc+anchors+bert")
METRICS = ("micro_f1", "macro_f1", "micro_f1_tuned", "macro_f1_tuned")


def last_stages(runs: list[FinishedRun]) -> list[FinishedRun]:
    """Runs that no other one begins with: the first of two stages is no result."""
    begun = {Path(run.config.init_from).name for run in runs if run.config.init_from}
    return [run for run in runs if run.folder.name not in begun]


def same_schedule(runs: list[FinishedRun]) -> list[FinishedRun]:
    """Of runs of different models, stages or lengths, those of the model and schedule with the most gradient sets."""
    schedules: dict[tuple[object, ...], list[FinishedRun]] = {}
    for run in runs:
        own = run.config
        schedules.setdefault((own.model, own.steps, own.init_from is None, len(own.freeze)), []).append(run)
    return max(schedules.values(), key=lambda own: len(gradient_sets(own)), default=[])


def gradient_sets(runs: list[FinishedRun]) -> set[tuple[str, int]]:
    """The ways of training, and the words that carry the gradient in each."""
    return {(run.config.gradient, run.config.chunk_size * run.config.grad_chunks) for run in runs}


def stages(run: FinishedRun, runs: list[FinishedRun]) -> list[FinishedRun]:
    """The run that a run began with, if it is among the others, and the run."""
    began = Path(run.config.init_from).name if run.config.init_from else None
    return [*(own for own in runs if own.folder.name == began), run]


def kept_mib(run: FinishedRun) -> float:
    """What one training step keeps for its way back, in MiB; weights and moments are there anyway."""
    config, task = run.config, run.task(Documents)
    model = run.model().train()
    batch = task.batch(0, config.batch, torch.Generator())
    own = Encode(config.gradient, config.chunk_size, config.grad_chunks, features=config.features)
    return kept_bytes(lambda: task.loss(model, batch, own), model.parameters()) / 2**20


def results_table(page: Page, runs: list[FinishedRun], every: list[FinishedRun]) -> None:
    """F1 at 0.5 and at the tuned threshold, memory and time, of every kind of run; `every`: first stages, too."""
    task = runs[0].task(Documents)
    rows = []
    for label, group in by_label(runs).items():
        cells = [mean_and_spread([run.metrics[name] for run in group]) for name in METRICS]
        first = group[0]
        interval = f"{first.metrics['micro_f1_low']:.3f} to {first.metrics['micro_f1_high']:.3f}"
        consistent = "yes" if first.model().encoder.pool.consistent else "no"
        seconds = [sum(stage.seconds() for stage in stages(run, every)) for run in group]
        steps = " + ".join(f"{stage.config.steps:,}" for stage in stages(first, every))
        costs = [f"{kept_mib(first):.0f}", f"{sum(seconds) / len(seconds) / 60:.1f}"]
        rows.append([label, consistent, *cells, interval, *costs, str(len(group)), steps])
    rows.sort(key=lambda row: -float(row[2].split()[0]))
    columns = ["model (gradient)", "MBC", "micro F1", "macro F1", "micro F1, tuned τ", "macro F1, tuned τ"]
    columns += ["micro F1, 95%", "MiB kept", "minutes", "seeds", "steps"]
    note = "± over seeds; the interval is that of the first seed over test documents. MiB kept: by autograd for one batch."
    note += " Minutes: of training, all stages."
    page.table(columns, rows, f"On {len(task.splits['test']):,} test documents. {note}")


def gradients_table(page: Page, runs: list[FinishedRun]) -> None:
    """F1 of every way of training one model with one schedule."""
    rows = [
        [label, *(mean_and_spread([run.metrics[name] for run in group]) for name in METRICS), str(len(group))]
        for label, group in by_label(runs).items()
    ]
    columns = ["model (gradient)", "micro F1", "macro F1", "micro F1, tuned τ", "macro F1, tuned τ", "seeds"]
    page.table(columns, rows, f"{runs[0].config.steps:,} steps each; ± over seeds.")


def sizes_figure(runs: list[FinishedRun]) -> Figure:
    """Micro F1 against the words that carry a gradient, one line for each way of training; full gradients as a level."""
    plt = pyplot()
    figure, axis = plt.subplots(figsize=(6, 4), constrained_layout=True)
    found: dict[str, dict[int, list[float]]] = {}
    for run in runs:
        size = 0 if run.config.gradient in ("full", "exact") else run.config.chunk_size * run.config.grad_chunks
        found.setdefault(run.config.gradient, {}).setdefault(size, []).append(run.metrics["micro_f1"])
    for gradient, sizes in found.items():
        if 0 in sizes:
            axis.axhline(sum(sizes[0]) / len(sizes[0]), color="0.6", linewidth=1, label=gradient)
            continue
        places = sorted(sizes)
        means = [sum(sizes[place]) / len(sizes[place]) for place in places]
        below = [mean - min(sizes[place]) for mean, place in zip(means, places, strict=True)]
        above = [max(sizes[place]) - mean for mean, place in zip(means, places, strict=True)]
        axis.errorbar(places, means, [below, above], marker="o", capsize=3, label=gradient)
    axis.set(xscale="log", xlabel="words of a document that carry the gradient", ylabel="micro F1")
    axis.legend()
    drawn: Figure = figure
    return drawn


def lengths_figure(runs: list[FinishedRun]) -> Figure:
    """Micro F1 against the length of the document, a line for each kind of run."""
    plt = pyplot()
    figure, axis = plt.subplots(figsize=(7, 4.5), constrained_layout=True)
    task = runs[0].task(Documents)
    lengths = task.lengths("test")
    places = [int(lengths[rows].median()) for rows in task.fifths()]
    for label, group in by_label(runs).items():
        fifths = [f"micro_f1_fifth_{number + 1}" for number in range(len(places))]
        means = [sum(run.metrics[name] for run in group) / len(group) for name in fifths]
        axis.plot(places, means, "o-", markersize=3, label=label)
    axis.set(xscale="log", xlabel="tokens of a test document (middle of a fifth of them)", ylabel="micro F1")
    figure.legend(loc="outside lower center", ncols=2, fontsize=7)
    drawn: Figure = figure
    return drawn


@torch.no_grad()
def word_weights(model: SetModel, document: Tensor) -> tuple[Tensor, Tensor]:
    """The different words of a document (V,), and the share of each slot's attention that each has: (K, V), rows sum to one."""
    encoder = model.encoder
    state = encoder.update(None, document.unsqueeze(0))
    weights = encoder.attention(document.unsqueeze(0), state)[0].mean(0)  # (K, N): the mean over heads
    ids, place = document.unique(return_inverse=True)
    found = torch.zeros(len(weights), len(ids), dtype=weights.dtype).index_add_(1, place, weights)
    return ids, found / found.sum(1, keepdim=True)


def slots_figure(task: Documents, model: SetModel, number: int, slots: int = 12, words: int = 2) -> Figure:
    """Of one test document: the slots that differ most from the mean slot, and the `words` that each prefers most.

    A slot differs by Σ_v w_v log2(w_v / u_v), with w its weights and u those of the mean slot; a word by its term.
    """
    plt = pyplot()
    ids, weights = word_weights(model, task.tokens.document(task.splits["test"].index[number]))
    usual = weights.mean(0)
    excess = (weights / usual).log2()  # how many times more than the mean slot, as a power of two
    terms = torch.where(weights > 0, weights * excess, 0.0)
    rows = terms.sum(1).topk(min(slots, len(weights))).indices
    preferred = terms[rows].topk(min(words, len(ids)), 1).indices.flatten().tolist()
    chosen = torch.tensor(list(dict.fromkeys(preferred)))  # a slot's words together, each word once
    names = tokenizer_of(task.bert).convert_ids_to_tokens(ids[chosen].tolist())
    figure, axis = plt.subplots(figsize=(1 + 0.3 * len(chosen), 1.6 + 0.22 * len(rows)), constrained_layout=True)
    shown = excess[rows][:, chosen]
    largest = max(float(shown.max()), 1e-6)
    picture = axis.imshow(shown.clamp(min=-largest).numpy(), cmap="RdBu_r", vmin=-largest, vmax=largest, aspect="auto")
    axis.set_xticks(range(len(names)), names, rotation=60, ha="right", fontsize=7)
    axis.set_yticks(range(len(rows)), [f"slot {row}" for row in rows.tolist()], fontsize=7)
    own = task.splits["test"].labels[number].nonzero().flatten().tolist()
    axis.set_title(", ".join(task.labels[place] for place in own), fontsize=8)
    figure.colorbar(picture, ax=axis, label="log2 of weight over mean slot's")
    drawn: Figure = figure
    return drawn


def add_evidence(page: Page, runs: list[FinishedRun]) -> None:
    """Everything that the paper shows of this experiment, for each corpus on its own."""
    corpora: dict[str, list[FinishedRun]] = {}
    for run in runs:
        corpora.setdefault(str(run.config.task_options.get("corpus", "reuters")), []).append(run)
    for corpus, every in corpora.items():
        page.section(f"Documents: {corpus}")
        own, task = last_stages(every), every[0].task(Documents)
        numbers = task.statistics().items()
        page.table([name for name, _ in numbers], [[f"{number:,.1f}".removesuffix(".0") for _, number in numbers]])
        alike = same_schedule([run for run in every if run.config.model in WITH_SLOTS])
        compared = len(gradient_sets(alike)) > 2
        final = [run for run in own if run not in alike]
        if compared and any(run.config.model == alike[0].config.model for run in final):
            own = final  # runs of a first stage alone that compare gradients have a table of their own
        results_table(page, own, every)
        if compared:
            name = alike[0].config.model
            gradients_table(page, alike)
            page.figure(sizes_figure(alike), f"{name}: micro F1 against the size of the gradient set; bars from worst to best")
        umbc = [run for run in own if run.config.model in WITH_SLOTS]
        page.figure(lengths_figure(own), "Micro F1 against the length of the document")
        if umbc:
            best = max(umbc, key=lambda run: run.metrics["micro_f1"])
            model, tests = best.model(), len(task.splits["test"])
            for number in sorted({0, tests // 2, tests - 1}):
                page.figure(
                    slots_figure(task, model, number), "Words that slots attend to more (red) or less than the mean slot"
                )
