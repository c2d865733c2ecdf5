"""The report of document runs: F1, memory and time, and F1 by the length of the document."""

import statistics
from pathlib import Path

import torch

from setstream.report.page import Page, pyplot
from setstream.report.runs import CONSISTENT, SEEDS, FinishedRun, add_runs, by_label, group_by, kept_bytes, mean_of, metric
from setstream.tasks.documents.task import Documents
from setstream.training.task import Encode

TUNED = {"": "", "_tuned": ", tuned τ"}
METRICS = {f"{mean} F1{text}": metric(f"{mean}_f1{suffix}") for suffix, text in TUNED.items() for mean in ("micro", "macro")}


def corpus_of(run: FinishedRun) -> str:
    """The corpus of a run."""
    return str(run.config.task_options.get("corpus", "reuters"))


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
    """The statistics of a corpus; F1, memory and time of every kind of run, with its first stage; F1 by length."""

    def stages(run: FinishedRun) -> list[FinishedRun]:
        return [*(other for other in every if other.folder.name == first_stage(run)), run]

    def minutes(group: list[FinishedRun]) -> str:
        return f"{statistics.mean(sum(stage.seconds() for stage in stages(run)) for run in group) / 60:.1f}"

    task, groups = every[0].task_as(Documents), by_label(last_stages(every))
    numbers = task.statistics()
    page.table(list(numbers), [[f"{number:,.1f}".removesuffix(".0") for number in numbers.values()]])
    columns = CONSISTENT | METRICS
    columns |= {"micro F1, 95%": lambda group: "{micro_f1_low:.3f} to {micro_f1_high:.3f}".format(**group[0].metrics)}
    columns |= {"MiB kept": kept_mib, "minutes": minutes} | SEEDS
    columns |= {"steps": lambda group: " + ".join(f"{stage.config.steps:,}" for stage in stages(group[0]))}
    note = f"{len(task.splits['test']):,} test documents. ± over seeds; the interval is the first seed's,"
    note += " over test documents. MiB kept: by autograd for one batch. Minutes: of training, all stages."
    add_runs(page, groups, columns, note, order=lambda group: -mean_of("micro_f1")(group))
    figure, axis = pyplot().subplots(figsize=(7, 4.5), constrained_layout=True)
    medians = [int(task.lengths("test")[rows].median()) for rows in task.fifths()]
    for label, group in groups.items():
        means = [mean_of(f"micro_f1_fifth_{number + 1}")(group) for number in range(len(medians))]
        axis.plot(medians, means, "o-", markersize=3, label=label)
    axis.set(xscale="log", xlabel="tokens of a test document (median of a fifth of them)", ylabel="micro F1")
    figure.legend(loc="outside lower center", ncols=2, fontsize=7)
    page.figure(figure, "Micro F1 against the length of the document")


def add_report(page: Page, runs: list[FinishedRun]) -> None:
    """A section for each corpus."""
    for corpus, every in group_by(runs, corpus_of).items():
        page.section(f"Documents: {corpus}")
        add_corpus(page, every)
