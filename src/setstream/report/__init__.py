"""Figures, and the HTML report of runs."""

import json
from collections.abc import Iterable
from pathlib import Path

from setstream._utils.import_path import find
from setstream.report.page import Page
from setstream.report.runs import FinishedRun, by_label, find_runs, mean_and_spread
from setstream.training.registry import TASKS, task_class


def write_report(folders: list[Path], out: Path, figures: Path | None = None, trust: Iterable[str] = ()) -> list[FinishedRun]:
    """One self-contained page about all finished runs in the folders; its pictures also as files, if a folder is given.

    trust: import paths that the runs' options may name although they are not ours: a backbone.
    """
    runs = find_runs(folders, trust)
    tasks = list(dict.fromkeys(run.config.task for run in runs))
    page = Page("setstream: " + ", ".join(tasks))
    for task in tasks:
        own = [run for run in runs if run.config.task == task]
        place = task_class(task).report if task in TASKS else None
        if place is not None:
            find(place, "report")(page, own)
        else:
            add_table(page, task, own)
    page.section("Runs")
    for run in runs:
        page.text(str(run.folder.name))
        page.code(json.dumps(run.config.to_dict()))
    environments = {(run.folder / "environment.json").read_text() for run in runs}
    page.section("Hardware and versions")
    for text in sorted(environments):
        page.code(text)
    page.write(out, figures)
    return runs


def add_table(page: Page, task: str, runs: list[FinishedRun]) -> None:
    """The final metrics of any task."""
    names = list(dict.fromkeys(name for run in runs for name in run.metrics))
    rows = []
    for label, group in by_label(runs).items():
        cells = [[run.metrics[name] for run in group if name in run.metrics] for name in names]
        rows.append([label, *(mean_and_spread(cell) if cell else "" for cell in cells), str(len(group))])
    page.section(task)
    page.table(["model (gradient)", *names, "seeds"], rows)


__all__ = ["Page", "find_runs", "write_report"]
