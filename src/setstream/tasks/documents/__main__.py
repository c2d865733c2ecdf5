"""Fetch and tokenise corpora, and print what they are: python -m setstream.tasks.documents reuters rfcs pubmed."""

import argparse
import sys

from setstream.errors import SetstreamError
from setstream.tasks.documents.task import CORPORA, Documents


def main() -> None:
    """The statistics of each corpus that was named."""
    parser = argparse.ArgumentParser(prog="python -m setstream.tasks.documents", description=__doc__)
    names = f"one of {', '.join(CORPORA)}; NAME=FOLDER reads it from a folder (eurlex always, rfcs and pubmed if you like)"
    parser.add_argument("corpora", nargs="*", default=["reuters"], metavar="CORPUS", help=names)
    parser.add_argument("--bert", default="minilm", help="whose tokenizer: minilm, or a local folder")
    parser.add_argument("--label-minimum", type=int, help="training documents that a label needs")
    options = parser.parse_args()
    for name in options.corpora:
        corpus, _, folder = name.partition("=")
        try:
            found = Documents(corpus, folder or None, options.bert, label_minimum=options.label_minimum).statistics()
        except SetstreamError as error:
            sys.exit(f"error: {error}")
        print(corpus)
        for what, number in found.items():
            print(f"  {what:<24}{number:>12,.1f}".removesuffix(".0"))


if __name__ == "__main__":
    main()
