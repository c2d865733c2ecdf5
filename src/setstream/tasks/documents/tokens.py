"""Documents as token ids: tokenised once, stored in a flat array, read through a memory map.

    <cache>/tokens-<corpus>-<digest>/tokens.npy       ids of all documents, one after another
                                     offsets.npy      document i is tokens[offsets[i]:offsets[i+1]]
                                     documents.json   id, labels, split and words of each

The digest covers the corpus and the tokenizer. There are no special tokens: models add their own.

    labels kept = { l : at least `label_minimum` training documents carry l }          documents without one are left out
"""

import hashlib
import json
from collections import Counter
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from setstream._utils.atomic import whole_or_nothing
from setstream._utils.registry import cache_folder
from setstream.errors import DataError
from setstream.tasks.documents.corpora import Corpus

BATCH = 256  # documents per call of the tokenizer


class Tokens(NamedTuple):
    """Token ids of documents; `about` has the id, labels, split and words of each."""

    ids: np.ndarray
    offsets: np.ndarray
    about: list[dict[str, Any]]

    def document(self, index: int, longest: int | None = None) -> Tensor:
        """The ids of one document, or its `longest` first ones: (N,) int64."""
        return torch.from_numpy(self.ids[self.offsets[index] : self.offsets[index + 1]][:longest].astype(np.int64))

    def length(self, index: int) -> int:
        return int(self.offsets[index + 1] - self.offsets[index])


def tokens_of(corpus: Corpus, tokenizer: Any) -> Tokens:
    """The corpus as token ids, from the cache if it is there; otherwise all documents are tokenised, in batches."""
    tables = tokenizer.backend_tokenizer.to_str() if tokenizer.is_fast else json.dumps(tokenizer.get_vocab(), sort_keys=True)
    digest = hashlib.sha256(f"{corpus.stamp}\n{tables}".encode()).hexdigest()[:12]
    folder = cache_folder() / f"tokens-{corpus.name}-{digest}"
    if not folder.is_dir():
        try:
            with whole_or_nothing(folder) as hidden:
                _write(corpus, tokenizer, hidden)
        except OSError:  # another process may have finished it
            if not folder.is_dir():
                raise
    about = json.loads((folder / "documents.json").read_text())
    return Tokens(np.load(folder / "tokens.npy", mmap_mode="r"), np.load(folder / "offsets.npy"), about)


def _write(corpus: Corpus, tokenizer: Any, folder: Path) -> None:
    folder.mkdir()
    dtype = np.uint16 if len(tokenizer) <= 2**16 else np.int32
    about, lengths, flat = [], [], folder / "flat"
    with flat.open("wb") as file:
        documents = iter(corpus.read())
        while batch := list(islice(documents, BATCH)):
            texts = [document.text for document in batch]
            for ids in tokenizer(texts, add_special_tokens=False, return_attention_mask=False, verbose=False)["input_ids"]:
                np.asarray(ids, dtype).tofile(file)
                lengths.append(len(ids))
            about += [{"id": d.id, "labels": d.labels, "split": d.split, "words": len(d.text.split())} for d in batch]
    if not sum(lengths):
        raise DataError(f"{corpus.name}: all documents are empty")
    np.save(folder / "tokens.npy", np.memmap(flat, dtype, "r"))
    flat.unlink()
    np.save(folder / "offsets.npy", np.cumsum([0, *lengths]))
    (folder / "documents.json").write_text(json.dumps(about))


@dataclass(frozen=True)
class Split:
    """Documents of one split by their index, which of the kept labels each carries, (n, L) bool, and the labels' names."""

    index: list[int]
    labels: Tensor
    names: list[str]

    def __len__(self) -> int:
        return len(self.index)


def labelled(tokens: Tokens, label_minimum: int) -> dict[str, Split]:
    """The documents with at least one kept label, by split; labels are sorted."""
    counts: Counter[str] = Counter()
    for about in tokens.about:
        counts.update(dict.fromkeys(about["labels"], int(about["split"] == "train")))
    names = sorted(label for label, count in counts.items() if count >= label_minimum)
    if not names:
        most = max(counts.values(), default=0)
        raise DataError(f"no label has {label_minimum} training documents (the most frequent has {most}): lower label_minimum")
    columns = {name: column for column, name in enumerate(names)}
    carried = [[columns[label] for label in about["labels"] if label in columns] for about in tokens.about]
    splits = {}
    for split in ("train", "val", "test"):
        used = [i for i, about in enumerate(tokens.about) if about["split"] == split and tokens.length(i) and carried[i]]
        if not used:
            raise DataError(f"no document of the split {split} has one of the {len(names)} labels: lower label_minimum")
        splits[split] = Split(used, torch.zeros(len(used), len(names), dtype=torch.bool), names)
        for row, index in enumerate(used):
            splits[split].labels[row, carried[index]] = True
    return splits
