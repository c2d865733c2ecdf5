"""Many runs, some at a time, each in a process and a folder of its own.

    [defaults]                          options for all runs
    [[runs]]                            and one table for each
    name = "umbc-seed-1"
    model = "umbc+set-transformer"
    seed = 1
    after = ["umbc-seed-0"]             optional: the runs that must be done before it
    init_from = "{out}/umbc-seed-0"     {out} is the folder of the sweep
    [[runs]]
    name = "sse-{size}-seed-{number}"   or a table for many:
    each = { size = [8, 32], number = [0, 1, 2] }       every combination
    chunk_size = "{size}"               a text that is a name in braces becomes the value
    seed = "{number}"

Finished runs are skipped and others resumed: a sweep that was stopped, in whatever way, is started again by the same command.
"""

import itertools
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.markup import escape
from rich.table import Table

from setstream._utils.atomic import write_atomically
from setstream.cli.options import merge
from setstream.errors import ConfigurationError
from setstream.training.config import FREE, TrainConfig, read_options
from setstream.training.record import read_metrics

INTERRUPTED = 130


@dataclass
class Run:
    """One run of a sweep."""

    name: str
    config: TrainConfig
    folder: Path
    after: list[str] = field(default_factory=list)
    process: subprocess.Popen[bytes] | None = None
    failed: bool = False

    @property
    def done(self) -> bool:
        """Whether it has reached its end, now or earlier, with these options."""
        if not (self.folder / "result.json").exists():
            return False
        before = read_options(self.folder / "config.json")
        now = json.loads(json.dumps(self.config.to_dict()))
        differing = [name for name in now if name in before and name not in FREE and before[name] != now[name]]
        if differing:
            raise ConfigurationError(
                f"{self.folder} holds a finished run with other {', '.join(differing)}: give this run another name, or move it"
            )
        return True


def read_sweep(file: Path, out: Path) -> list[Run]:
    """The runs that a file asks for."""
    options = read_options(file)
    unknown = set(options) - {"defaults", "runs"}
    if unknown or not isinstance(options.get("runs"), list) or not options["runs"]:
        raise ConfigurationError(f"{file} must hold [defaults] (optional) and a list of [[runs]], each with a name")
    defaults: dict[str, Any] = options.get("defaults", {})
    runs: list[Run] = []
    for own in (one for given in options["runs"] for one in each_of(given)):
        if "name" not in own:
            raise ConfigurationError(f"every run of a sweep needs a name; this one has none: {own}")
        name, after = own["name"], own.get("after", [])
        unknown = set(after) - {run.name for run in runs}
        if unknown:
            raise ConfigurationError(f"{name} comes after {sorted(unknown)}: name runs that stand above it")
        changes = {key: value for key, value in own.items() if key not in ("name", "after")}
        placed = filled(merge(defaults, changes), {"out": str(out)})
        runs.append(Run(name, TrainConfig.from_dict(placed), out / name, after))
    names = [run.name for run in runs]
    if len(set(names)) < len(names):
        raise ConfigurationError(
            f"the names of runs must differ: {sorted({n for n in names if names.count(n) > 1})} are given twice"
        )
    return runs


def each_of(given: dict[str, Any]) -> list[dict[str, Any]]:
    """One run, or one for every combination of the values under `each`.

    >>> each_of({"name": "{gradient}-{n}", "seed": "{n}", "each": {"gradient": ["full"], "n": [0, 1]}})
    [{'name': 'full-0', 'seed': 0}, {'name': 'full-1', 'seed': 1}]
    """
    values = given.get("each", {})
    if not isinstance(values, dict) or not all(isinstance(own, list) and own for own in values.values()):
        raise ConfigurationError(f"each = {{name = [value, ...], ...}} gives every name a list of values; got {values!r}")
    template = {name: value for name, value in given.items() if name != "each"}
    return [filled(template, dict(zip(values, own, strict=True))) for own in itertools.product(*values.values())]


