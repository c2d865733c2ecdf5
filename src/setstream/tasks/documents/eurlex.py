"""EURLEX57K in its published layout: European laws with concepts of EuroVoc.

    {train,dev,test}/*.json      header, recitals, main_body (a list), attachments, concepts

`inverted` is how the paper reads it, after Park et al. 2022: the sections in the opposite order, so that what a model with a
short window sees first is what says least.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from setstream.errors import DataError
from setstream.tasks.documents.corpus import Corpus, Document, read_json, stamp_of, words

FOLDERS = {"train": "train", "dev": "val", "test": "test"}
SECTIONS = ("header", "recitals", "main_body", "attachments")


def eurlex(folder: str, fewest_words: int = 0, inverted: bool = True) -> Corpus:
    """Laws of a folder; their labels are the numbers of concepts."""
    files = {name: sorted((Path(folder) / name).glob("*.json")) for name in FOLDERS}
    missing = [name for name, own in files.items() if not own]
    if missing:
        raise DataError(f"{folder}: EURLEX57K has *.json in train/, dev/ and test/; there are none in {', '.join(missing)}")

    def read() -> Iterator[Document]:
        for name, split in FOLDERS.items():
            for file in files[name]:
                law = _law(file)
                text = "\n".join(sections(law)[:: -1 if inverted else 1])
                if words(text) >= fewest_words:
                    yield Document(file.stem, text, tuple(sorted(set(map(str, law["concepts"])))), split)

    stamp = stamp_of(file for own in files.values() for file in own)
    return Corpus("eurlex", f"{stamp}-{fewest_words}{'-inverted' if inverted else ''}", read)


def sections(law: dict[str, Any]) -> list[str]:
    """Header, recitals, each part of the main body, attachments: those that there are."""
    found: list[str] = []
    for name in SECTIONS:
        own = law.get(name) or []
        found += own if isinstance(own, list) else [own]
    return [text for text in found if text]


def _law(file: Path) -> dict[str, Any]:
    found = read_json(file)
    if not isinstance(found, dict) or not isinstance(found.get("concepts"), list):
        raise DataError(f"{file}: a law is a mapping with a list of `concepts`; this one is not")
    if not all(isinstance(text, str) for text in sections(found)):
        raise DataError(f"{file}: {', '.join(SECTIONS)} are texts, or lists of texts; here they are not")
    return found
