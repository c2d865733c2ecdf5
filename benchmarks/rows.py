"""The results of finished runs as rows in docs/results/TASK.jsonl, which outlive their folders; and the tables that they make.

    python benchmarks/rows.py clustering runs/clustering-released        # add the runs' rows, then print the table
    python benchmarks/rows.py clustering                                 # print the table

A row has the run's name, its options where they are not the defaults, the final metrics, and where it was run. The row of a
run that was there before is replaced.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from setstream._utils.atomic import write_atomically
from setstream.report import find_runs
from setstream.report.runs import FinishedRun, mean_and_sd
from setstream.training.config import FREE, TrainConfig

ROWS = Path(__file__).parents[1] / "docs" / "results"
#: The metric that orders a task's table, the lowest first, and the others that are shown.
SHOWN = {"clustering": ("gap", "nll"), "completion": ("nll",)}
WHERE = ("commit", "torch", "platform", "cores", "threads")

Row = dict[str, Any]


def row_of(run: FinishedRun) -> Row:
    """One line of a file of rows."""
    config = run.config
    defaults = TrainConfig(config.task, config.model).to_dict()
    options = {name: value for name, value in config.to_dict().items() if name not in FREE and value != defaults[name]}
    environment = json.loads((run.folder / "environment.json").read_text())
    return {
        "run": run.folder.name,
        "label": run.label(),
        "steps": config.steps,
        "seed": config.seed,
        "options": options,
        "metrics": {name: round(float(value), 6) for name, value in run.metrics.items()},
        "where": {name: environment[name] for name in WHERE if name in environment},
    }


def read_rows(task: str) -> list[Row]:
    """All rows of a task."""
    path = ROWS / f"{task}.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def add_rows(task: str, runs: list[FinishedRun]) -> None:
    """Write the rows of runs, ordered by name, instead of earlier rows of the same names."""
    rows = {row["run"]: row for row in [*read_rows(task), *map(row_of, runs)]}
    write_atomically(ROWS / f"{task}.jsonl", "".join(json.dumps(rows[name]) + "\n" for name in sorted(rows)))


def table(task: str, rows: list[Row]) -> list[list[str]]:
    """The cells of a table: mean ± standard deviation over seeds, the best first."""
    groups: dict[tuple[str, int], list[Row]] = {}
    for row in rows:
        groups.setdefault((row["label"], row["steps"]), []).append(row)
    first, *_ = names = SHOWN[task]
    cells = []
    for (text, steps), group in groups.items():
        values = {name: [row["metrics"][name] for row in group] for name in names}
        means = [mean_and_sd(values[name]) for name in names]
        cells.append((sum(values[first]) / len(group), [text, f"{steps:,}", str(len(group)), *means]))
    return [["model (gradient)", "steps", "seeds", *names], *(row for _, row in sorted(cells))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("task", choices=sorted(SHOWN), help="the task of the runs")
    parser.add_argument("folders", nargs="*", type=Path, help="run folders, or folders that contain some")
    options = parser.parse_args()
    if options.folders:
        add_rows(options.task, [run for run in find_runs(options.folders) if run.config.task == options.task])
    head, *rows = table(options.task, read_rows(options.task))
    for row in [head, ["---"] * len(head), *rows]:
        print(f"| {' | '.join(row)} |")


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))
    main()
