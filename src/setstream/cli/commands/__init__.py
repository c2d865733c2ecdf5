"""The flags of every command, in the order of `setstream --help`."""

from setstream.cli.commands import train, encode, slides, serve, report, listing  # isort: skip  (the order of the help)

__all__ = ["encode", "listing", "report", "serve", "slides", "train"]
