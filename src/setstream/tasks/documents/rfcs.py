"""RFCs with the keywords of their index: about 7,000 words each.

The texts are those of Debian's doc-rfc packages, or of a folder with rfcN.txt (or .txt.gz) and rfcN.json.
"""

import gzip
import re
from collections.abc import Iterator
from pathlib import Path

from setstream._utils.registry import fetch_debian
from setstream.errors import DataError
from setstream.tasks.documents.corpus import Corpus, Document, by_hash, read_json, stamp_of, words

KINDS = ("std", "std-proposed", "old-std", "informational", "experimental", "fyi-bcp", "misc", "others")
TEXT = re.compile(r"(rfc\d+)\.txt(\.gz)?")
# The index marks the drafts of some old documents by keywords like [--------|p].
MARK = "["


def rfcs(folder: str | None = None, fewest_words: int = 0) -> Corpus:
    """The texts with a keyword; split by a hash of their names."""

    def wanted(name: str) -> bool:
        return TEXT.fullmatch(name) is not None or re.fullmatch(r"rfc\d+\.json", name) is not None

    def root() -> Path:
        return Path(folder) if folder else fetch_debian([f"doc-rfc-{kind}" for kind in KINDS], "non-free", wanted)

    def read() -> Iterator[Document]:
        files = texts(root())
        for name, file in sorted(files.items(), key=lambda pair: int(pair[0][3:])):
            about = described(name, file)
            labels = keywords(about) if about.is_file() else ()
            if labels:
                content = gzip.decompress(file.read_bytes()) if file.suffix == ".gz" else file.read_bytes()
                text = content.decode("utf-8", "replace")
                if words(text) >= fewest_words:
                    yield Document(name, text, labels, by_hash(name))

    def stamp() -> str:
        files = texts(root())
        descriptions = (described(name, file) for name, file in files.items())
        return stamp_of([*files.values(), *(file for file in descriptions if file.is_file())])

    return Corpus("rfcs", f"{stamp() if folder else 'debian'}-{fewest_words}", read)


def texts(folder: Path) -> dict[str, Path]:
    """The text files below a folder, by the name of the RFC."""
    files = {match[1]: file for file in sorted(folder.rglob("rfc*")) if (match := TEXT.fullmatch(file.name))}
    if not files:
        raise DataError(f"{folder}: expected files rfcN.txt or rfcN.txt.gz; there are none")
    return files


def described(name: str, text: Path) -> Path:
    """The file with the keywords of a text."""
    return text.with_name(f"{name}.json")


def keywords(file: Path) -> tuple[str, ...]:
    """The keywords of a file, in lower case, without the index's marks."""
    about = read_json(file)
    given = about.get("keywords") if isinstance(about, dict) else None
    if not isinstance(given, list) or not all(isinstance(keyword, str) for keyword in given):
        raise DataError(f"{file}: expected a mapping with a list of `keywords`, all of them texts")
    plain = (" ".join(keyword.lower().split()) for keyword in given)
    return tuple(sorted({keyword for keyword in plain if keyword and not keyword.startswith(MARK)}))
