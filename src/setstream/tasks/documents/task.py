"""Long documents: several labels for each, from all its words.

loss = mean over documents of  - Σ_l ( y_l log σ(z_l) + (1 - y_l) log(1 - σ(z_l)) )          z_l: the logit of label l
ŷ_l  = [ σ(z_l) ≥ τ ]          τ = 0.5, or the τ with the best micro F1 on the validation documents
F1   = 2 TP / (2 TP + FP + FN)

Micro F1 counts over all documents and labels. Macro F1 is the mean over labels of each label's F1; a label that is neither
present nor predicted counts 0. Intervals are bootstraps over documents.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from setstream._utils.import_path import find
from setstream.errors import ConfigurationError
from setstream.gradients.encode import encode as encode_sets
from setstream.models.model import SetModel
from setstream.report.page import Page
from setstream.report.runs import Group, add_results, group_by, metric
from setstream.tasks.documents.corpora import eurlex, reuters
from setstream.tasks.documents.language import tokenizer_of
from setstream.tasks.documents.models import MODELS
from setstream.tasks.documents.released import MODELS as RELEASED
from setstream.tasks.documents.tokens import Split, Tokens, labelled, tokens_of
from setstream.tasks.registry import interval_ends
from setstream.training.task import Batch, Encode, Task, in_epochs

CORPORA = {"reuters": (200, 20), "rfcs": (0, 30), "pubmed": (0, 50), "eurlex": (0, 0)}  #: `fewest_words`, `label_minimum`
EXPERIMENTS = {name: f"benchmarks.corpora:{name}" for name in ("rfcs", "pubmed")}  #: in a checkout only
TEST_BATCH = 8
TUNED = {"": "", "_tuned": ", tuned τ"}  #: columns of the report
METRICS = {f"{mean} F1{text}": metric(f"{mean}_f1{suffix}") for suffix, text in TUNED.items() for mean in ("micro", "macro")}


def f1_scores(predicted: Tensor, truth: Tensor, weight: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Micro and macro F1 of bool (D, L); with weights (R, D) of documents, the number of times each counts, R of each."""
    weight = torch.ones(1, len(truth)) if weight is None else weight
    hits = weight @ (predicted & truth).float()  # (R, L)
    total = weight @ (predicted.float() + truth.float())  # 2 TP + FP + FN
    micro = 2 * hits.sum(1).double() / total.sum(1).double().clamp(min=1)
    return micro, (2 * hits.double() / total.double().clamp(min=1)).mean(1)


def best_threshold(scores: Tensor, truth: Tensor) -> float:
    """The threshold with the highest micro F1, halfway between two neighbouring scores."""
    order = scores.flatten().double().sort(descending=True)
    hits = truth.flatten()[order.indices].double().cumsum(0)
    taken = torch.arange(1, len(hits) + 1, dtype=torch.float64)
    micro = 2 * hits / (taken + truth.sum())
    values = order.values
    ends = torch.cat([values[1:] < values[:-1], torch.tensor([True])])  # equal scores are taken together
    best = int(micro.masked_fill(~ends, -1.0).argmax())
    below = float(values[best + 1]) if best + 1 < len(values) else 0.0
    return (float(values[best]) + below) / 2


def intervals(predicted: Tensor, truth: Tensor, draws: int = 1000, seed: int = 0, level: float = 0.95) -> dict[str, float]:
    """Bootstrap intervals of micro and macro F1 over documents: `micro_f1_low`, `micro_f1_high` and so on."""
    generator = torch.Generator().manual_seed(seed)
    scores = []
    for start in range(0, draws, 100):
        index = torch.randint(len(truth), (min(100, draws - start), len(truth)), generator=generator)
        weight = torch.zeros(index.shape).scatter_add_(1, index, torch.ones(index.shape))
        scores.append(f1_scores(predicted, truth, weight))
    micro, macro = (torch.cat(values) for values in zip(*scores, strict=True))
    return interval_ends({"micro_f1": micro, "macro_f1": macro}, level)


