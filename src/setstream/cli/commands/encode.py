"""`setstream encode`."""

from pathlib import Path
from typing import Annotated

import typer

from setstream.cli.command import command
from setstream.cli.commands.flags import AverageChunks, Builder, Device, Model, Trust


@command(
    "setstream.cli.encode:run_encode",
    examples=[
        "setstream encode runs/mine slides/ --out slides.parquet --states states.db",
        "setstream encode runs/mine new-patches/ --out slides.parquet --update states.db --states states-2.db",
        "setstream encode runs/mine events.parquet --out users.h5 --engine ray",
    ],
    note="If it is killed or stopped, the same command continues the work.",
)
def encode(
    model: Model,
    data: Annotated[Path, typer.Argument(help="Sets: a file or folder that ss.data.open recognises.")],
    out: Annotated[Path, typer.Option(help="A .parquet or .h5 file: one row per set.")],
    what: Annotated[str, typer.Option(help="representations, predictions or both.")] = "both",
    states: Annotated[Path | None, typer.Option(help="Keep the states in this new store.")] = None,
    update: Annotated[Path | None, typer.Option(help="Add the elements to the states of this earlier store.")] = None,
    chunk_size: Annotated[int, typer.Option(help="Elements per chunk.", min=1)] = 4096,
    engine: Annotated[str, typer.Option(help="local or ray.")] = "local",
    ray_address: Annotated[str | None, typer.Option(help="An existing Ray cluster. Default: a local one.")] = None,
    workers: Annotated[int | None, typer.Option(help="Ray workers.")] = None,
    set_column: Annotated[str | None, typer.Option(help="For tables: the column of set ids.")] = None,
    columns: Annotated[str | None, typer.Option(help="For tables: the feature columns, separated by commas.")] = None,
    skip_bad: Annotated[bool, typer.Option("--skip-bad", help="Leave out sets that cannot be read, and list them.")] = False,
    chunks: AverageChunks = None,
    device: Device = "auto",
    builder: Builder = None,
    trust: Trust = None,
) -> None:
    """Encode sets in files: representations and predictions, one row per set, in constant memory."""
