"""`setstream encode`: sets in files through a trained model."""

import time
from pathlib import Path
from typing import Any

from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from setstream.bulk.encode import EncodeOptions, encode_sets
from setstream.cli.command import console, print_skipped
from setstream.data import open_collection
from setstream.tasks.loading import open_model


def run_encode(
    model: str,
    data: Path,
    out: Path,
    *,
    set_column: str | None,
    columns: str | None,
    skip_bad: bool,
    device: str,
    builder: str | None,
    trust: list[str] | None,
    **options: Any,
) -> None:
    """Encode, and show elements per second; `options` are the fields of `EncodeOptions`."""
    chosen = EncodeOptions(**options)
    network = open_model(model, builder, trust, device)
    collection = open_collection(data, set_column=set_column, columns=columns.split(",") if columns else None)
    sets, skipped = collection.check(skip_bad)
    began = time.monotonic()
    shown = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[rate]}"), TimeElapsedColumn())
    try:
        with Progress(*shown, console=console) as bar:
            row = bar.add_task("encoding", total=sets.total(), rate="")

            def show(elements: int, done: int) -> None:
                rate = elements / max(time.monotonic() - began, 1e-9)
                bar.update(row, completed=done, rate=f"{done:,} {sets.unit}, {elements:,} elements, {rate:,.0f}/s")

            count = encode_sets(network, sets, out, chosen, progress=show, on_bad=skipped.append if skip_bad else None)
    finally:  # also if the run ends early
        for problem in skipped:
            print_skipped(problem)
    console.print(f"{count} sets{f', {len(skipped)} skipped' if skipped else ''}: {out}")
