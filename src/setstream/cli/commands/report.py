"""`setstream report` and `setstream demo`."""

from pathlib import Path
from typing import Annotated

import typer

from setstream.cli.command import command
from setstream.cli.commands.flags import Trust


@command("setstream.cli.report:run_report", examples=["setstream report runs/clustering --out report.html"])
def report(
    folders: Annotated[list[Path], typer.Argument(help="Run folders, or folders that hold some.")],
    out: Annotated[Path, typer.Option(help="The page to write.")] = Path("report.html"),
    figures: Annotated[Path | None, typer.Option(help="A folder for the page's figures as files.")] = None,
    trust: Trust = None,
) -> None:
    """Turn finished runs into one self-contained HTML page."""


@command("setstream.cli.demo:run_demo", examples=["setstream demo --out out/demo --seed 7"])
def demo(
    out: Annotated[Path, typer.Option(help="Folder for the figure, the animation and the report.")] = Path("out/demo"),
    seed: Annotated[int, typer.Option(help="The set to draw; the default is easy to see.")] = 129,
    points: Annotated[int, typer.Option(help="Points in the set.", min=16)] = 512,
) -> None:
    """Stream one set in four orders through two trained models, and compare their answers."""
