"""Fetch and tokenise corpora, and print their sizes: python benchmarks/documents_corpora.py reuters rfcs pubmed."""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmarks.evidence_common import corpus_sizes

from setstream.errors import SetstreamError
from setstream.tasks.documents.task import CORPORA, Documents


def main() -> None:
    """The statistics of each corpus that was named."""
    parser = argparse.ArgumentParser(description=__doc__)
    names = f"one of {', '.join(CORPORA)}; NAME=FOLDER reads it from a folder (required for eurlex; rfcs and pubmed, too)"
    parser.add_argument("corpora", nargs="*", default=["reuters"], metavar="CORPUS", help=names)
    parser.add_argument("--bert", default="minilm", help="the model whose tokenizer is used: minilm, or a local folder")
    parser.add_argument("--label-minimum", type=int, help="the smallest number of training documents with a label")
    options = parser.parse_args()
    for name in options.corpora:
        corpus, _, folder = name.partition("=")
        try:
            sizes = corpus_sizes(Documents(corpus, folder or None, options.bert, label_minimum=options.label_minimum))
        except SetstreamError as error:
            sys.exit(f"error: {error}")
        print(corpus)
        for what, number in sizes.items():
            print(f"  {what:<24}{number:>12,.1f}".removesuffix(".0"))


if __name__ == "__main__":
    main()
