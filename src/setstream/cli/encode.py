"""`setstream encode`: sets in files through a trained model."""

from __future__ import annotations

import time
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from setstream import data as sets
from setstream.cli.options import build_task, read_run
from setstream.data import ParquetSets, SetDataset
from setstream.data.parquet import SUFFIXES
from setstream.errors import ConfigurationError
from setstream.model import SetModel
from setstream.scale.bulk import encode_sets
from setstream.training.checkpoint import load_weights
from setstream.training.processes import choose_device


def load_model(run_folder: Path, device: str) -> SetModel:
    """The trained model of a finished run."""
    config = read_run(run_folder)
    model = build_task(config).build(config.model, **config.model_options)
    weights = run_folder / "model.safetensors"
    if not weights.exists():
        raise ConfigurationError(f"{run_folder} is not finished: it has no model.safetensors yet")
    load_weights(model, weights)
    return model.to(choose_device(device)).eval()


def open_data(path: Path, set_column: str | None, columns: list[str] | None) -> SetDataset | ParquetSets:
    """Tables as they are, everything else as a dataset of sources."""
    tables = path.suffix in SUFFIXES or (path.is_dir() and any(file.suffix in SUFFIXES for file in path.iterdir()))
    return ParquetSets(path, set_column, columns) if tables else sets.open(path)


def _skipped(problem: str, console: Console) -> None:
    console.print(f"[yellow]skipped[/yellow] {escape(problem)}", soft_wrap=True, highlight=False)


def run_encode(
    run_folder: Path,
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
    columns: list[str] | None,
    skip_bad: bool,
    device: str,
    console: Console,
) -> None:
    """Encode, and show elements a second."""
    model = load_model(run_folder, device)
    found = open_data(data, set_column, columns)
    if isinstance(found, SetDataset):
        found, problems = found.check(skip_bad)
        for problem in problems:
            _skipped(problem, console)
    total = len(found) if isinstance(found, SetDataset) else None
    began = time.monotonic()
    shown = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[rate]}"), TimeElapsedColumn())
    with Progress(*shown, console=console) as bar:
        row = bar.add_task("encoding", total=total, rate="")

        def show(elements: int, done: int) -> None:
            rate = elements / max(time.monotonic() - began, 1e-9)
            bar.update(row, completed=done, rate=f"{done} sets, {elements:,} elements, {rate:,.0f}/s")

        count = encode_sets(
            model,
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
            on_bad=(lambda problem: _skipped(problem, console)) if skip_bad else None,
        )
    console.print(f"{count} sets: {out}", highlight=False)
