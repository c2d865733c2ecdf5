"""`setstream slides`: from whole-slide images to patches, features and heat maps."""

from contextlib import nullcontext
from pathlib import Path
from typing import Any

from setstream._utils.atomic import write_atomically
from setstream.cli.command import File, Text, Words, console, print_skipped, progress_bar
from setstream.data import open_source
from setstream.data import slides as wsi
from setstream.data.slides.tables import TABLES
from setstream.errors import ConfigurationError, DataError
from setstream.tasks.loading import open_model
from setstream.tasks.mil.attribution import element_scores
from setstream.tasks.mil.slide_features import features_file, is_done, slide_for, trained_backbone, write_features
from setstream.training.processes import choose_device


def run_patch(slides: Path, out: Path, workers: int, without: Words, skip_bad: bool, **grid: Any) -> None:
    """Write the coordinates of patches; `grid` are the options of `GridOptions`."""
    options = wsi.GridOptions(**grid)
    paths = wsi.find_slides(slides, without or ())
    total, bad = 0, 0
    with progress_bar() as bar:
        row = bar.add_task("patching", total=len(paths), note="")
        on_bad = print_skipped if skip_bad else None
        for path, count in wsi.patch_slides(paths, out, options, workers=workers, on_bad=on_bad):
            total, bad = total + (count or 0), bad + (count is None)
            bar.update(row, advance=1, note=f"{path.stem}: {count or 0:,} patches")
    console.print(f"{len(paths) - bad} slides, {total:,} patches: {out / options.folder}", soft_wrap=True)


def run_features(
    slides: Path, patches: Path, backbone: str, weights: Text, chunk_size: int, device: str, without: Words, skip_bad: bool
) -> None:
    """Write the features of the patches of every slide that has none yet."""
    folder = patches / "patches" if (patches / "patches").is_dir() else patches
    files = sorted(file for file in folder.glob("*_patches.h5") if not file.name.startswith("."))
    if not files:
        raise DataError(f"{folder}: holds no *_patches.h5; `setstream slides patch` writes them")
    by_name = {path.stem: path for path in wsi.find_slides(slides, without or ())}
    module, place = trained_backbone(backbone, weights), choose_device(device)
    written = 0
    with progress_bar() as bar:
        row = bar.add_task("features", total=len(files), note="")
        for file in files:
            try:
                source = slide_for(file, by_name)
                target = features_file(folder, backbone, source.id)
                if not is_done(target, source):

                    def show(done: int, source: wsi.SlideSource = source) -> None:
                        bar.update(row, note=f"{source.id}: {done:,} of {len(source):,} patches")

                    write_features(module, source, target, encoder=backbone, chunk_size=chunk_size, device=place, progress=show)
                    written += 1
                source.close()
            except DataError as error:
                if not skip_bad:
                    raise
                print_skipped(str(error))
            bar.advance(row)
    console.print(f"{written} slides written: {features_file(folder, backbone, 'x').parent}", soft_wrap=True)


def run_heatmap(
    model: str,
    slide: File,
    out: Path,
    features_of: File,
    patches: File,
    patch_size: int | None,
    score: str,
    write: Words,
    chunk_size: int,
    **load: Any,
) -> None:
    """Write a picture and tables of the scores of a slide's patches; `load` are options of `open_model`."""
    kinds = tuple(write or ("png", "csv"))
    if wrong := [kind for kind in kinds if kind != "png" and f".{kind}" not in TABLES]:
        raise ConfigurationError(f"--write takes png, {', '.join(kind[1:] for kind in TABLES)}; got {wrong[0]!r}")
    network = open_model(model, **load)
    if features_of is not None:
        source, grid = open_source(features_of), wsi.read_grid(patches or features_of, patch_size)
    elif slide is not None:
        source = wsi.SlideSource(slide, patches)
        grid = source.grid
    else:
        raise ConfigurationError("a heat map needs --features, a file of features with coordinates, or a slide")
    if len(grid) != len(source):
        raise DataError(f"{patches or source.id}: {len(grid)} coordinates for {len(source)} elements of {source.id}")
    with console.status("computing scores"):
        scores = element_scores(network, source, chunk_size, None if score == "evidence" else [score])
    values = {name: value.double().numpy() for name, value in scores.elements.items()}
    name = out / (source.id if slide is None else slide.stem)
    for kind in kinds:
        path = name.with_name(f"{name.name}.{kind}")
        if kind != "png":
            wsi.write_scores(path, grid, values)
            continue
        with nullcontext() if slide is None else wsi.Slide(slide) as opened:
            wsi.save_png(path, wsi.heat_map(opened, grid, values[score]))
    files = ", ".join(f".{kind}" for kind in kinds)
    console.print(f"p = {scores.probability:.4f}, {len(grid):,} patches: {name}{files.removeprefix(',')}", soft_wrap=True)


def run_camelyon16(root: Path, out: Path, features_in: Path | None) -> None:
    """Write labels and splits."""
    splits = wsi.camelyon16(root, features_in)
    rows = [f"{source.id},{source.label},{split}" for split, data in splits.items() for source in data]
    write_atomically(out, "\n".join(["slide_id,label,split", *rows]) + "\n")
    counts = ", ".join(f"{len(data)} {split} ({sum(data.labels)} with a tumour)" for split, data in splits.items())
    console.print(f"{counts}: {out}", soft_wrap=True)
