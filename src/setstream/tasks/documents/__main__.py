"""Fetch and tokenise corpora, and print what they are: python -m setstream.tasks.documents reuters rfcs pubmed."""

from __future__ import annotations

import sys

from setstream.tasks.documents.task import Documents

if __name__ == "__main__":
    for name in sys.argv[1:] or ["reuters"]:
        corpus, _, folder = name.partition("=")  # eurlex=PATH
        print(corpus)
        for what, number in Documents(corpus, folder or None).statistics().items():
            print(f"  {what:<24}{number:>12,.1f}".removesuffix(".0"))
