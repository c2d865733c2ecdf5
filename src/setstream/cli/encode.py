"""`setstream encode`: sets in files through a trained model."""

import time
from pathlib import Path

from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from setstream import data as sets
from setstream.bulk.encode import encode_sets
from setstream.cli.command import console
from setstream.data import ParquetSets, SetDataset
from setstream.data.parquet import is_table
from setstream.tasks.loading import open_model
from setstream.training.processes import choose_device


def _ignore(problem: str) -> None:
    """What is wrong with a file is told when it is encoded."""


def run_encode(
    model: str,
    data: Path,
    out: Path,
    *,
    what: str,
    states: Path | None,
    update: Path | None,
    chunk_size: int,
    engine: str,
    ray_address: str | None,
    workers: int | None,
    set_column: str | None,
    columns: str | None,
    skip_bad: bool,
    chunks: str | None,
    device: str,
    builder: str | None,
    trust: list[str] | None,
) -> None:
    """Encode, and show elements a second."""
    network = open_model(model, builder, trust or []).to(choose_device(device))
    found = ParquetSets(data, set_column, columns.split(",") if columns else None) if is_table(data) else sets.open(data)
    skipped: list[str] = []
    if isinstance(found, SetDataset):
        found, skipped = found.check(skip_bad)
    total, unit = (
        (len(found), "sets")
        if isinstance(found, SetDataset)
        else (sum(group.rows for group in found.groups(_ignore if skip_bad else None)), "rows")
    )
    began = time.monotonic()
    shown = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[rate]}"), TimeElapsedColumn())
    try:
        with Progress(*shown, console=console) as bar:
            row = bar.add_task("encoding", total=total, rate="")

            def show(elements: int, done: int) -> None:
                rate = elements / max(time.monotonic() - began, 1e-9)
                bar.update(row, completed=done, rate=f"{done:,} {unit}, {elements:,} elements, {rate:,.0f}/s")

            count = encode_sets(
                network,
                found,
                out,
                what=what,
                states=states,
                update=update,
                chunk_size=chunk_size,
                engine=engine,
                progress=show,
                ray_address=ray_address,
                workers=workers,
                chunks=chunks,
                on_bad=skipped.append if skip_bad else None,
            )
    finally:  # also of a run that ends early
        for problem in skipped:
            console.print(f"[yellow]skipped[/yellow] {escape(problem)}", soft_wrap=True, highlight=False)
    left_out = f", {len(skipped)} skipped" if skipped else ""
    console.print(f"{count} sets{left_out}: {out}", highlight=False)
