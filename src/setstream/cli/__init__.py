"""The command line: `setstream --help`."""

import sys


def main() -> None:
    """Run the command line; without its extra, say how to get it."""
    try:
        from setstream.cli.app import run
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] not in ("typer", "rich", "click"):
            raise
        sys.exit(f"the command line needs {error.name}: pip install 'setstream[cli]'")
    run()
