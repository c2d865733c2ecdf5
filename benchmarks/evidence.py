"""The evidence behind docs/results, from the runs of a task: tables and figures that no user's report needs.

python benchmarks/evidence.py clustering runs/clustering runs/clustering-gradients --out evidence.html --figures evidence
"""

import argparse
import sys
from importlib import import_module
from pathlib import Path

from setstream.report import Page, find_runs

TASKS = ("clustering", "completion", "documents", "mil", "needles")
TRUST = ("benchmarks.needles:Needles", "benchmarks.corpora:rfcs", "benchmarks.corpora:pubmed")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("task", choices=TASKS, help="the task of the runs")
    parser.add_argument("folders", nargs="+", type=Path, help="run folders, or folders that contain some")
    parser.add_argument("--out", type=Path, default=Path("evidence.html"), help="the page to write")
    parser.add_argument("--figures", type=Path, help="a folder for the page's pictures as separate files")
    options = parser.parse_args()
    page = Page(f"Evidence: {options.task}")
    sys.path.insert(0, str(Path(__file__).parents[1]))
    import_module(f"benchmarks.evidence_{options.task}").add_evidence(page, find_runs(options.folders, TRUST))
    page.write(options.out, options.figures)


if __name__ == "__main__":
    main()
