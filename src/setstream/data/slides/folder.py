"""Many slides of a folder, cut by several processes; a slide whose file of patches exists is not cut again.

Camelyon16: lymph nodes with and without metastases.

    training/normal/normal_001.tif ...         label 0, by its name
    training/tumor/tumor_001.tif ...           label 1, by its name
    testing/images/test_001.tif ...            label from testing/reference.csv: test_001,Tumor,IDC,Macro
    features_<backbone>/<slide>.h5             or features of them all in one folder
"""

import csv
import multiprocessing
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

from setstream.data.dataset import SetDataset
from setstream.data.formats import SOURCE_OF
from setstream.data.formats.file import existing
from setstream.data.slides.grid import GridOptions, cut, read_grid, write_grid
from setstream.data.slides.pyramid import SUFFIXES, Slide
from setstream.data.slides.source import SlideSource, overview, save_png
from setstream.errors import ConfigurationError, DataError
from setstream.sets.source import SetSource

REFERENCE = ("testing/reference.csv", "evaluation/reference.csv", "reference.csv")
LABELS = {"normal": 0, "negative": 0, "tumor": 1, "tumour": 1}
MASKS = ("mask", "annotation", "evaluation")  #: words in the names of .tif files, or of folders, that are not slides


def find_slides(path: str | Path, without: Sequence[str] = ()) -> list[Path]:
    """The slides at a path, a file or a folder with its folders, by name; none with a word of `without` in a name inside."""
    path = existing(path)
    inside = [path] if path.is_file() else sorted(file for file in path.rglob("*") if file.suffix.lower() in SUFFIXES)
    files = [file for file in inside if not any(word in str(file.relative_to(path)).lower() for word in without)]
    if not files:
        raise DataError(f"{path}: holds no slides; known are {', '.join(SUFFIXES)}")
    files.sort(key=lambda file: file.stem)
    for file, following in pairwise(files):
        if file.stem == following.stem:
            raise DataError(f"{file} and {following} have the same name, by which outputs are named: give folders one by one")
    return files


def patches_file(out: Path, options: GridOptions, name: str) -> Path:
    """Where the patches of a slide are written."""
    return out / options.folder / "patches" / f"{name}_patches.h5"


def patch_slide(path: Path, out: Path, options: GridOptions) -> int:
    """Cut one slide, unless that is done: the patches' coordinates, and an overview. Returns their number."""
    done = patches_file(out, options, path.stem)
    if done.exists():
        return len(read_grid(done))
    with Slide(path, options.level0_magnification) as slide:
        grid, tissue = cut(slide, options, path.stem)
        save_png(out / options.folder / "visualization" / f"{path.stem}.png", overview(slide, grid, tissue))
    write_grid(done, grid)  # last: it marks the slide as done
    return len(grid)


def patch_slides(
    slides: Sequence[Path],
    out: str | Path,
    options: GridOptions | None = None,
    *,
    workers: int = 1,
    on_bad: Callable[[str], None] | None = None,
) -> Iterator[tuple[Path, int | None]]:
    """Cut slides, `workers` at a time; yields each with the number of its patches.

    `on_bad` is called with what is wrong with a slide, which is then left out (None patches); without it, that is an error.
    """
    options, out = options or GridOptions(), Path(out)
    if workers < 1:
        raise ConfigurationError(f"workers must be at least 1; got {workers}")

    def outcome(path: Path, result: Callable[[], int]) -> tuple[Path, int | None]:
        try:
            return path, result()
        except DataError as error:
            if on_bad is None:
                raise
            on_bad(str(error))
            return path, None

    if workers == 1 or len(slides) < 2:
        for path in slides:
            yield outcome(path, partial(patch_slide, path, out, options))
        return
    # Spawned, not forked: torch and OpenSlide have threads and locks that a fork would copy in any state.
    with ProcessPoolExecutor(min(workers, len(slides)), multiprocessing.get_context("spawn")) as pool:
        waiting = {pool.submit(patch_slide, path, out, options): path for path in slides}
        try:
            for future in as_completed(waiting):
                yield outcome(waiting[future], future.result)
        except BrokenProcessPool as error:
            raise DataError("a process that cut slides was killed, as if memory had run out: use fewer workers") from error
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


def open_slides(path: str | Path, patches: str | Path | None = None, **options: Any) -> SetDataset:
    """The slides of a folder as sets of patches; `patches`: the folder of their `*_patches.h5` files, if there is one."""
    grids = [(file, None if patches is None else Path(patches) / f"{file.stem}_patches.h5") for file in find_slides(path)]
    return SetDataset([SlideSource(file, grid, **options) for file, grid in grids])


def read_reference(path: Path) -> dict[str, int]:
    """Labels of the test slides: the name in the first column, Normal or Tumor in the second; a header is skipped."""
    if not path.is_file():
        raise DataError(f"{path}: there is no such file; the labels of Camelyon16's test slides are in testing/reference.csv")
    with path.open(newline="") as file:
        rows = [row for row in csv.reader(file) if len(row) > 1]
    for number, row in enumerate(rows):
        if number and row[1].strip().lower() not in LABELS:
            raise DataError(f"{path}: row {number + 1} has {row[1]!r}; expected Normal or Tumor")
    kinds = ((Path(row[0].strip()).stem, row[1].strip().lower()) for row in rows)
    return {name: LABELS[kind] for name, kind in kinds if kind in LABELS}


def camelyon16_labels(names: Iterable[str], reference: dict[str, int]) -> dict[str, tuple[str, int]]:
    """The split and the label of each slide, by its name: `normal_*`, `tumor_*` or `test_*`.

    >>> camelyon16_labels(["tumor_004", "test_001"], {"test_001": 0})
    {'tumor_004': ('train', 1), 'test_001': ('test', 0)}
    """
    labels: dict[str, tuple[str, int]] = {}
    for name in names:
        kind = name.lower().partition("_")[0]
        if kind not in ("test", *LABELS):
            raise DataError(f"{name}: is not a slide of Camelyon16, whose names begin with normal_, tumor_ or test_")
        if kind == "test" and name not in reference:
            raise DataError(f"{name}: the reference has no label for it; it names {len(reference)} slides")
        labels[name] = ("test", reference[name]) if kind == "test" else ("train", LABELS[kind])
    return labels


def camelyon16(root: str | Path, features: str | Path | None = None, **options: Any) -> dict[str, SetDataset]:
    """Camelyon16 as {"train": ..., "test": ...}, labels 0 and 1: patches straight from the slides, or features of them.

    Args:
        features: A folder of feature files, named as the slides; the slides themselves are not needed then.
    """
    root = Path(root)
    sources: list[SetSource]
    if features is None:
        parts = [root / name for name in ("training", "testing") if (root / name).is_dir()] or [root]
        sources = [SlideSource(file, **options) for part in parts for file in find_slides(part, MASKS)]
    else:
        files = sorted(Path(features).iterdir())
        sources = [SOURCE_OF[file.suffix](file) for file in files if file.suffix in SOURCE_OF and file.name[0] != "."]
    names = [source.id for source in sources]
    places = [root / place for place in REFERENCE]
    file = next(filter(Path.is_file, places), places[0])
    known = camelyon16_labels(names, read_reference(file) if any(name.startswith("test") for name in names) else {})
    for source in sources:
        source.label = known[source.id][1]
    splits = ("train", "test")
    return {split: SetDataset([source for source in sources if known[source.id][0] == split]) for split in splits}
