"""The flags of every command, in the order of `setstream --help`."""

from setstream.cli.commands import train, trained, slides, listing  # isort: skip  (the order of the help)

__all__ = ["listing", "slides", "train", "trained"]