def summary(scores: Tensor, truth: Tensor, threshold: float, *, quick: bool = True) -> dict[str, float]:
    """Micro and macro F1 at 0.5 and at a tuned threshold; with their intervals unless `quick`."""
    metrics = {"threshold": threshold}
    for suffix, limit in (("", 0.5), ("_tuned", threshold)):
        micro, macro = f1_scores(scores >= limit, truth)
        ends = {} if quick else intervals(scores >= limit, truth)
        values = {"micro_f1": float(micro), "macro_f1": float(macro)} | ends
        metrics |= {name.replace("f1", f"f1{suffix}"): value for name, value in values.items()}
    return metrics


@dataclass(eq=False)
class Documents(Task):
    """Documents of a corpus, as sets of token ids."""

    name = "documents"
    summary = "long documents with many labels, as multisets of words (micro and macro F1)"
    report = "setstream.tasks.documents.task:add_report"
    models = MODELS | RELEASED

    corpus: str = "reuters"  #: reuters, eurlex, rfcs or pubmed; or your own, package.module:function
    folder: str | None = None  #: where the corpus is; required for eurlex, possible for others but reuters
    bert: str = "minilm"  #: the pretrained model whose tokenizer and word vectors are used: minilm, or a local folder
    fewest_words: int | None = None  #: words of the shortest document that is used; None: 200 for reuters, 0 for others
    label_minimum: int | None = None  #: training documents that a label needs; None: reuters 20, rfcs 30, pubmed 50, eurlex 0
    inverted: bool = True  #: eurlex with the main body first, then recitals and header, as in the paper; False: in their order
    longest: int | None = None  #: read at most this many tokens at the beginning of a document; None: all
    test_chunk: int = 1000  #: words per chunk in a test
    quick: int = 400  #: validation documents that are used during training

    def __post_init__(self) -> None:
        corpus, folder = self.corpus, self.folder
        place = EXPERIMENTS.get(corpus, corpus)
        if corpus not in CORPORA and ":" not in corpus:
            known = f"{', '.join(CORPORA)}, or give your own as package.module:function"
            raise ConfigurationError(f"unknown corpus {corpus!r}: choose one of {known}")
        self._other = find(place, "corpus") if ":" in place else None  # now: a file may not choose what is imported
        if corpus == "eurlex" and folder is None:
            raise ConfigurationError("the corpus eurlex is read from a folder: give task.folder=PATH")
        if corpus == "reuters" and folder is not None:
            raise ConfigurationError("the corpus reuters is fetched, and cannot be read from a folder: remove task.folder")
        if corpus != "eurlex" and not self.inverted:
            raise ConfigurationError(f"inverted is an option of eurlex only; remove it for {corpus}")
        for name in ("longest", "test_chunk", "quick"):
            number = getattr(self, name)
            if number is not None and number < 1:
                raise ConfigurationError(f"{name} must be at least 1; got {number}")

    @cached_property
    def tokens(self) -> Tokens:
        """All documents; tokenised at the first use, then read from the cache."""
        fewest = CORPORA.get(self.corpus, (0, 0))[0] if self.fewest_words is None else self.fewest_words
        if self._other is not None:
            corpus = self._other(self.folder, fewest)
        else:
            corpus = reuters(fewest) if self.folder is None else eurlex(self.folder, fewest, self.inverted)
        return tokens_of(corpus, tokenizer_of(self.bert))

    @cached_property
    def splits(self) -> dict[str, Split]:
        """train, val and test, with the labels that are kept."""
        minimum = CORPORA.get(self.corpus, (0, 0))[1] if self.label_minimum is None else self.label_minimum
        with torch.device("cpu"):  # also while a model is built on the meta device
            return labelled(self.tokens, minimum)

    @property
    def labels(self) -> list[str]:
        """The names of the labels, in the order of the logits."""
        return self.splits["train"].names

    def documents(self, indices: list[int]) -> list[Tensor]:
        """The token ids of documents, up to `longest` of each."""
        return [self.tokens.document(index, self.longest) for index in indices]

    def lengths(self, split: str) -> Tensor:
        """The number of tokens of each document of a split."""
        return torch.tensor([self.tokens.length(index) for index in self.splits[split].index])

    def build(self, model: str, **options: Any) -> SetModel:
        """One of the models, for these labels; its output bias is initialised to their log-odds in the training set."""
        built = super().build(model, **({"labels": len(self.labels), "bert": self.bert} | options))
        train = self.splits["train"].labels
        last = [layer for layer in built.head.modules() if isinstance(layer, nn.Linear)][-1]
        with torch.no_grad():  # to learn it would take hundreds of steps
            last.bias.copy_(((train.sum(0) + 0.5) / (len(train) + 1.0)).logit())
        return built

    def batch(self, step: int, size: int, generator: torch.Generator) -> Batch:
        train = self.splits["train"]
        rows = in_epochs(step, size, len(train), self.seed)
        return {"words": self.documents([train.index[row] for row in rows]), "labels": train.labels[rows].float()}

    def loss(self, model: SetModel, batch: Batch, encode: Encode) -> Tensor:
        if not model.encoder.pool.consistent and (encode.gradient != "full" or encode.group is not None):
            option = f"gradient = full, not {encode.gradient}" if encode.group is None else "parallel = data, not set"
            raise ConfigurationError(f"this model reads whole documents in order: train it with {option}")
        logits = model.head(encode(model.encoder, batch["words"]))
        return F.binary_cross_entropy_with_logits(logits, batch["labels"], reduction="none").sum(1).mean()

    @torch.no_grad()
    def probabilities(self, model: SetModel, split: str, most: int | None = None) -> tuple[Tensor, Tensor]:
        """Probabilities and true labels of a split's documents; of `most` evenly spaced ones if there are more."""
        part = self.splits[split]
        rows = torch.arange(len(part)) if most is None or len(part) <= most else torch.arange(most) * len(part) // most
        by_length = rows[self.lengths(split)[rows].argsort(stable=True)]  # batches of similar lengths have little padding
        scores = torch.empty(len(part), len(self.labels))
        for batch in by_length.split(TEST_BATCH):
            documents = self.documents([part.index[row] for row in batch.tolist()])
            scores[batch] = self.logits(model, documents).sigmoid().float().cpu()
        return scores[rows], part.labels[rows]

    @torch.no_grad()
    def logits(self, model: SetModel, documents: list[Tensor]) -> Tensor:
        """Logits (B, L) of documents as token ids, in chunks if the model is consistent, otherwise whole."""
        documents = [document.to(model.encoder.device) for document in documents]
        if not model.encoder.pool.consistent:
            return model(documents)
        return model.head(encode_sets(model.encoder, documents, chunk_size=self.test_chunk, gradient="none"))

    def evaluate(self, model: SetModel, *, quick: bool = False) -> dict[str, float]:
        """Micro and macro F1 on the test documents, also by length; if `quick`, on validation documents."""
        scores, truth = self.probabilities(model, "val", self.quick if quick else None)
        threshold = best_threshold(scores, truth)
        if quick:
            return summary(scores, truth, threshold)
        scores, truth = self.probabilities(model, "test")
        metrics = summary(scores, truth, threshold, quick=False)
        for number, rows in enumerate(self.fifths()):
            metrics[f"micro_f1_fifth_{number + 1}"] = float(f1_scores(scores[rows] >= 0.5, truth[rows])[0])
        return metrics

    def fifths(self) -> list[Tensor]:
        """Rows of the test documents in five groups of equal size, from the shortest to the longest."""
        return [rows for rows in self.lengths("test").argsort(stable=True).tensor_split(5) if len(rows)]


def add_report(page: Page, runs: Group) -> None:
    """A section for each corpus: F1 of every kind of run, and learning curves."""
    interval = {"micro F1, 95%": lambda group: "{micro_f1_low:.3f} to {micro_f1_high:.3f}".format(**group[0].metrics)}
    for corpus, same_corpus in group_by(runs, lambda run: run.config.task_options.get("corpus", "reuters")).items():
        page.section(f"Documents: {corpus}")
        note = f"{len(same_corpus[0].task_as(Documents).splits['test']):,} test documents. ± over seeds; the interval is the"
        note += " first seed's, over test documents."
        add_results(page, same_corpus, METRICS | interval, note, "micro_f1", highest=True, ylabel="micro F1")