def filled(template: Any, values: dict[str, Any]) -> Any:
    """Options with values in the place of their names in braces; a text that is nothing else becomes the value itself."""
    if isinstance(template, dict):
        return {name: filled(own, values) for name, own in template.items()}
    if isinstance(template, list):
        return [filled(own, values) for own in template]
    if not isinstance(template, str):
        return template
    for name, value in values.items():
        if template == f"{{{name}}}":
            return value
        template = template.replace(f"{{{name}}}", str(value))
    return template


def next_run(waiting: list[Run], runs: list[Run]) -> Run | None:
    """The first that waits for nothing; one that waits for a failed run has failed with it."""
    by_name = {run.name: run for run in runs}
    for run in list(waiting):
        before = [by_name[name] for name in run.after]
        if any(own.failed for own in before):
            run.failed = True
            waiting.remove(run)
        elif all(own.done for own in before):
            waiting.remove(run)
            return run
    return None


def start(run: Run, threads: int) -> None:
    """Start or resume a run in a process of its own."""
    run.folder.mkdir(parents=True, exist_ok=True)
    options = run.folder / "options.json"
    write_atomically(options, json.dumps(run.config.to_dict()))
    command = [sys.executable, "-m", "setstream.cli", "train", "--config", str(options), "--out", str(run.folder)]
    environment = os.environ | {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
    with (run.folder / "log.txt").open("ab") as log:
        # A group of its own: Ctrl-C reaches this process only, which then asks each run to save.
        run.process = subprocess.Popen(command, stdout=log, stderr=log, env=environment, start_new_session=True)


def table(runs: list[Run]) -> Group:
    """Where all runs are; below it, why the failed ones failed."""
    rows = Table(box=None)
    for title in ("run", "model", "gradient", "step", "loss", "last test"):
        rows.add_column(title)
    problems = []
    for run in runs:
        train, tests = read_metrics(run.folder, "train"), read_metrics(run.folder, "test") + read_metrics(run.folder, "final")
        test = {key: value for key, value in tests[-1].items() if key not in ("step", "kind")} if tests else {}
        step = f"{train[-1]['step']}/{run.config.steps}" if train else f"0/{run.config.steps}"
        color = "red" if run.failed else "green" if run.done else "yellow" if run.process is not None else "dim"
        shown = "  ".join(f"{key} {value:.3f}" for key, value in test.items())
        loss = f"{train[-1]['loss']:.3f}" if train else ""
        rows.add_row(run.name, run.config.model, run.config.gradient, step, loss, shown, style=color)
        if run.failed:
            log = run.folder / "log.txt"
            last = escape("\n".join(log.read_text().splitlines()[-2:])) if log.exists() else "a run before it failed"
            problems.append(f"[red]{run.name} failed[/red], see {log}: {last}")
    return Group(rows, *problems)


def run_sweep(runs: list[Run], jobs: int, threads: int, console: Console) -> int:
    """Work through all runs, `jobs` at a time; gives the exit code: 0, 1 if some failed, 130 if interrupted."""
    waiting = [run for run in runs if not run.done]
    console.print(f"{len(runs)} runs, {len(runs) - len(waiting)} already done, {jobs} at a time")
    active: list[Run] = []
    asked: list[int] = []
    before = {number: signal.signal(number, lambda got, _: asked.append(got)) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        with Live(table(runs), console=console, refresh_per_second=1, transient=False) as live:
            while (waiting or active) and not asked:
                while len(active) < jobs and (run := next_run(waiting, runs)) is not None:
                    start(run, threads)
                    active.append(run)
                time.sleep(1)
                for run in list(active):
                    if run.process is not None and run.process.poll() is not None:
                        run.failed = not run.done
                        run.process = None
                        active.remove(run)
                if console.is_terminal:
                    live.update(table(runs))
            if asked:
                for run in active:
                    assert run.process is not None
                    run.process.send_signal(signal.SIGTERM)
                for run in active:
                    assert run.process is not None
                    run.process.wait()
            live.update(table(runs))
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    return INTERRUPTED if asked else int(any(run.failed for run in runs))
