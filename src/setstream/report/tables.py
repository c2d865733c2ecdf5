"""Tables of runs: one row per group of runs that differ in their seed only, mean ± standard deviation over the seeds."""

import statistics
from collections.abc import Callable, Mapping, Sequence

from setstream.report.page import Page
from setstream.report.runs import FinishedRun

Group = list[FinishedRun]
#: Column titles, and the function from a group of runs to its cell.
Columns = dict[str, Callable[[Group], str]]


def mean_and_sd(values: Sequence[float]) -> str:
    """Mean and standard deviation as text; empty without values.

    >>> mean_and_sd([1.0, 2.0]), mean_and_sd([1.0]), mean_and_sd([])
    ('1.500 ± 0.707', '1.000', '')
    """
    if not values:
        return ""
    mean = statistics.mean(values)
    return f"{mean:.3f} ± {statistics.stdev(values):.3f}" if len(values) > 1 else f"{mean:.3f}"


def metric(name: str) -> Callable[[Group], str]:
    """The cell of a metric: its mean and standard deviation over the runs that have it."""
    return lambda group: mean_and_sd([run.metrics[name] for run in group if name in run.metrics])


def mean_of(name: str) -> Callable[[Group], float]:
    """The mean of a metric over a group, to order rows by."""
    return lambda group: statistics.mean(run.metrics[name] for run in group)


CONSISTENT: Columns = {"consistent": lambda group: "yes" if group[0].model().encoder.pool.consistent else "no"}
SEEDS: Columns = {"seeds": lambda group: str(len(group))}
STEPS: Columns = {"steps": lambda group: f"{group[0].config.steps:,}"}


def add_runs(
    page: Page,
    groups: Mapping[str, Group],
    columns: Columns,
    note: str = "",
    order: Callable[[Group], float] | None = None,
    first: str = "model (gradient)",
) -> None:
    """A table with a row per group; `order` sorts the rows from the lowest value, `first` is the title of the first column."""
    rows = sorted(groups.items(), key=lambda row: order(row[1])) if order else groups.items()
    page.table([first, *columns], [[label, *(cell(group) for cell in columns.values())] for label, group in rows], note)
