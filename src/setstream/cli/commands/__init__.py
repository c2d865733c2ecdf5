"""The flags of every command."""

from setstream.cli.command import app, run
from setstream.cli.commands import main, slides  # noqa: F401 - they declare the commands

__all__ = ["app", "run"]
