"""A corpus: documents with labels, each in one of three splits.

    labels kept = { l : at least `label_minimum` training documents carry l }          0: all labels

A document without a kept label is left out, and counted. Splits do not depend on random numbers.
"""

import hashlib
import json
import zlib
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from setstream.errors import DataError

SPLITS = ("train", "val", "test")


@dataclass(frozen=True)
class Document:
    """A text, its labels and its split."""

    id: str
    text: str
    labels: tuple[str, ...]
    split: str


@dataclass(frozen=True)
class Corpus:
    """Documents that are read at each use; `stamp` changes when they do, and names their cache."""

    name: str
    stamp: str
    read: Callable[[], Iterable[Document]]


def by_hash(name: str) -> str:
    """A split by a hash of the name: 70% train, 10% val, 20% test.

    >>> [by_hash(f"rfc{number}") for number in (791, 1034)]
    ['train', 'test']
    """
    return by_order(zlib.crc32(name.encode()) % 10, 10)


def by_order(position: int, total: int) -> str:
    """A split by the position in an order: the first 70% train, the next 10% val, the last 20% test."""
    return "train" if 10 * position < 7 * total else "val" if 10 * position < 8 * total else "test"


def stamp_of(files: Iterable[Path]) -> str:
    """A short hash of the names, sizes and times of files."""
    lines = (f"{file.parent.name}/{file.name} {file.stat().st_size} {file.stat().st_mtime_ns}" for file in files)
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:12]


def read_json(file: Path) -> Any:
    """The content of a file, or an error that names it."""
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise DataError(f"{file}: not readable as JSON: {error}") from error


def label_set(documents: Iterable[tuple[str, tuple[str, ...]]], label_minimum: int) -> list[str]:
    """The labels of at least `label_minimum` training documents, sorted, from pairs (split, labels).

    >>> documents = [("train", ("a", "b")), ("train", ("a",)), ("test", ("b", "c"))]
    >>> label_set(documents, 2), label_set(documents, 0)
    (['a'], ['a', 'b', 'c'])
    """
    counts: Counter[str] = Counter()
    for split, labels in documents:
        counts.update(dict.fromkeys(labels, int(split == "train")))
    kept = sorted(label for label, count in counts.items() if count >= label_minimum)
    if not kept:
        most = max(counts.values(), default=0)
        raise DataError(f"no label has {label_minimum} training documents (the most frequent has {most}): lower label_minimum")
    return kept


def words(text: str) -> int:
    """The number of words between white space."""
    return len(text.split())
