"""The program `setstream`: its commands, and how errors are reported.

Exit codes: 0 done, 1 a failure, 2 invalid options, 3 a loss that was not finite, 130 interrupted (and saved).
"""

import sys
from typing import Annotated

import typer
from rich.markup import escape

from setstream import __version__
from setstream.cli.command import app, console, error_console
from setstream.cli.commands import main, slides  # noqa: F401  (they declare the commands)
from setstream.errors import ConfigurationError, NonFiniteError, SetstreamError


def run() -> None:
    """Run the command line; errors of setstream become a message and an exit code."""
    sys.path.insert(0, "")  # a user's task, given as module:Class, may be in the current folder
    try:
        app()
    except SetstreamError as error:
        not_finite = isinstance(error, NonFiniteError)
        title = "not finite" if not_finite else "error"
        error_console.print(f"[red]{title}:[/red] {escape(str(error))}", soft_wrap=True)
        sys.exit(3 if not_finite else 2 if isinstance(error, ConfigurationError) else 1)


def _version(asked: bool) -> None:
    if asked:
        console.print(__version__)
        raise typer.Exit


@app.callback()
def common_options(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")] = False,
) -> None:
    """Options before the command."""
