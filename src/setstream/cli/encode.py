"""`setstream encode`: sets in files through a trained model."""

from pathlib import Path
from time import monotonic
from typing import Any

from setstream.bulk import EncodeOptions
from setstream.bulk.encode import encode_sets
from setstream.cli.command import Text, console, pop_opening, print_skipped, progress_bar
from setstream.data import open_collection
from setstream.models.model import SetModel
from setstream.tasks.loading import open_model


def run_encode(
    model: str, data: Path, out: Path, set_column: Text, columns: Text, time: Text, skip_bad: bool, **options: Any
) -> None:
    """Encode, and show elements per second; `options` are those of `EncodeOptions` and `open_model`."""
    opening, chosen = pop_opening(options), EncodeOptions(**options)
    network = open_model(model, **opening)
    chosen_columns = columns.split(",") if columns else None
    collection = open_collection(data, set_column=set_column, columns=chosen_columns, time_column=time)
    sets, skipped = collection.check(skip_bad)
    began, passes = monotonic(), (network.encoder if isinstance(network, SetModel) else network).passes
    try:
        with progress_bar() as bar:
            row = bar.add_task("encoding", total=sets.total() * passes, note="")

            def show(elements: int, done: int) -> None:
                rate = elements / max(monotonic() - began, 1e-9)
                bar.update(row, completed=done, note=f"{sets.unit}, {elements:,} elements, {rate:,.0f}/s")

            count = encode_sets(network, sets, out, chosen, progress=show, on_bad=skipped.append if skip_bad else None)
    finally:  # also if the run ends early
        for problem in skipped:
            print_skipped(problem)
    console.print(f"{count} sets{f', {len(skipped)} skipped' if skipped else ''}: {out}")
