"""Which bags train, choose and test: drawn folds, and the files of splits that others have published.

    a folder with splits_0.csv, splits_1.csv, ...      CLAM: columns train, val, test with the ids, or (splits_0_bool.csv) a row
                                                       per id with True in one of them
    a table with columns fold_0, fold_1, ...           Patho-Bench, TRIDENT: a row per id with train, val or test
    a table with a column fold                         the number of the fold that tests the bag
    a table with a column split                        one split: train, val or test
    a table with columns train, val, test              one split of CLAM

Ids are those of slides or of patients. A split that has no validation bags gets some of its training bags.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from setstream.data.dataset import ID_COLUMNS, column, read_csv
from setstream.errors import DataError

Split = dict[str, list[str]]  # ids of train, val, test
PARTS = ("train", "val", "test")
NAMES = {"validation": "val", "valid": "val", "dev": "val", "tuning": "val"}


def folds(labels: Tensor, count: int, seed: int) -> list[list[int]]:
    """Stratified folds: the positions of the bags in each.

    >>> import torch
    >>> [len(fold) for fold in folds(torch.tensor([0, 1] * 10), 5, seed=0)]
    [4, 4, 4, 4, 4]
    """
    generator = np.random.default_rng(seed)
    classes = [(labels == label).nonzero().flatten().numpy() for label in labels.unique()]
    order = np.concatenate([generator.permutation(positions) for positions in classes]).tolist()
    return [sorted(order[fold::count]) for fold in range(count)]


def read_splits(path: str | Path) -> list[Split]:
    """The splits in a file or a folder, in their order."""
    path = Path(path)
    if not path.is_dir():
        return _in_table(path)
    numbered = {int(match[1]): file for file in path.iterdir() if (match := re.fullmatch(r"splits_(\d+)\.csv", file.name))}
    if not numbered:
        files = {
            int(match[1]): file for file in path.iterdir() if (match := re.fullmatch(r"splits_(\d+)_bool\.csv", file.name))
        }
        numbered = files
    if not numbered or sorted(numbered) != list(range(len(numbered))):
        raise DataError(f"{path}: expected CLAM's splits_0.csv, splits_1.csv, ...; found {sorted(numbered) or 'none'}")
    return [split for number in sorted(numbered) for split in _in_table(numbered[number])]


def _in_table(path: Path) -> list[Split]:
    rows = read_csv(path)
    names = list(rows[0]) if rows else []
    listed = [name for name in names if name in PARTS]
    if listed and all(row[name] in ("True", "False", "1", "0") for row in rows for name in listed):
        ids = [row[names[0]] for row in rows]
        return [{name: [id for id, row in zip(ids, rows, strict=True) if row[name] in ("True", "1")] for name in listed}]
    if listed:
        return [{name: [row[name] for row in rows if row[name]] for name in listed}]
    by_fold = sorted((name for name in names if re.fullmatch(r"fold_?\d+", name)), key=lambda name: int(name[4:].strip("_")))
    if by_fold or "split" in names:
        ids = column(rows, ID_COLUMNS, path)
        return [_parts(zip(ids, (row[name] for row in rows), strict=True), f"{path}, {name}") for name in by_fold or ["split"]]
    if "fold" in names:
        tested = dict(zip(column(rows, ID_COLUMNS, path), column(rows, ["fold"], path), strict=True))
        numbers = sorted({fold for fold in tested.values() if fold}, key=lambda fold: (len(fold), fold))
        pairs = [[(id, "test" if fold == number else "train") for id, fold in tested.items() if fold] for number in numbers]
        return [_parts(pair, str(path)) for pair in pairs]
    expected = "columns train, val, test; fold_0, fold_1, ...; or a column fold or split"
    raise DataError(f"{path}: expected {expected}; its columns are {names}")


def _parts(pairs: Iterable[tuple[str, str]], where: str) -> Split:
    split: Split = {}
    for id, part in pairs:
        name = NAMES.get(part.strip().lower(), part.strip().lower())
        if name and name not in PARTS:
            raise DataError(f"{where}: {id} is in {part!r}; expected one of {', '.join(PARTS)}, or nothing")
        if name:
            split.setdefault(name, []).append(id)
    return split


def positions(split: Split, slides: Sequence[Sequence[str]], where: Any) -> dict[str, list[int]]:
    """The positions of the bags in each part, in the split's order; `slides`: for each bag, its id and those of its slides."""
    number_of: Mapping[str, int] = {id: number for number, ids in enumerate(slides) for id in ids}
    chosen: dict[str, list[int]] = {}
    for name, ids in split.items():
        if missing := [id for id in ids if id not in number_of]:
            raise DataError(f"{where}: there are no bags {missing[:5]}{' ...' if len(missing) > 5 else ''} among {len(slides)}")
        chosen[name] = list(dict.fromkeys(number_of[id] for id in ids))
    for first, second in (("train", "val"), ("train", "test"), ("val", "test")):
        if both := set(chosen.get(first, [])) & set(chosen.get(second, [])):
            raise DataError(f"{where}: {slides[min(both)][0]} is in {first} and in {second}: a bag, or a patient, has one part")
    return chosen
