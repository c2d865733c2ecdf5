"""The command line: `setstream --help`.

command.py     how a command is declared, and how errors become messages and exit codes
commands/      the flags of every command: light, so that `--help` does not wait for torch
train.py, ...  the work of the commands, imported when one is run
"""

import sys
from pkgutil import resolve_name

from setstream._utils.optional import need
from setstream.errors import ConfigurationError


def main() -> None:
    """Run the command line; if its extra is missing, say how to install it."""
    try:
        for library in ("typer", "rich"):
            need(library, "cli", "the command line")
    except ConfigurationError as error:
        sys.exit(str(error))
    resolve_name("setstream.cli.commands:run")()
