"""What the evidence of several tasks shares: memory that autograd keeps, training time, groups of runs, lines with ranges."""

import itertools
import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from setstream.report.runs import FinishedRun, Group, group_by
from setstream.tasks.documents.task import Documents


def kept_bytes(run: Callable[[], Any], weights: Iterable[Tensor]) -> int:
    """Bytes of all tensors that `run` saves for its backward pass, each storage once; those of `weights` are not counted.

    >>> weight = torch.randn(8, 8, requires_grad=True)
    >>> kept_bytes(lambda: (torch.ones(5, 8) @ weight).relu(), [weight])          # the ones and the result, 5 x 8 floats each
    320
    """
    saved: list[Tensor] = []  # all are kept: a later tensor could reuse an earlier one's address
    known = {weight.untyped_storage().data_ptr() for weight in weights}  # a linear layer saves its weight's transpose

    def pack(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        run()
    storages = {storage.data_ptr(): storage.nbytes() for storage in (tensor.untyped_storage() for tensor in saved)}
    return sum(size for place, size in storages.items() if place not in known)


def kendall_tau(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """Kendall's τ-b of two orders of the same models: 1 if they agree on every pair, -1 if on none; ties count in neither::

        τ = (agreeing - disagreeing pairs) / √(pairs untied in ours · pairs untied in theirs)

    >>> kendall_tau([1.0, 2.0, 3.0], [10.0, 30.0, 20.0])
    0.3333333333333333
    """
    pairs = list(itertools.combinations(zip(ours, theirs, strict=True), 2))
    signs = [((a > c) - (a < c), (b > d) - (b < d)) for (a, b), (c, d) in pairs]
    untied = sum(x != 0 for x, _ in signs) * sum(y != 0 for _, y in signs)
    return sum(x * y for x, y in signs) / math.sqrt(untied) if untied else math.nan


def seconds(run: FinishedRun) -> float:
    """The training time; of a resumed run, extrapolated from the steps of its last part."""
    result = run.result
    return float(result["seconds"]) * result["step"] / max(1, result.get("steps_timed", result["step"]))


def by_steps(runs: Group) -> dict[int, Group]:
    """Runs with the same number of steps together: others cannot be compared."""
    return dict(sorted(group_by(runs, lambda run: run.config.steps).items()))


def plot_ranges(axes: Any, values: Mapping[Any, Sequence[float]], label: str) -> None:
    """A line through the mean of the values at each x, with bars from the smallest to the largest value."""
    rows = [(x, sum(values[x]) / len(values[x]), min(values[x]), max(values[x])) for x in sorted(values)]
    bars = [[mean - low for _, mean, low, _ in rows], [high - mean for _, mean, _, high in rows]]
    axes.errorbar([x for x, *_ in rows], [mean for _, mean, *_ in rows], bars, marker="o", capsize=3, label=label)


def corpus_sizes(task: Documents) -> dict[str, float]:
    """Sizes of the corpus: documents, labels, words."""
    used = [index for split in task.splits.values() for index in split.index]
    lengths = [task.tokens.length(index) for index in used]
    numbers: dict[str, float] = {
        "documents": len(task.tokens.about),
        "without a kept label": len(task.tokens.about) - len(used),
    }
    numbers |= {name: len(split.index) for name, split in task.splits.items()} | {"labels": len(task.labels)}
    carried = torch.cat([split.labels for split in task.splits.values()]).sum(1).float()
    numbers |= {"labels per document": float(carried.mean())}
    numbers |= {"words, mean": statistics.mean(task.tokens.about[index]["words"] for index in used)}
    numbers |= {"tokens, mean": statistics.mean(lengths), "tokens, median": statistics.median(lengths)}
    return numbers | {"tokens, most": max(lengths)}
