"""The summary of docs/results: its numbers stand on the pages that it links to, and its coefficients follow from its tables."""

import math
import re
from pathlib import Path

import pytest
from benchmarks.evidence_common import kendall_tau
from scipy.stats import kendalltau

RESULTS = Path(__file__).parents[2] / "docs/results"
PAGE = (RESULTS / "index.md").read_text()
VERDICTS = ("reproduced", "in part", "not reproduced", "not testable")


def rows(heading):
    """The tables of a section, as lists of cells."""
    section = PAGE.split(f"## {heading}\n")[1].split("\n## ")[0]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in section.splitlines() if line.startswith("|")]
    return [row for row in cells if not set(row[0]) <= set("-")], section


def claims():
    """The claims with the texts of the pages that they link to."""
    found, text = [], ""
    for row in rows("The paper's claims")[0][1:]:
        if row[0].startswith("**"):
            text = linked(row[0])
        else:
            found.append((row, text + linked(" ".join(row))))
    return found


def linked(text):
    return "".join((RESULTS / name).read_text() for name in re.findall(r"\]\(([\w./-]+\.md)", text))


@pytest.mark.parametrize(("row", "text"), claims(), ids=lambda value: value[0][:40] if isinstance(value, list) else "")
def test_numbers_stand_on_the_linked_page(row, text):
    claim, here, verdict = row
    assert verdict.startswith(VERDICTS), claim
    numbers = re.findall(r"[-+]?\d+\.\d+|\d,\d{3}(?:,\d{3})?", here)
    missing = [number for number in numbers if not re.search(rf"(?<![\d.]){re.escape(number.lstrip('+-'))}(?!\d)", text)]
    assert not missing, f"{claim}: {missing}"


def test_the_first_sentence_counts_the_verdicts():
    verdicts = [row[2] for row, _ in claims()]
    counts = [sum(verdict.startswith(kind) for verdict in verdicts) for kind in VERDICTS]
    assert [int(number) for number in re.findall(r"\d+", PAGE.split("could not be tested")[0])] == counts[:3] + counts[3:]


def test_coefficients_follow_from_the_tables():
    section = rows("The paper's order of models")[1]
    stated = [float(value) for value in re.findall(r"τ = (-?\d\.\d+)", section)]
    tables = [table.splitlines()[2:] for table in re.findall(r"(?:^\|.*\n)+", section, re.MULTILINE)]
    found = []
    for page, table in zip(("clustering", "documents", "mil"), tables, strict=True):
        cells = [[cell.strip() for cell in row.strip("|").split("|")] for row in table]
        paper, ours = ([float(row[column]) for row in cells] for column in (1, 2))
        found.append(round(kendall_tau(ours, paper), 2))
        assert all(row[2] in (RESULTS / f"{page}.md").read_text() for row in cells)
        if page == "clustering":
            gaussian = [2.015 if row[0] == "sse" else value for row, value in zip(cells, ours, strict=True)]
            found.append(round(kendall_tau(gaussian, paper), 2))
    assert stated == found


def test_means_over_benchmarks_are_those_of_their_columns():
    tables = re.findall(r"^\| \S+ \| released \|.*$", (RESULTS / "mil.md").read_text(), re.MULTILINE)
    assert len(tables) == 18
    for row in tables:
        *_, musk1, musk2, ucsb, mean = [cell.strip() for cell in row.strip("|").split("|")]
        assert float(mean) == pytest.approx(sum(float(cell.split()[0]) for cell in (musk1, musk2, ucsb)) / 3, abs=6e-4)


@pytest.mark.parametrize(
    ("ours", "theirs", "tau"),
    [([1, 2, 3, 4], [1, 2, 3, 4], 1.0), ([1, 2, 3, 4], [4, 3, 2, 1], -1.0), ([1, 2, 2, 5, 3], [2, 2, 1, 7, 4], None)],
)
def test_kendall_tau(ours, theirs, tau):
    expected = kendalltau(ours, theirs)[0]
    assert kendall_tau(ours, theirs) == pytest.approx(expected)
    assert tau is None or kendall_tau(ours, theirs) == tau
    assert math.isnan(kendall_tau([1, 1], [1, 2]))
