"""EURLEX57K in its published layout: European laws with EuroVoc concepts.

    {train,dev,test}/*.json      header, recitals, main_body (a list), attachments, concepts

`inverted`, as in the paper and Park et al. 2022: the sections in reverse order, so that a model with a short window sees the
least informative ones.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from setstream.errors import DataError
from setstream.tasks.documents.corpus import Corpus, Document, read_json, stamp_of, words

FOLDERS = {"train": "train", "dev": "val", "test": "test"}
SECTIONS = ("header", "recitals", "main_body", "attachments")


def eurlex(folder: str, fewest_words: int = 0, inverted: bool = True) -> Corpus:
    """The laws of a folder; their labels are the numbers of concepts."""
    files = {name: sorted((Path(folder) / name).glob("*.json")) for name in FOLDERS}
    missing = [name for name, laws in files.items() if not laws]
    if missing:
        raise DataError(f"{folder}: expected *.json in train/, dev/ and test/; there are none in {', '.join(missing)}")

    def read() -> Iterator[Document]:
        for name, split in FOLDERS.items():
            for file in files[name]:
                law = _law(file)
                text = "\n".join(sections(law)[:: -1 if inverted else 1])
                if words(text) >= fewest_words:
                    yield Document(file.stem, text, tuple(sorted(set(map(str, law["concepts"])))), split)

    stamp = stamp_of(file for laws in files.values() for file in laws)
    return Corpus("eurlex", f"{stamp}-{fewest_words}{'-inverted' if inverted else ''}", read)


def sections(law: dict[str, Any]) -> list[str]:
    """Header, recitals, each part of the main body, attachments, as far as they exist."""
    values = [law.get(name) or [] for name in SECTIONS]
    return [text for value in values for text in (value if isinstance(value, list) else [value]) if text]


def _law(file: Path) -> dict[str, Any]:
    law = read_json(file)
    if not isinstance(law, dict) or not isinstance(law.get("concepts"), list):
        raise DataError(f"{file}: expected a mapping with a list of `concepts`")
    if not all(isinstance(text, str) for text in sections(law)):
        raise DataError(f"{file}: expected texts, or lists of texts, in {', '.join(SECTIONS)}")
    return law
