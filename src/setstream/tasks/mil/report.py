"""The report of bags: a row per experiment, over its folds and seeds, and figures of the predictions for the test bags."""

from setstream.report.page import Page
from setstream.report.runs import (
    CONSISTENT,
    STEPS,
    Columns,
    Group,
    add_runs,
    by_label,
    curves_figure,
    group_by,
    mean_of,
    metric,
)
from setstream.tasks.mil.predictions import ANSWERS, read_answers, read_target
from setstream.tasks.mil.targets import Target, target_class


def add_report(page: Page, runs: Group) -> None:
    """Tables and figures of runs, those of each kind of labels together. Runs that only compared options are left out."""
    tested = [run for run in runs if run.config.task_options.get("inner") is None]
    for kind, of_kind in group_by(tested, lambda run: str(run.config.task_options.get("kind", "binary"))).items():
        _add_kind(page, target_class(kind), of_kind)


def _add_kind(page: Page, target: type[Target], runs: Group) -> None:
    page.section(f"Multiple instance learning: {target.kind}")
    columns: Columns = {name: metric(name) for name in target.reported}
    columns |= CONSISTENT | {"runs": lambda group: str(len(group))} | STEPS
    note = "Test bags: mean ± standard deviation over folds and seeds."
    best, groups = target.reported[0], by_label(runs)
    sign = 1 if best in ("mae", "rmse") else -1
    add_runs(page, groups, columns, note, lambda group: sign * mean_of(best)(group))
    for label, group in groups.items():
        if known := [run for run in group if (run.folder / ANSWERS).exists()]:
            page.text(f"{label}: {len(known)} runs")
            target.draw(page, [(read_target(run.folder), read_answers(run.folder)) for run in known])
    page.figure(curves_figure(runs, best, ylabel=best), f"{best} during training")
