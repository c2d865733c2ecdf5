"""The rows of finished runs, and the tables of docs/results that are made of them."""

import json
import re
from pathlib import Path

import pytest

from benchmarks import rows
from setstream.report import find_runs
from tests.tasks.runs import train_clustering

RESULTS = Path(__file__).parents[2] / "docs/results"


def test_runs_become_rows_which_later_runs_replace(tmp_path, monkeypatch):
    monkeypatch.setattr(rows, "ROWS", tmp_path / "rows")
    (tmp_path / "rows").mkdir()
    runs = find_runs([train_clustering(tmp_path)])
    rows.add_rows("clustering", runs)
    rows.add_rows("clustering", runs[:1])
    found = rows.read_rows("clustering")
    assert [row["run"] for row in found] == sorted(run.folder.name for run in runs)
    for row in found:
        run = next(run for run in runs if run.folder.name == row["run"])
        assert row["metrics"]["gap"] == pytest.approx(run.metrics["gap"], abs=1e-6)
        assert row["where"]["commit"] == json.loads((run.folder / "environment.json").read_text())["commit"]
        assert row["label"] == run.label()
        assert row["options"].get("gradient", "unbiased") == run.config.gradient


def test_a_table_has_means_and_deviations_over_seeds_best_first():
    def row(model, seed, gap):
        return {"label": f"{model} (unbiased 8)", "steps": 50_000, "seed": seed, "metrics": {"gap": gap, "nll": gap + 1}}

    _, *table = rows.table("clustering", [row("sse", 0, 0.5), row("deepsets", 0, 0.9), row("sse", 1, 0.7)])
    assert table == [
        ["sse (unbiased 8)", "50,000", "2", "0.600 ± 0.141", "1.600 ± 0.141"],
        ["deepsets (unbiased 8)", "50,000", "1", "0.900", "1.900"],
    ]


@pytest.mark.parametrize("task", [task for task in rows.SHOWN if rows.read_rows(task)])
def test_tables_of_the_docs_are_those_of_the_rows(task):
    """Each row of a page's table under the heading of rows, in order, as the program prints it."""
    section = (RESULTS / f"{task}.md").read_text().split("\n## All runs\n")[1].split("\n## ")[0]
    stated = [[cell.strip() for cell in line.strip("|").split("|")] for line in re.findall(r"^\|.*$", section, re.MULTILINE)]
    assert [row for row in stated if not set(row[0]) <= set("-")] == rows.table(task, rows.read_rows(task))
