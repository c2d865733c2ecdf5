"""`setstream bench`, `tasks` and `models`, which need no torch: names and summaries come from catalogue.json.

A test compares this file with the tasks themselves; `python -m tests.cli.write_catalogue` writes it again.
"""

import json
import subprocess
import sys
from pathlib import Path
from pkgutil import resolve_name
from typing import Annotated

import typer
from rich.table import Table
from typer import Argument, Option

from setstream.cli.command import app, console
from setstream.errors import ConfigurationError

CATALOGUE = Path(__file__).with_name("catalogue.json")


@app.command(
    epilog="[bold]Examples[/bold]\n\nsetstream bench pooling\n\nsetstream bench memory --sizes 1000 100000 --modes full exact",
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
)
def bench(
    context: typer.Context,
    name: Annotated[str, Argument(help="pooling, step, memory, variance, io, scale, ...: a script in the folder.")],
    folder: Annotated[Path, Option(help="The folder of benchmarks in a checkout of setstream.")] = Path("benchmarks"),
) -> None:
    """Run one of the benchmarks; further options are passed to it."""
    script = folder / f"{name}.py"
    if not script.is_file():
        names = ", ".join(sorted(file.stem for file in folder.glob("*.py"))) or "none: run this in a checkout of setstream"
        raise ConfigurationError(f"there is no benchmark {script}; there are {names}")
    code = subprocess.run([sys.executable, str(script), *context.args], check=False).returncode
    if code:
        raise typer.Exit(code)


@app.command()
def tasks() -> None:
    """List the tasks."""
    rows = Table("task", "what it is", "models", box=None)
    for name, task in json.loads(CATALOGUE.read_text()).items():
        rows.add_row(name, task["summary"], str(len(task["models"])))
    console.print(rows)


@app.command()
def models(name: Annotated[str, Argument(metavar="TASK", help="A task or package.module:Class.")] = "clustering") -> None:
    """List the models of a task."""
    task = json.loads(CATALOGUE.read_text()).get(name) or resolve_name("setstream.training.registry:describe_task")(name)
    rows = Table("model", "what it is", box=None)
    for model, summary in task["models"].items():
        rows.add_row(model, summary)
    console.print(rows)
