"""The report of finished runs: groups that differ in their seed only, and tables of their means ± standard deviations."""

import json
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from setstream._utils.import_path import TASKS, find
from setstream.errors import ConfigurationError
from setstream.report.page import Page, pyplot
from setstream.training.config import FREE, TrainConfig, read_options
from setstream.training.record import EVALUATIONS, read_metrics
from setstream.training.task import SavedRun, Task, read_run, task_class

AnyTask = TypeVar("AnyTask", bound=Task)
Key = TypeVar("Key")


@dataclass(frozen=True)
class FinishedRun(SavedRun):
    """One run folder whose run is done, with its result.json."""

    result: dict[str, Any] = field(default_factory=dict)

    @property
    def metrics(self) -> dict[str, float]:
        return self.result["metrics"]

    def label(self) -> str:
        """Model, gradient and options: what seeds have in common."""
        options = "".join(f", {name}={value}" for name, value in self.config.model_options.items())
        size = self.config.chunk_size * self.config.grad_chunks
        gradient = self.config.gradient if self.config.gradient in ("full", "exact") else f"{self.config.gradient} {size}"
        return f"{self.config.model} ({gradient}{options})"

    def task_as(self, kind: type[AnyTask]) -> AnyTask:
        """The run's task, which must be of this kind."""
        task = self.task()
        if not isinstance(task, kind):
            raise ConfigurationError(f"{self.folder}: expected a run of {kind.name}; got one of {self.config.task}")
        return task


Group = list[FinishedRun]
Columns = dict[str, Callable[[Group], str]]  #: column titles, and the function from a group of runs to its cell
Order = Callable[[Group], float] | None
CONSISTENT: Columns = {"consistent": lambda group: "yes" if group[0].model().encoder.pool.consistent else "no"}
SEEDS: Columns = {"seeds": lambda group: str(len(group))}
STEPS: Columns = {"steps": lambda group: f"{group[0].config.steps:,}"}


def find_runs(folders: list[Path], trust: Iterable[str] = ()) -> list[FinishedRun]:
    """All finished runs in or below the folders, each once; `trust`: see `SavedRun`."""
    trust = tuple(trust)
    results: dict[Path, None] = {}
    for folder in folders:
        if not folder.is_dir():
            raise ConfigurationError(f"there is no folder {folder}")
        results |= dict.fromkeys(sorted(folder.resolve().rglob("result.json")))
    if not results:
        raise ConfigurationError(f"no finished run (with a result.json) in {', '.join(map(str, folders))}")
    return [FinishedRun(path.parent, read_run(path.parent), trust, read_options(path)) for path in results]


def group_by(runs: Iterable[FinishedRun], key: Callable[[FinishedRun], Key]) -> dict[Key, Group]:
    """Runs with the same key together, in the order in which the keys first occur."""
    groups: dict[Key, Group] = {}
    for run in runs:
        groups.setdefault(key(run), []).append(run)
    return groups


def without_seed(folder: Path, config: TrainConfig) -> dict[str, Any]:
    """The options that runs with other seeds and folds share; of a second stage, with those of its first, not its folder."""
    options = {name: value for name, value in config.to_dict().items() if name != "seed" and name not in FREE}
    folds = task_class(config.task).repeated if config.task in TASKS else ()
    options["task_options"] = {name: value for name, value in config.task_options.items() if name not in folds}
    options |= {"steps": config.steps if config.epochs is None else None}  # folds may have more or fewer training sets
    if config.init_from is not None:
        first = folder.parent / Path(config.init_from).name
        if (first / "config.json").is_file():
            options["init_from"] = without_seed(first, read_run(first))
    return options


