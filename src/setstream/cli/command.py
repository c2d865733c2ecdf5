"""How a command is declared: a function whose parameters are its flags, and the import path of the function that does the work.

    @command("setstream.cli.report:run_report", "setstream report runs/")
    def report(folders: Annotated[list[Path], Argument(help="Run folders.")]) -> None:
        '''Turn finished runs into a page.'''

The work gets the flags as keyword arguments of the same names. Its module is imported when the command is run, and only then:
torch takes seconds to import, and `--help` does not need it.

Exit codes: 0 done, 1 a failure, 2 invalid options, 3 a loss that was not finite, 130 interrupted (and saved).
"""

import sys
from collections.abc import Callable, Iterable
from functools import wraps
from pathlib import Path
from pkgutil import resolve_name
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from typer import Argument, Option

from setstream import __version__
from setstream._utils.optional import need
from setstream.errors import ConfigurationError, NonFiniteError, SetstreamError

console, error_console = Console(highlight=False), Console(highlight=False, stderr=True)
# Flags that several commands share.
Config = Annotated[Path | None, Option(help="Options in a TOML or JSON file; flags take precedence.")]
Words = list[str] | None
Text = str | None
File = Path | None
Options = Annotated[Words, Option("-o", "--option", help="NAME=VALUE, task.NAME=VALUE or model.NAME=VALUE; may be repeated.")]
Device = Annotated[str, Option(help="auto, cpu, cuda, cuda:1 or mps.")]
Model = Annotated[str, Argument(help="A run folder, a saved model's folder, a shipped model's name, or package.module:name.")]
Builder = Annotated[str | None, Option(help="For your own saved model: the function that builds it, package.module:name.")]
Trust = Annotated[Words, Option(help="package.module:name of your own task, backbone or builder that config.json may name.")]
Average = Annotated[Text, Option(help="average: a model that is not consistent averages over chunks. Otherwise, an error.")]
WORK: dict[Callable[..., None], str] = {}  # the import path of each command's work
SUMMARY = "Encode sets of any size, in any chunks, to the same answer; train through all of it in constant memory."
STYLE: dict[str, Any] = {"no_args_is_help": True, "rich_markup_mode": "rich", "add_completion": False}
app = typer.Typer(name="setstream", help=SUMMARY, pretty_exceptions_enable=False, **STYLE)


def print_table(columns: Iterable[str], rows: Iterable[Iterable[str]], title: str | None = None) -> None:
    """Print rows of texts below the names of their columns."""
    table = Table(*columns, box=None, title=title)
    for row in rows:
        table.add_row(*row)
    console.print(table)


def progress_bar() -> Progress:
    """A bar whose tasks have a field `note`."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[note]}"))
    return Progress(*columns, TimeElapsedColumn(), console=console)


def print_skipped(problem: str) -> None:
    """Say that something was left out, and why."""
    console.print(f"[yellow]skipped[/yellow] {escape(problem)}", soft_wrap=True)


def pop_opening(flags: dict[str, Any]) -> dict[str, Any]:
    """Remove the flags that are options of `open_model`, and return them."""
    return {name: flags.pop(name) for name in ("builder", "trust", "device")}


def command(
    work: str, *examples: str, group: typer.Typer = app, needs: tuple[str, ...] = (), note: str | None = None
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Declare a command: `examples` and `note` end its help; `needs` is an extra, then its libraries that the work imports."""
    title = "[bold]Examples[/bold]" if len(examples) > 1 else "[bold]Example[/bold]"
    epilog = "\n\n".join([title, *examples, *([note] if note else [])])

    def declare(flags: Callable[..., None]) -> Callable[..., None]:
        @wraps(flags)
        def run(**values: Any) -> None:
            for library in needs[1:]:
                need(library, needs[0], f"`setstream {flags.__name__}`")
            resolve_name(work)(**values)

        WORK[run] = work
        return group.command(epilog=epilog)(run)

    return declare


@app.callback(invoke_without_command=True)
def common_options(version: Annotated[bool, Option("--version", help="Print the version.")] = False) -> None:
    """Options before the command."""
    if version:
        console.print(__version__)
        raise typer.Exit


def run() -> None:
    """Run the command line; errors of setstream become a message and an exit code."""
    sys.path.insert(0, "")  # a user's task, given as module:Class, may be in the current folder
    try:
        app()
    except SetstreamError as error:
        title, code = "error", 2 if isinstance(error, ConfigurationError) else 1
        if isinstance(error, NonFiniteError):
            title, code = "not finite", 3
        error_console.print(f"[red]{title}:[/red] {escape(str(error))}", soft_wrap=True)
        sys.exit(code)
