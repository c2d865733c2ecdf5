"""`setstream encode`: sets in files through a trained model."""

import time
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from setstream.cli.options import AverageChunks, Builder, Device, Trust

EPILOG = (
    "[bold]Examples[/bold]\n\nsetstream encode runs/mine slides/ --out slides.parquet --states states.db\n\n"
    "setstream encode runs/mine new-patches/ --out slides.parquet --update states.db --states states-2.db\n\n"
    "setstream encode runs/mine events.parquet --out users.h5 --engine ray\n\n"
    "After an interruption, the same command goes on where it was."
)
console = Console()


def encode(
    model: Annotated[str, typer.Argument(help="A run folder, a saved model, a shipped model, or package.module:name.")],
    data: Annotated[Path, typer.Argument(help="Sets: a file or folder that ss.data.open recognises.")],
    out: Annotated[Path, typer.Option(help="A .parquet or .h5 file: one row per set.")],
    what: Annotated[str, typer.Option(help="representations, predictions or both.")] = "both",
    states: Annotated[Path | None, typer.Option(help="Keep the states in this new store.")] = None,
    update: Annotated[Path | None, typer.Option(help="Add the elements to the states of this earlier store.")] = None,
    chunk_size: Annotated[int, typer.Option(help="Elements that are encoded at a time.", min=1)] = 4096,
    engine: Annotated[str, typer.Option(help="local or ray.")] = "local",
    ray_address: Annotated[str | None, typer.Option(help="An existing Ray cluster; a local one unless given.")] = None,
    workers: Annotated[int | None, typer.Option(help="Ray workers.")] = None,
    set_column: Annotated[str | None, typer.Option(help="The column of set ids in a table.")] = None,
    columns: Annotated[str | None, typer.Option(help="The feature columns of a table, separated by commas.")] = None,
    skip_bad: Annotated[bool, typer.Option("--skip-bad", help="Leave out sets that cannot be read, and list them.")] = False,
    chunks: AverageChunks = None,
    device: Device = "auto",
    builder: Builder = None,
    trust: Trust = None,
) -> None:
    """Encode sets in files: representations and predictions, one row per set, in constant memory."""
    from setstream.bulk.encode import EncodeOptions, encode_sets
    from setstream.data import open_collection
    from setstream.tasks.loading import open_model
    from setstream.training.processes import choose_device

    options = EncodeOptions(what, states, update, chunk_size, engine, ray_address, workers, chunks)
    network = open_model(model, builder, trust or []).to(choose_device(device))
    sets, skipped = open_collection(data, set_column=set_column, columns=columns.split(",") if columns else None).check(
        skip_bad
    )
    began = time.monotonic()
    shown = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[rate]}"), TimeElapsedColumn())
    try:
        with Progress(*shown, console=console) as bar:
            row = bar.add_task("encoding", total=sets.total(), rate="")

            def show(elements: int, done: int) -> None:
                rate = elements / max(time.monotonic() - began, 1e-9)
                bar.update(row, completed=done, rate=f"{done:,} {sets.unit}, {elements:,} elements, {rate:,.0f}/s")

            count = encode_sets(network, sets, out, options, progress=show, on_bad=skipped.append if skip_bad else None)
    finally:  # also of a run that ends early
        for problem in skipped:
            console.print(f"[yellow]skipped[/yellow] {escape(problem)}", soft_wrap=True, highlight=False)
    left_out = f", {len(skipped)} skipped" if skipped else ""
    console.print(f"{count} sets{left_out}: {out}", highlight=False)
