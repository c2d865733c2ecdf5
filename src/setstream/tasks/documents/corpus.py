"""What a corpus is: documents with labels, each in one of three splits.

    labels kept = { l : at least `label_minimum` training documents carry l }          0: also those that none carries

A document that keeps no label is left out, and counted. A split depends on the document alone, never on a random number.
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
    """Documents that are read when they are asked for.

    stamp: changes when the documents do; what was made of them is kept under it.
    """

    name: str
    stamp: str
    read: Callable[[], Iterable[Document]]


def by_hash(name: str) -> str:
    """A split that follows from the name: 70% train, 10% val, 20% test.

    >>> [by_hash(f"rfc{number}") for number in (791, 1034)]
    ['train', 'test']
    """
    place = zlib.crc32(name.encode()) % 10
    return "train" if place < 7 else "val" if place == 7 else "test"


def by_order(position: int, total: int) -> str:
    """A split that follows from the place in an order: the first 70% train, the next 10% val, the last 20% test."""
    return "train" if 10 * position < 7 * total else "val" if 10 * position < 8 * total else "test"


def stamp_of(files: Iterable[Path]) -> str:
    """Names with their folders, sizes and times of files as a few letters."""
    lines = (f"{file.parent.name}/{file.name} {file.stat().st_size} {file.stat().st_mtime_ns}" for file in files)
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:12]


def read_json(file: Path) -> Any:
    """What a file holds, or an error that names it."""
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise DataError(f"{file}: is no JSON that can be read: {error}") from error


def label_set(documents: Iterable[tuple[str, tuple[str, ...]]], label_minimum: int) -> list[str]:
    """Labels of at least so many training documents, in the order of their names, from pairs (split, labels).

    >>> documents = [("train", ("a", "b")), ("train", ("a",)), ("test", ("b", "c"))]
    >>> label_set(documents, 2), label_set(documents, 0)
    (['a'], ['a', 'b', 'c'])
    """
    counts: Counter[str] = Counter()
    for split, labels in documents:
        counts.update(dict.fromkeys(labels, int(split == "train")))
    found = sorted(label for label, count in counts.items() if count >= label_minimum)
    if not found:
        most = max(counts.values(), default=0)
        raise DataError(
            f"no label stands at {label_minimum} training documents (the most frequent has {most}): lower label_minimum"
        )
    return found


def words(text: str) -> int:
    """How many, between white space."""
    return len(text.split())
