"""`setstream slides`: whole-slide images."""

from pathlib import Path
from typing import Annotated

import typer
from typer import Argument, Option

from setstream.cli.command import STYLE, Builder, Device, Model, Trust, Words, app, command

group = typer.Typer(help="Whole-slide images: patches, features, heat maps.", **STYLE)
app.add_typer(group, name="slides")
CONTINUES = "If it is stopped, the same command continues: finished slides are skipped."
Slides = Annotated[Path, Argument(help="A slide, or a folder of slides.")]
Without = Annotated[Words, Option(help="Leave out files and folders with this word in their name.")]
SkipBad = Annotated[bool, Option("--skip-bad", help="Leave out slides that cannot be read, and list them.")]


@command(
    "setstream.cli.slides:run_patch",
    "setstream slides patch slides/ --out job",
    "setstream slides patch camelyon16/ --out job --workers 8 --without mask --without annotation --skip-bad",
    group=group,
    note=CONTINUES,
)
def patch(
    slides: Slides,
    out: Annotated[Path, Option(help="Folder to write to; patches are in OUT/20x_256px_0px_overlap/patches.")],
    magnification: Annotated[float, Option(help="Magnification of the patches.")] = 20.0,
    patch_size: Annotated[int, Option(help="Side of a patch, in pixels at that magnification.")] = 256,
    overlap: Annotated[int, Option(help="Overlap of neighbours, in the same pixels.")] = 0,
    min_tissue: Annotated[float, Option(help="Smallest share of tissue in a patch.")] = 0.25,
    threshold: Annotated[float | None, Option(help="Saturation above which there is tissue. Default: Otsu's.")] = None,
    level0_magnification: Annotated[float | None, Option(help="Magnification of the scan, for files without it.")] = None,
    workers: Annotated[int, Option(help="Processes.", min=1)] = 1,
    without: Without = None,
    skip_bad: SkipBad = False,
) -> None:
    """Find the tissue and cut it into patches: coordinates in TRIDENT's layout, and a picture of each slide."""


@command(
    "setstream.cli.slides:run_features",
    "setstream slides features slides/ job/20x_256px_0px_overlap --backbone efficientnet-lite0 --weights imagenet",
    "setstream slides features slides/ job/20x_256px_0px_overlap --backbone mine:encoder --device cuda",
    group=group,
    note=CONTINUES,
)
def features(
    slides: Slides,
    patches: Annotated[Path, Argument(help="The output of `slides patch`: OUT/20x_256px_0px_overlap.")],
    backbone: Annotated[str, Option(help="A backbone by name, or your own module as package.module:function.")],
    weights: Annotated[str | None, Option(help="For a backbone by name: a file, or a name it knows (imagenet).")] = None,
    chunk_size: Annotated[int, Option(help="Patches per chunk.", min=1)] = 64,
    device: Device = "auto",
    without: Without = None,
    skip_bad: SkipBad = False,
) -> None:
    """Features of every patch, straight from the slides: one HDF5 file per slide, in TRIDENT's layout."""


@command(
    "setstream.cli.slides:run_heatmap",
    "setstream slides heatmap runs/umbc --features job/20x_256px_0px_overlap/features_small/a.h5 --out maps --score attention",
    "setstream slides heatmap runs/umbc slides/a.svs --features a.h5 --out maps --write png --write geojson",
    "setstream slides heatmap mine:model slides/a.svs --out maps     (a model that reads patches itself)",
    group=group,
)
def heatmap(
    model: Model,
    out: Annotated[
        Path, Option(help="Folder for NAME.png, NAME.csv and others; NAME is that of the slide, or of the features.")
    ],
    slide: Annotated[
        Path | None, Argument(help="The slide, as the background; without it, patches are drawn on white.")
    ] = None,
    features_of: Annotated[Path | None, Option("--features", help="File of features; else the model reads patches.")] = None,
    patches: Annotated[Path | None, Option(help="File of coordinates, if they are not in the file of features.")] = None,
    patch_size: Annotated[int | None, Option(help="Side of a patch at level 0, if no file says it.", min=1)] = None,
    score: Annotated[
        str, Option(help="evidence (lists all), attention, attention-K (a branch), alone, instance.")
    ] = "evidence",
    write: Annotated[
        Words, Option(help="png, csv, parquet or geojson (for QuPath); may be repeated. Default: png, csv.")
    ] = None,
    chunk_size: Annotated[int, Option(help="Elements per chunk.", min=1)] = 256,
    device: Device = "auto",
    builder: Builder = None,
    trust: Trust = None,
) -> None:
    """What a trained model looks at, patch by patch: a picture, over the slide if it is given, and a table."""


@command("setstream.cli.slides:run_camelyon16", "setstream slides camelyon16 camelyon16/ --out labels.csv", group=group)
def camelyon16(
    root: Annotated[Path, Argument(help="The folder with training/ and testing/.")],
    out: Annotated[Path, Option(help="The CSV to write: slide_id, label, split.")],
    features_in: Annotated[Path | None, Option("--features", help="A folder of feature files instead of slides.")] = None,
) -> None:
    """Labels and the paper's split of Camelyon16, as a CSV that `ss.data` reads."""
