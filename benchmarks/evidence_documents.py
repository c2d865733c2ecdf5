"""The evidence for docs/results/documents.md, from finished runs: sizes of corpora, memory and time, F1 by
the length of the document and by the size of the gradient set, and the words of slots.

python benchmarks/evidence.py documents runs/documents --out evidence.html --figures figures
"""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from benchmarks.evidence_common import corpus_sizes, kept_bytes, plot_ranges, seconds
from torch import Tensor

from setstream.models.model import SetModel
from setstream.report.page import Page, pyplot
from setstream.report.runs import SEEDS, FinishedRun, add_runs, by_label, group_by, mean_of
from setstream.tasks.documents.language import tokenizer_of
from setstream.tasks.documents.task import METRICS, Documents
from setstream.training.task import Encode

if TYPE_CHECKING:
    from matplotlib.figure import Figure

WITH_SLOTS = ("umbc+bert", "umbc+anchors+bert")


def first_stage(run: FinishedRun) -> str | None:
    """The name of the folder whose weights a run was initialised from."""
    return Path(run.config.init_from).name if run.config.init_from else None


def last_stages(runs: list[FinishedRun]) -> list[FinishedRun]:
    """Runs that are not the first stage of another one."""
    begun = {first_stage(run) for run in runs}
    return [run for run in runs if run.folder.name not in begun]


def kept_mib(group: list[FinishedRun]) -> str:
    """What one training step keeps for its backward pass, in MiB, without weights and optimiser state."""
    config, task, model = group[0].config, group[0].task_as(Documents), group[0].model().train()
    batch = task.batch(0, config.batch, torch.Generator())
    encode = Encode(config.gradient, config.chunk_size, config.grad_chunks, features=config.features)
    return f"{kept_bytes(lambda: task.loss(model, batch, encode), model.parameters()) / 2**20:.0f}"


def add_corpus(page: Page, every: list[FinishedRun]) -> None:
    """The sizes of a corpus; memory and time of every kind of run, with its first stage; F1 by the length of the document."""

    def stages(run: FinishedRun) -> list[FinishedRun]:
        return [*(other for other in every if other.folder.name == first_stage(run)), run]

    def minutes(group: list[FinishedRun]) -> str:
        return f"{statistics.mean(sum(seconds(stage) for stage in stages(run)) for run in group) / 60:.1f}"

    task, groups = every[0].task_as(Documents), by_label(last_stages(every))
    numbers = corpus_sizes(task)
    page.table(list(numbers), [[f"{number:,.1f}".removesuffix(".0") for number in numbers.values()]])
    columns = METRICS | {"MiB kept": kept_mib, "minutes": minutes} | SEEDS
    columns |= {"steps": lambda group: " + ".join(f"{stage.config.steps:,}" for stage in stages(group[0]))}
    note = "± over seeds. MiB kept: by autograd for one batch. Minutes: of training, all stages."
    add_runs(page, groups, columns, note, order=lambda group: -mean_of("micro_f1")(group))
    figure, axis = pyplot().subplots(figsize=(7, 4.5), constrained_layout=True)
    medians = [int(task.lengths("test")[rows].median()) for rows in task.fifths()]
    for label, group in groups.items():
        means = [mean_of(f"micro_f1_fifth_{number + 1}")(group) for number in range(len(medians))]
        axis.plot(medians, means, "o-", markersize=3, label=label)
    axis.set(xscale="log", xlabel="tokens of a test document (median of a fifth of them)", ylabel="micro F1")
    figure.legend(loc="outside lower center", ncols=2, fontsize=7)
    page.figure(figure, "Micro F1 against the length of the document")


def gradient_sets(runs: list[FinishedRun]) -> set[tuple[str, int]]:
    """The gradient modes, and the words that carry the gradient in each."""
    return {(run.config.gradient, run.config.chunk_size * run.config.grad_chunks) for run in runs}


def same_schedule(runs: list[FinishedRun]) -> list[FinishedRun]:
    """Of runs of different models, stages or lengths, those of the model and schedule with the most gradient sets."""
    schedules = group_by(
        runs, lambda run: (run.config.model, run.config.steps, run.config.init_from is None, len(run.config.freeze))
    )
    return max(schedules.values(), key=lambda group: len(gradient_sets(group)), default=[])


