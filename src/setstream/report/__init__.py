"""Reports of runs: the page, the plotting and the tables that the reports of all tasks share."""

from setstream.report.page import Page
from setstream.report.runs import find_runs, write_report

__all__ = ["Page", "find_runs", "write_report"]
