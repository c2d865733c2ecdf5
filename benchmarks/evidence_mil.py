"""The evidence for docs/results/mil.md and passes.md from the folds of a cross-validation: models by streams, activations, and
what more passes over a bag change.

    python benchmarks/evidence.py mil runs/mil-released --out evidence.html

Means over folds with 95 % intervals over folds, as `setstream crossval` has them. Rows without all folds are left out.
"""

import statistics

from setstream.cli.crossval import summarise
from setstream.report.page import Page
from setstream.report.runs import FinishedRun, Group, group_by

METRICS = ("accuracy", "auroc")


def described(run: FinishedRun) -> str:
    """The model with its streams, its passes and its activation."""
    options = run.config.model_options
    two = options.get("two_stream", run.config.model.endswith("-released"))
    streams = ("two streams" if two else "one stream") + ("" if passes_of(run) == 1 else f", {passes_of(run)} passes")
    forms = {None: "", True: ", normalised", False: ", summed"}
    activation = f", {options['activation']}{forms[options.get('normalise')]}" if "activation" in options else ""
    return f"{run.config.model}, {streams}{activation}"


def passes_of(run: FinishedRun) -> int:
    """How often the run's model reads a bag."""
    passes: int = run.config.model_options.get("passes", 1)
    return passes


def complete(runs: Group) -> dict[int, Group]:
    """The runs by repeat, those of complete repeats only, each with its folds in order."""
    repeats = group_by(runs, lambda run: run.config.task_options.get("repeat", 0))
    found = {}
    for repeat, folds in sorted(repeats.items()):
        folds = sorted(folds, key=lambda run: run.config.task_options["fold"])
        if [run.config.task_options["fold"] for run in folds] == list(range(folds[0].config.task_options["count"])):
            found[repeat] = folds
    return found


def rows_of(runs: list[FinishedRun]) -> list[list[str]]:
    """Data, model, repeats, steps, and each metric with its interval; best AUROC of each data set first."""
    rows = []
    for (data, name), group in group_by(runs, lambda run: (run.config.task_options["data"], described(run))).items():
        if repeats := complete(group):
            folds = [run for repeat in repeats.values() for run in repeat]
            scores = summarise([run.metrics for run in folds], len(repeats))
            cells = ["{mean:.3f} [{low:.3f}, {high:.3f}]".format(**scores[metric]) for metric in METRICS]
            rows.append((data, -scores["auroc"]["mean"], [data, name, str(len(repeats)), f"{folds[0].config.steps:,}", *cells]))
    order = list(dict.fromkeys(data for data, *_ in rows))
    return [row for _, _, row in sorted(rows, key=lambda found: (order.index(found[0]), found[1]))]


def differences(runs: list[FinishedRun]) -> list[list[str]]:
    """For each data set, model and number of passes above one: the metrics minus those of one pass on the same folds."""
    rows = []
    for (data, model), group in group_by(runs, lambda run: (run.config.task_options["data"], run.config.model)).items():
        by_passes = {
            passes: {place(run): run for folds in complete(some).values() for run in folds}
            for passes, some in sorted(group_by(group, passes_of).items())
        }
        for passes, several in by_passes.items():
            shared = sorted(several.keys() & by_passes.get(1, {}).keys())
            if passes > 1 and shared:
                cells = []
                for metric in METRICS:
                    values = [several[fold].metrics[metric] - by_passes[1][fold].metrics[metric] for fold in shared]
                    cells.append(f"{statistics.mean(values):+.3f} ± {statistics.stdev(values) / len(values) ** 0.5:.3f}")
                rows.append([data, model, str(passes), str(len(shared)), *cells])
    return rows


def place(run: FinishedRun) -> tuple[int, int]:
    """The repeat and the fold of a run."""
    return run.config.task_options.get("repeat", 0), run.config.task_options["fold"]


def add_evidence(page: Page, runs: list[FinishedRun]) -> None:
    """A table of models, and one of activations and one of passes if some were tried."""
    tried = {run.config.model for run in runs if "activation" in run.config.model_options}
    main = [run for run in runs if "activation" not in run.config.model_options]
    two = [run for run in runs if run.config.model in tried and run.config.model_options.get("two_stream") is not False]
    for title, chosen in (("Models", main), ("Activations", two)):
        if rows := rows_of(chosen) if chosen is main or tried else []:
            page.section(title)
            columns = ["set", "model", "repeats", "steps", *METRICS]
            page.table(columns, rows, "Means over folds, 95 % intervals over folds.")
    if rows := differences(main):
        page.section("Passes")
        note = "Several passes minus one, on the same folds; ± standard errors over the folds."
        page.table(["set", "model", "passes", "folds", *METRICS], rows, note)