def sizes_figure(runs: list[FinishedRun]) -> Figure:
    """Micro F1 against the words that carry a gradient, one line per gradient mode; full gradients as a level."""
    figure, axis = pyplot().subplots(figsize=(6, 4), constrained_layout=True)
    for gradient, group in group_by(runs, lambda run: run.config.gradient).items():
        sizes = group_by(group, lambda run: run.config.chunk_size * run.config.grad_chunks)
        values = {size: [run.metrics["micro_f1"] for run in same] for size, same in sizes.items()}
        if gradient in ("full", "exact"):
            level = [value for same in values.values() for value in same]
            axis.axhline(sum(level) / len(level), color="0.6", linewidth=1, label=gradient)
        else:
            plot_ranges(axis, values, gradient)
    axis.set(xscale="log", xlabel="words of a document that carry the gradient", ylabel="micro F1")
    axis.legend()
    return figure


@torch.no_grad()
def word_weights(model: SetModel, document: Tensor) -> tuple[Tensor, Tensor]:
    """The distinct words of a document (V,), and the share of each slot's attention on each: (K, V), rows sum to one."""
    encoder = model.encoder
    state = encoder.update(None, document.unsqueeze(0))
    weights = encoder.attention(document.unsqueeze(0), state)[0].mean(0)  # (K, N): the mean over heads
    ids, place = document.unique(return_inverse=True)
    shares = torch.zeros(len(weights), len(ids), dtype=weights.dtype).index_add_(1, place, weights)
    return ids, shares / shares.sum(1, keepdim=True)


def slots_figure(task: Documents, model: SetModel, number: int, slots: int = 12, words: int = 2) -> Figure:
    """Of one test document: the slots that differ most from the mean slot, and the `words` that each prefers most.

    A slot differs by Σ_v w_v log2(w_v / u_v), with w its weights and u those of the mean slot; a word by its term.
    """
    ids, weights = word_weights(model, task.tokens.document(task.splits["test"].index[number]))
    usual = weights.mean(0)
    excess = (weights / usual).log2()  # how many times more than the mean slot, as a power of two
    terms = torch.where(weights > 0, weights * excess, 0.0)
    rows = terms.sum(1).topk(min(slots, len(weights))).indices
    preferred = terms[rows].topk(min(words, len(ids)), 1).indices.flatten().tolist()
    chosen = torch.tensor(list(dict.fromkeys(preferred)))  # a slot's words together, each word once
    names = tokenizer_of(task.bert).convert_ids_to_tokens(ids[chosen].tolist())
    figure, axis = pyplot().subplots(figsize=(1 + 0.3 * len(chosen), 1.6 + 0.22 * len(rows)), constrained_layout=True)
    shown = excess[rows][:, chosen]
    largest = max(float(shown.max()), 1e-6)
    picture = axis.imshow(shown.clamp(min=-largest).numpy(), cmap="RdBu_r", vmin=-largest, vmax=largest, aspect="auto")
    axis.set_xticks(range(len(names)), names, rotation=60, ha="right", fontsize=7)
    axis.set_yticks(range(len(rows)), [f"slot {row}" for row in rows.tolist()], fontsize=7)
    carried = task.splits["test"].labels[number].nonzero().flatten().tolist()
    axis.set_title(", ".join(task.labels[place] for place in carried), fontsize=8)
    figure.colorbar(picture, ax=axis, label="log2 of weight over mean slot's")
    return figure


def add_evidence(page: Page, runs: list[FinishedRun]) -> None:
    """For each corpus: gradients with one schedule, and the words of the best model's slots in three test documents."""
    for corpus, every in group_by(runs, lambda run: run.config.task_options.get("corpus", "reuters")).items():
        page.section(f"Documents: {corpus}")
        add_corpus(page, every)
        task = every[0].task_as(Documents)
        alike = same_schedule([run for run in every if run.config.model in WITH_SLOTS])
        if len(gradient_sets(alike)) > 2:
            add_runs(page, by_label(alike), METRICS | SEEDS, f"{alike[0].config.steps:,} steps each; ± over seeds.")
            about = f"{alike[0].config.model}: micro F1 against the size of the gradient set; bars from lowest to highest"
            page.figure(sizes_figure(alike), about)
        final = [run for run in last_stages(every) if run.config.model in WITH_SLOTS]
        if final:
            model, tests = max(final, key=lambda run: run.metrics["micro_f1"]).model(), len(task.splits["test"])
            for number in sorted({0, tests // 2, tests - 1}):
                about = "Words that slots attend to more (red) or less than the mean slot"
                page.figure(slots_figure(task, model, number), about)
