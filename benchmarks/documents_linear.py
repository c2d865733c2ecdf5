"""What a bag of words without any network reaches on the documents' task: TF-IDF and a logistic regression for each label.

    python benchmarks/documents_linear.py reuters rfcs

The same tokens, labels and splits as the models'. The strength of the regression is the best of `--strengths` by micro F1 at
0.5 on the validation documents; the tuned threshold is theirs too.
"""

from __future__ import annotations

import argparse
import time

import numpy as np
import scipy.sparse as sparse
import torch
from sklearn.feature_extraction.text import TfidfTransformer
from sklearn.linear_model import LogisticRegression
from sklearn.multiclass import OneVsRestClassifier

from setstream.tasks.documents.task import CORPORA, Documents, best_threshold, summary


def counts(task: Documents, split: str, words: int) -> sparse.csr_matrix:
    """How often each word comes in each document: (D, V)."""
    documents = [task.tokens.document(index).numpy() for index in task.splits[split].index]
    ends = np.cumsum([0, *map(len, documents)])
    found = sparse.csr_matrix((np.ones(ends[-1]), np.concatenate(documents), ends), shape=(len(documents), words))
    found.sum_duplicates()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("corpora", nargs="+", choices=[name for name in CORPORA if name != "eurlex"], help="by name")
    parser.add_argument("--strengths", type=float, nargs="+", default=[10.0, 100.0, 1000.0], help="C, to choose from")
    options = parser.parse_args()
    print("| corpus | strength | micro F1 | macro F1 | micro F1, tuned τ | macro F1, tuned τ | seconds |\n" + "|---" * 7 + "|")
    for name in options.corpora:
        task, began = Documents(name), time.perf_counter()
        words = 1 + max(int(task.tokens.document(index).max()) for own in task.splits.values() for index in own.index)
        train, val, test = (counts(task, split, words) for split in ("train", "val", "test"))
        scale = TfidfTransformer(sublinear_tf=True).fit(train)
        tried = []
        for strength in options.strengths:
            one = LogisticRegression(C=strength, solver="liblinear", max_iter=300)
            model = OneVsRestClassifier(one).fit(scale.transform(train), task.splits["train"].labels.numpy())
            scores, truth = torch.tensor(model.predict_proba(scale.transform(val))), task.splits["val"].labels
            threshold = best_threshold(scores, truth)
            tried.append((summary(scores, truth, threshold)["micro_f1"], strength, threshold, model))
        _, strength, threshold, model = max(tried, key=lambda own: own[:2])
        scores = torch.tensor(model.predict_proba(scale.transform(test)))
        found = summary(scores, task.splits["test"].labels, threshold)
        shown = " | ".join(f"{found[own]:.3f}" for own in ("micro_f1", "macro_f1", "micro_f1_tuned", "macro_f1_tuned"))
        print(f"| {name} | {strength:g} | {shown} | {time.perf_counter() - began:.0f} |", flush=True)


if __name__ == "__main__":
    main()
