"""Camelyon16: lymph nodes with and without metastases.

    training/normal/normal_001.tif ...         label 0, by its name
    training/tumor/tumor_001.tif ...           label 1, by its name
    testing/images/test_001.tif ...            label from testing/reference.csv: test_001,Tumor,IDC,Macro
    features_<backbone>/<slide>.h5             or features of them all in one folder

The paper trains on the 270 slides of training/ (110 with a tumour, appendix) and reports on the 129 of testing/ (49).
"""

import csv
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from setstream.data.dataset import SetDataset
from setstream.data.formats import SOURCE_OF
from setstream.data.slides.folder import find_slides
from setstream.data.slides.source import SlideSource
from setstream.errors import DataError
from setstream.sets.source import SetSource

#: Slides of each split in the paper.
PAPER = {"train": 270, "test": 129}
REFERENCE = ("testing/reference.csv", "evaluation/reference.csv", "reference.csv")
LABELS = {"normal": 0, "negative": 0, "tumor": 1, "tumour": 1}
#: Words in the names of .tif files, or of their folders, that are masks and not slides.
MASKS = ("mask", "annotation", "evaluation")


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

    Example:
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


def camelyon16(
    root: str | Path, features: str | Path | None = None, *, whole: bool = False, **options: Any
) -> dict[str, SetDataset]:
    """Camelyon16 as {"train": ..., "test": ...}, labels 0 and 1: patches straight from the slides, or features of them.

    Args:
        root: The folder with training/ and testing/.
        features: A folder of feature files, named as the slides; the slides themselves are not needed then.
        whole: Whether all of the paper's 270 and 129 slides must exist.
        options: How slides are cut (`GridOptions`).
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
    reference: dict[str, int] = {}
    if any(name.startswith("test") for name in names):
        reference = read_reference(next((root / place for place in REFERENCE if (root / place).is_file()), root / REFERENCE[0]))
    known = camelyon16_labels(names, reference)
    for source in sources:
        source.label = known[source.id][1]
    splits = {split: SetDataset([source for source in sources if known[source.id][0] == split]) for split in PAPER}
    if whole and (counts := {split: len(data) for split, data in splits.items()}) != PAPER:
        raise DataError(f"{root}: the paper has {PAPER} slides; there are {counts}")
    return splits
