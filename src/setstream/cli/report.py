"""`setstream report`: finished runs as one page."""

from pathlib import Path

from setstream.cli.command import console
from setstream.report import write_report


def run_report(folders: list[Path], out: Path, figures: Path | None, trust: list[str] | None) -> None:
    """Write the page."""
    with console.status("drawing"):
        runs = write_report(folders, out, figures, trust or [])
    console.print(f"{len(runs)} runs: {out}", highlight=False)
