"""Reports of runs: the page, the plotting and the tables that the reports of all tasks share."""

import json
from collections.abc import Iterable
from pathlib import Path

from setstream._utils.import_path import find
from setstream.report.page import Page
from setstream.report.runs import FinishedRun, by_label, find_runs, group_by
from setstream.report.tables import SEEDS, add_runs, metric
from setstream.training.registry import TASKS, task_class


def write_report(folders: list[Path], out: Path, figures: Path | None = None, trust: Iterable[str] = ()) -> list[FinishedRun]:
    """Write one self-contained page about all finished runs in the folders.

    Args:
        folders: run folders, or folders that contain some.
        out: the page.
        figures: a folder for the page's pictures as separate files, if given.
        trust: import paths outside setstream that the runs' options may name, such as a backbone.

    Returns:
        The runs that the page is about.
    """
    runs = find_runs(folders, trust)
    by_task = group_by(runs, lambda run: run.config.task)
    page = Page("setstream: " + ", ".join(by_task))
    for task, task_runs in by_task.items():
        place = task_class(task).report if task in TASKS else None
        if place is not None:
            find(place, "report")(page, task_runs)
        else:
            page.section(task)
            names = dict.fromkeys(name for run in task_runs for name in run.metrics)
            add_runs(page, by_label(task_runs), {name: metric(name) for name in names} | SEEDS)
    page.section("Runs")
    for run in runs:
        page.text(str(run.folder.name))
        page.code(json.dumps(run.config.to_dict()))
    page.section("Hardware and versions")
    for text in sorted({(run.folder / "environment.json").read_text() for run in runs}):
        page.code(text)
    page.write(out, figures)
    return runs


__all__ = ["Page", "find_runs", "write_report"]
