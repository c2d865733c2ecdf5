"""`setstream sweep`: many runs, several at a time, each in a process and a folder of its own.

    [defaults]                          options of all runs
    [[runs]]                            and one table for each
    name = "umbc-seed-1"
    model = "umbc+set-transformer"
    seed = 1
    after = ["umbc-seed-0"]             optional: runs that must be done before it
    init_from = "{out}/umbc-seed-0"     {out} is the folder of the sweep
    [[runs]]
    name = "sse-{size}-seed-{number}"   or one table for many:
    each = { size = [8, 32], number = [0, 1, 2] }       every combination
    chunk_size = "{size}"               a text that is only a name in braces is replaced by the value
    seed = "{number}"

Finished runs are skipped and others resumed, so the same command continues a sweep that was stopped.
"""

import itertools
import json
import os
import subprocess
import sys
import threading
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import typer
from rich.console import Group
from rich.live import Live
from rich.markup import escape
from rich.table import Table

from setstream._utils.atomic import write_atomically
from setstream.cli.command import console
from setstream.cli.train import INTERRUPTED
from setstream.errors import ConfigurationError
from setstream.training.config import TrainConfig, merge, read_options
from setstream.training.processes import asked_to_stop
from setstream.training.record import EVALUATIONS, read_metrics
from setstream.training.task import new_config


@dataclass
class Run:
    """One run of a sweep."""

    name: str
    config: TrainConfig
    folder: Path
    after: list[str] = field(default_factory=list)
    started: bool = False
    failed: bool = False

    @property
    def done(self) -> bool:
        """Whether it is finished, with these options."""
        if not (self.folder / "result.json").exists():
            return False
        if changed := self.config.changed_since(read_options(self.folder / "config.json")):
            other = f"{self.folder} holds a finished run with other {', '.join(changed)}"
            raise ConfigurationError(f"{other}: give this run another name, or move it")
        return True

    def start(self, threads: int) -> subprocess.Popen[bytes]:
        options = self.folder / "options.json"
        write_atomically(options, json.dumps(self.config.to_dict()))
        command = [sys.executable, "-m", "setstream.cli", "train", "--config", str(options), "--out", str(self.folder)]
        environment = os.environ | {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
        self.started = True
        with (self.folder / "log.txt").open("ab") as log:
            # In a separate session: Ctrl-C reaches the sweep only, which then asks each run to save.
            return subprocess.Popen(command, stdout=log, stderr=log, env=environment, start_new_session=True)


def read_sweep(file: Path, out: Path) -> list[Run]:
    """The runs that a file describes."""
    options = read_options(file)
    if set(options) - {"defaults", "runs"} or not isinstance(options.get("runs"), list) or not options["runs"]:
        raise ConfigurationError(f"{file} must hold [defaults] (optional) and a list of [[runs]], each with a name")
    runs: dict[str, Run] = {}
    tables = [*itertools.chain.from_iterable(map(combinations, options["runs"]))]
    if nameless := [table for table in tables if "name" not in table]:
        raise ConfigurationError(f"every run of a sweep needs a name; this one has none: {nameless[0]}")
    for name, count in Counter(table["name"] for table in tables).items():
        if count > 1:
            raise ConfigurationError(f"the names of runs must differ: {name!r} is given twice")
    for table in tables:
        name, after = table.pop("name"), table.pop("after", [])
        if unknown := set(after) - set(runs):
            raise ConfigurationError(f"{name} comes after {sorted(unknown)}: name runs that are defined above it")
        config = filled(merge(options.get("defaults", {}), table), {"out": str(out)})
        runs[name] = Run(name, new_config(config), out / name, after)
    return list(runs.values())


def combinations(table: dict[str, Any]) -> list[dict[str, Any]]:
    """One run, or one for every combination of the values under `each`."""
    template = dict(table)
    each = template.pop("each", {})
    if not isinstance(each, dict) or not all(isinstance(values, list) and values for values in each.values()):
        raise ConfigurationError(f"each = {{name = [value, ...], ...}} gives every name a list of values; got {each!r}")
    return [filled(template, dict(zip(each, values, strict=True))) for values in itertools.product(*each.values())]


def filled(template: Any, values: dict[str, Any]) -> Any:
    """Options with values in the place of their names in braces; a text that is nothing else is replaced by the value."""
    if isinstance(template, dict):
        return {name: filled(option, values) for name, option in template.items()}
    if isinstance(template, list):
        return [filled(option, values) for option in template]
    for name, value in values.items() if isinstance(template, str) else ():
        if template == f"{{{name}}}":
            return value
        template = template.replace(f"{{{name}}}", str(value))
    return template


def next_run(waiting: list[Run], runs: list[Run]) -> Run | None:
    """The first run that can start; runs after a failed run have failed, too."""
    for run in list(waiting):
        required = [other for other in runs if other.name in run.after]
        if any(other.failed for other in required):
            run.failed = True
            waiting.remove(run)
        elif all(other.done for other in required):
            waiting.remove(run)
            return run
    return None


def overview(runs: list[Run]) -> Group:
    """The progress of all runs; below it, the errors of failed ones."""
    rows, problems = Table("run", "model", "gradient", "step", "loss", "last evaluation", box=None), []
    for run in runs:
        train, tests = read_metrics(run.folder, "train"), read_metrics(run.folder, *EVALUATIONS)
        test = {key: value for key, value in tests[-1].items() if key not in ("step", "kind")} if tests else {}
        step, loss = (train[-1]["step"], f"{train[-1]['loss']:.3f}") if train else (0, "")
        color = "red" if run.failed else "green" if run.done else "yellow" if run.started else "dim"
        metrics = "  ".join(f"{key} {value:.3f}" for key, value in test.items())
        rows.add_row(run.name, run.config.model, run.config.gradient, f"{step}/{run.config.steps}", loss, metrics, style=color)
        if run.failed:
            log = run.folder / "log.txt"
            last = escape("\n".join(log.read_text().splitlines()[-2:])) if log.exists() else "a run before it failed"
            problems.append(f"[red]{run.name} failed[/red], see {log}: {last}")
    return Group(rows, *problems)


def run_sweep(file: Path, out: Path, jobs: int, threads: int) -> None:
    """Run all runs of a file, `jobs` at a time; exit with 1 if some failed, with 130 if interrupted."""
    runs = read_sweep(file, out)
    waiting = [run for run in runs if not run.done]
    console.print(f"{len(runs)} runs, {len(runs) - len(waiting)} already done, {jobs} at a time")
    active: list[tuple[Run, subprocess.Popen[bytes]]] = []
    stop = threading.Event()
    with asked_to_stop(stop), Live(overview(runs), console=console, refresh_per_second=1) as live:
        while (waiting or active) and not stop.wait(0.2):
            while len(active) < jobs and (run := next_run(waiting, runs)) is not None:
                active.append((run, run.start(threads)))
            for run, process in list(active):
                if process.poll() is not None:
                    run.failed = not run.done
                    active.remove((run, process))
            if console.is_terminal:
                live.update(overview(runs))
        for _, process in active:
            process.terminate()
        for _, process in active:
            process.wait()
        live.update(overview(runs))
    if stop.is_set() or any(run.failed for run in runs):
        raise typer.Exit(INTERRUPTED if stop.is_set() else 1)