def by_label(runs: Group) -> dict[str, Group]:
    """Groups of runs that differ in their seed only. Where labels coincide, they also name the options that differ."""
    seeds = group_by(runs, lambda run: json.dumps(without_seed(run.folder, run.config), sort_keys=True))
    labels = {}
    for label, firsts in group_by((group[0] for group in seeds.values()), FinishedRun.label).items():
        configs = [without_seed(run.folder, run.config) for run in firsts]
        differing = [n for n in configs[0] if any(c[n] != configs[0][n] for c in configs)]
        for run in firsts:
            labels[run.folder] = f"{label[:-1]}{''.join(f', {name} {getattr(run.config, name)}' for name in differing)})"
    return {labels[group[0].folder]: group for group in seeds.values()}


def mean_and_sd(values: Sequence[float]) -> str:
    """Mean and standard deviation as text: `1.500 ± 0.707`, `1.000` of a single value, empty without values."""
    texts = [f"{statistics.mean(values):.3f}"] if values else []
    return " ± ".join(texts + ([f"{statistics.stdev(values):.3f}"] if len(values) > 1 else []))


def metric(name: str) -> Callable[[Group], str]:
    """The cell of a metric: its mean and standard deviation over the runs that have it."""
    return lambda group: mean_and_sd([run.metrics[name] for run in group if name in run.metrics])


def mean_of(name: str) -> Callable[[Group], float]:
    """The mean of a metric over a group, to order rows by."""
    return lambda group: statistics.mean(run.metrics[name] for run in group)


def add_runs(
    page: Page, groups: dict[str, Group], columns: Columns, note: str = "", order: Order = None, first: str = "model (gradient)"
) -> None:
    """A table with a row per group; `order` sorts the rows from the lowest value, `first` is the title of the first column."""
    rows = sorted(groups.items(), key=lambda row: order(row[1])) if order else groups.items()
    page.table([first, *columns], [[label, *(cell(group) for cell in columns.values())] for label, group in rows], note)


def curves_figure(runs: Group, name: str, **options: Any) -> Any:
    """A metric of held-out sets against the step, one line per run, one colour per kind of run; `options` of the axes."""
    figure, axis = pyplot().subplots(figsize=(10, 4.5), constrained_layout=True)
    for number, (label, group) in enumerate(by_label(runs).items()):
        style = {"color": f"C{number % 10}", "linestyle": ["-", "--", ":"][number // 10 % 3]}
        for run in group:
            tests = [line for line in read_metrics(run.folder, *EVALUATIONS) if name in line]
            axis.plot([line["step"] for line in tests], [line[name] for line in tests], **style, linewidth=1)
        axis.plot([], [], **style, label=label)
    axis.set(xlabel="step", **options)
    figure.legend(loc="outside right upper", fontsize=6)
    return figure


def add_results(page: Page, runs: Group, columns: Columns, note: str, best: str, *, highest: bool = False, **axes: Any) -> None:
    """The table of a task's runs, those with the best value of a metric first, and its learning curves; `axes`: options."""
    sign = -1 if highest else 1
    add_runs(page, by_label(runs), CONSISTENT | columns | SEEDS | STEPS, note, lambda group: sign * mean_of(best)(group))
    page.figure(curves_figure(runs, best, **axes), f"{axes['ylabel']} during training")


def write_report(folders: list[Path], out: Path, figures: Path | None = None, trust: Iterable[str] = ()) -> Group:
    """Write a page about all finished runs in or below the folders, its pictures also to `figures`; `trust`: see `SavedRun`."""
    runs = find_runs(folders, trust)
    by_task = group_by(runs, lambda run: run.config.task)
    page = Page("setstream: " + ", ".join(by_task))
    for task, task_runs in by_task.items():
        if task in TASKS and (place := task_class(task).report) is not None:
            find(place, "report")(page, task_runs)
        else:
            page.section(task)
            names = dict.fromkeys(name for run in task_runs for name in run.metrics)
            add_runs(page, by_label(task_runs), {name: metric(name) for name in names} | SEEDS)
    page.section("Runs")
    for run in runs:
        page.text(run.folder.name)
        page.code(json.dumps(run.config.to_dict()))
    page.section("Hardware and versions")
    for text in sorted({(run.folder / "environment.json").read_text() for run in runs}):
        page.code(text)
    page.write(out, figures)
    return runs
