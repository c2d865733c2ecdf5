"""Many slides of a folder, cut by several processes; files are written atomically.

A slide whose file of patches exists is not cut again: after an interruption, the same command continues.
"""

import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

from setstream.data.dataset import SetDataset
from setstream.data.formats.file import existing
from setstream.data.slides.grid import GridOptions, cut, read_grid, write_grid
from setstream.data.slides.overview import overview, save_png
from setstream.data.slides.pyramid import SUFFIXES, Slide
from setstream.data.slides.source import SlideSource, extract
from setstream.errors import ConfigurationError, DataError


def find_slides(path: str | Path, without: Sequence[str] = ()) -> list[Path]:
    """The slides at a path: a file, or all in a folder and its folders, by name.

    Files with a word of `without` in their name, or in the name of a folder inside, are left out, such as masks.
    """
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


def patch_slide(path: Path, out: Path, options: GridOptions, images: bool = False) -> int:
    """Cut one slide, unless that is done: coordinates, overview, and on request the patches as images. Returns their number."""
    done, pixels = patches_file(out, options, path.stem), out / options.folder / "images" / path.stem
    if done.exists():
        grid = read_grid(done)
    else:
        with Slide(path, options.level0_magnification) as slide:
            grid, tissue = cut(slide, options, path.stem)
            save_png(out / options.folder / "visualization" / f"{path.stem}.png", overview(slide, grid, tissue))
        write_grid(done, grid)  # last: it marks the slide as done
    if images and not pixels.exists():
        extract(SlideSource(path, grid, raw=True), pixels)
    return len(grid)


def patch_slides(
    slides: Sequence[Path],
    out: str | Path,
    options: GridOptions | None = None,
    *,
    workers: int = 1,
    images: bool = False,
    on_bad: Callable[[str], None] | None = None,
) -> Iterator[tuple[Path, int | None]]:
    """Cut slides, `workers` at a time; yields each when it is done, with the number of its patches.

    Patches are written as images, too, on request (`images`). `on_bad` is called with what is wrong with a slide, which is then
    left out (None patches); without it, that is an error.
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
            yield outcome(path, partial(patch_slide, path, out, options, images))
        return
    # Spawned, not forked: torch and OpenSlide have threads and locks that a fork would copy in any state.
    with ProcessPoolExecutor(min(workers, len(slides)), multiprocessing.get_context("spawn")) as pool:
        waiting = {pool.submit(patch_slide, path, out, options, images): path for path in slides}
        try:
            for future in as_completed(waiting):
                yield outcome(waiting[future], future.result)
        except BrokenProcessPool as error:
            raise DataError("a process that cut slides was killed, as if memory had run out: use fewer workers") from error
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


def open_slides(path: str | Path, patches: str | Path | None = None, **options: Any) -> SetDataset:
    """The slides of a folder as sets of patches; `patches`: the folder of their `*_patches.h5` files, if there is one."""
    files = find_slides(path)
    grids = [None if patches is None else Path(patches) / f"{file.stem}_patches.h5" for file in files]
    return SetDataset([SlideSource(file, grid, **options) for file, grid in zip(files, grids, strict=True)])
