"""How a command is declared: a function whose parameters are its flags, and the import path of the function that does the work.

    @command("setstream.cli.report:run_report", examples=["setstream report runs/"])
    def report(folders: Annotated[list[Path], typer.Argument(help="Run folders.")]) -> None:
        '''Turn finished runs into a page.'''

The work gets the flags as keyword arguments of the same names. Its module is imported when the command is run, and only then:
torch takes seconds to import, and `--help` does not need it.
"""

from collections.abc import Callable, Sequence
from functools import wraps
from pkgutil import resolve_name
from typing import Any

import typer
from rich.console import Console

from setstream._utils.optional import need

console = Console()
error_console = Console(stderr=True)
#: The import path of each command's work.
WORK: dict[Callable[..., None], str] = {}


def make_app(**options: Any) -> typer.Typer:
    """A group of commands."""
    return typer.Typer(
        no_args_is_help=True, rich_markup_mode="rich", add_completion=False, pretty_exceptions_enable=False, **options
    )


app = make_app(
    name="setstream",
    help="Encode sets of any size, in any chunks, to the same answer; train through all of it in constant memory.",
)


def command(
    work: str,
    *,
    group: typer.Typer = app,
    needs: tuple[str, ...] = (),
    examples: Sequence[str] = (),
    note: str | None = None,
    **options: Any,
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Declare a command.

    Args:
        work: `package.module:function` that is called with the flags.
        group: the group that the command belongs to.
        needs: an extra, followed by its libraries that the module of the work imports.
        examples: command lines for the end of its help.
        note: a sentence below the examples.
        options: further options of `typer.Typer.command`.
    """
    title = ["[bold]Examples[/bold]" if len(examples) > 1 else "[bold]Example[/bold]"] if examples else []
    epilog = "\n\n".join([*title, *examples, *([note] if note else [])])

    def declare(flags: Callable[..., None]) -> Callable[..., None]:
        @wraps(flags)
        def run(**values: Any) -> None:
            for library in needs[1:]:
                need(library, needs[0], f"`setstream {flags.__name__}`")
            resolve_name(work)(**values)

        WORK[run] = work
        return group.command(epilog=epilog or None, **options)(run)

    return declare
