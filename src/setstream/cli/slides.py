"""`setstream slides`: from whole-slide images to patches, features and heat maps."""

import csv
from collections import OrderedDict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from setstream.cli.options import Builder, Device, Trust
from setstream.errors import ConfigurationError, DataError

app = typer.Typer(
    help="Whole-slide images: patches, features, heat maps.",
    no_args_is_help=True,
    rich_markup_mode="rich",
    add_completion=False,
)
console = Console()
# Rows of a table that are written at a time.
ROWS = 4096

Slides = Annotated[Path, typer.Argument(help="A slide, or a folder that holds some.")]
Without = Annotated[list[str] | None, typer.Option(help="Leave out files and folders with this word in their name.")]
SkipBad = Annotated[bool, typer.Option("--skip-bad", help="Leave out slides that cannot be read, and list them.")]


def _bar() -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[note]}"))
    return Progress(*columns, TimeElapsedColumn(), console=console)


def _skipped(problem: str) -> None:
    console.print(f"[yellow]skipped[/yellow] {escape(problem)}", soft_wrap=True, highlight=False)


@app.command(
    epilog="[bold]Examples[/bold]\n\nsetstream slides patch slides/ --out job\n\n"
    "setstream slides patch camelyon16/ --out job --workers 8 --without mask --without annotation --skip-bad\n\n"
    "After an interruption, the same command goes on: slides that are done are skipped."
)
def patch(
    slides: Slides,
    out: Annotated[Path, typer.Option(help="Folder to write to; patches lie in OUT/20x_256px_0px_overlap/patches.")],
    magnification: Annotated[float, typer.Option(help="Of the patches.")] = 20.0,
    patch_size: Annotated[int, typer.Option(help="Their side, in pixels at that magnification.")] = 256,
    overlap: Annotated[int, typer.Option(help="Of neighbours, in the same pixels.")] = 0,
    min_tissue: Annotated[float, typer.Option(help="The share of tissue that a patch must have.")] = 0.25,
    threshold: Annotated[float | None, typer.Option(help="Saturation of tissue, at least; Otsu's unless given.")] = None,
    level0_magnification: Annotated[float | None, typer.Option(help="Of the scan, where the files do not have it.")] = None,
    images: Annotated[bool, typer.Option("--images", help="Write the patches themselves, too, as PNG files.")] = False,
    workers: Annotated[int, typer.Option(help="Processes.", min=1)] = 1,
    without: Without = None,
    skip_bad: SkipBad = False,
) -> None:
    """Find the tissue and cut it into patches: coordinates in TRIDENT's layout, and a picture of each slide."""
    from setstream.data.slides import GridOptions, find_slides, patch_slides

    options = GridOptions(magnification, patch_size, overlap, min_tissue, threshold, level0_magnification)
    files = find_slides(slides, without or ())
    total, bad = 0, 0
    with _bar() as bar:
        row = bar.add_task("patching", total=len(files), note="")
        on_bad = _skipped if skip_bad else None
        for path, count in patch_slides(files, out, options, workers=workers, images=images, on_bad=on_bad):
            total, bad = total + (count or 0), bad + (count is None)
            bar.update(row, advance=1, note=f"{path.stem}: {count or 0:,} patches")
    console.print(f"{len(files) - bad} slides, {total:,} patches: {out / options.folder}", highlight=False, soft_wrap=True)


@app.command(
    epilog="[bold]Examples[/bold]\n\n"
    "setstream slides features slides/ job/20x_256px_0px_overlap --backbone efficientnet-lite0 --weights imagenet\n\n"
    "setstream slides features slides/ job/20x_256px_0px_overlap --backbone mine:encoder --device cuda\n\n"
    "After an interruption, the same command goes on: slides that are done are skipped."
)
def features(
    slides: Slides,
    patches: Annotated[Path, typer.Argument(help="What `slides patch` wrote: OUT/20x_256px_0px_overlap.")],
    backbone: Annotated[str, typer.Option(help="A backbone by name, or your own module as package.module:function.")],
    weights: Annotated[str | None, typer.Option(help="Of a backbone by name: a file, or a name it knows (imagenet).")] = None,
    chunk_size: Annotated[int, typer.Option(help="Patches at a time.", min=1)] = 64,
    device: Device = "auto",
    without: Without = None,
    skip_bad: SkipBad = False,
) -> None:
    """Features of every patch, straight from the slides: one HDF5 file per slide, in TRIDENT's layout."""
    from setstream.data.slides import find_slides
    from setstream.tasks.mil.slide_features import features_file, is_done, slide_for, trained_backbone, write_features
    from setstream.training.processes import choose_device

    folder = patches / "patches" if (patches / "patches").is_dir() else patches
    files = sorted(file for file in folder.glob("*_patches.h5") if not file.name.startswith("."))
    if not files:
        raise DataError(f"{folder}: holds no *_patches.h5; `setstream slides patch` writes them")
    by_name = {path.stem: path for path in find_slides(slides, without or ())}
    module, place = trained_backbone(backbone, weights), choose_device(device)
    written = 0
    with _bar() as bar:
        row = bar.add_task("features", total=len(files), note="")
        for file in files:
            try:
                source = slide_for(file, by_name)
                target = features_file(folder, backbone, source.id)
                if not is_done(target, source):

                    def show(done: int, source: Any = source) -> None:
                        bar.update(row, note=f"{source.id}: {done:,} of {len(source):,} patches")

                    write_features(module, source, target, encoder=backbone, chunk_size=chunk_size, device=place, progress=show)
                    written += 1
                source.close()
            except DataError as error:
                if not skip_bad:
                    raise
                _skipped(str(error))
            bar.advance(row)
    console.print(f"{written} slides written: {features_file(folder, backbone, 'x').parent}", highlight=False, soft_wrap=True)


@app.command(
    epilog="[bold]Examples[/bold]\n\nsetstream slides heatmap runs/umbc slides/a.svs --out maps "
    "--features job/20x_256px_0px_overlap/features_efficientnet-lite0/a.h5\n\n"
    "setstream slides heatmap mine:model slides/a.svs --out maps     (a model that reads patches itself)"
)
def heatmap(
    model: Annotated[str, typer.Argument(help="A run folder, a saved model, or package.module:function.")],
    slide: Annotated[Path, typer.Argument(help="The slide.")],
    out: Annotated[Path, typer.Option(help="Folder for SLIDE.png and the table.")],
    features_of: Annotated[Path | None, typer.Option("--features", help="Its features, if the model reads features.")] = None,
    patches: Annotated[Path | None, typer.Option(help="Its file of patches, if the model reads patches.")] = None,
    score: Annotated[str, typer.Option(help="evidence (the table has all scores), attention, alone or instance.")] = "evidence",
    table: Annotated[str, typer.Option(help="Coordinates and scores as csv, parquet or h5.")] = "csv",
    chunk_size: Annotated[int, typer.Option(help="Elements at a time.", min=1)] = 256,
    device: Device = "auto",
    builder: Builder = None,
    trust: Trust = None,
) -> None:
    """Scores of each patch by a trained model: a picture over the slide, and a table."""
    from setstream.data import H5Source
    from setstream.data.slides import Slide, SlideSource, heat_map, read_grid, save_png
    from setstream.sets.source import SetSource
    from setstream.tasks.loading import open_model
    from setstream.tasks.mil.attribution import element_scores
    from setstream.training.processes import choose_device

    if table not in ("csv", "parquet", "h5"):
        raise ConfigurationError(f"the table must be csv, parquet or h5; got {table!r}")
    source: SetSource
    if features_of is not None:
        source, grid = H5Source(features_of), read_grid(features_of)
    else:
        source = SlideSource(slide, patches)
        grid = source.grid
    network = open_model(model, builder, trust or []).to(choose_device(device))
    with console.status("scoring"):
        scores = element_scores(network, source, chunk_size, None if score == "evidence" else [score])
    with Slide(slide) as opened:
        save_png(out / f"{slide.stem}.png", heat_map(opened, grid, scores.elements[score].double().numpy()))
    columns: dict[str, Any] = OrderedDict(x=grid.coords[:, 0], y=grid.coords[:, 1])
    columns |= {name: values.double().numpy() for name, values in scores.elements.items()}
    write_table(out / f"{slide.stem}.{table}", columns, grid.attributes() | {"probability": scores.probability})
    console.print(
        f"p = {scores.probability:.4f}, {len(grid):,} patches: {out / slide.stem}.png, .{table}",
        highlight=False,
        soft_wrap=True,
    )


def write_table(path: Path, columns: dict[str, Any], attributes: dict[str, Any]) -> None:
    """Columns as CSV, Parquet or HDF5 (which also keeps the attributes); whole or not at all."""
    from setstream._utils.atomic import whole_or_nothing
    from setstream._utils.optional import need

    with whole_or_nothing(path) as hidden:
        if path.suffix == ".csv":
            with hidden.open("w", newline="") as file:
                writer = csv.writer(file)
                writer.writerow(columns)
                for start in range(0, max(map(len, columns.values())), ROWS):
                    block = (values[start : start + ROWS].tolist() for values in columns.values())
                    writer.writerows(zip(*block, strict=True))
        elif path.suffix == ".parquet":
            need("pyarrow.parquet").write_table(need("pyarrow").table(dict(columns)), hidden)
        else:
            with need("h5py").File(hidden, "w") as file:
                for name, values in columns.items():
                    file.create_dataset(name, data=values)
                file.attrs.update(attributes)


@app.command(epilog="[bold]Example[/bold]\n\nsetstream slides camelyon16 camelyon16/ --out labels.csv")
def camelyon16(
    root: Annotated[Path, typer.Argument(help="The folder with training/ and testing/.")],
    out: Annotated[Path, typer.Option(help="The CSV to write: slide_id, label, split.")],
    features_in: Annotated[Path | None, typer.Option("--features", help="A folder of feature files instead of slides.")] = None,
    whole: Annotated[bool, typer.Option("--whole", help="Fail unless all 270 and 129 slides of the paper are there.")] = False,
) -> None:
    """Labels and the paper's split of Camelyon16, as a CSV that `ss.data` reads."""
    from setstream._utils.atomic import write_atomically
    from setstream.data.slides import camelyon16 as read

    splits = read(root, features_in, whole=whole)
    rows = [f"{source.id},{source.label},{split}" for split, data in splits.items() for source in data]
    out.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(out, "\n".join(["slide_id,label,split", *rows]) + "\n")
    counts = ", ".join(f"{len(data)} {split} ({sum(data.labels)} with a tumour)" for split, data in splits.items())
    console.print(f"{counts}: {out}", highlight=False, soft_wrap=True)
