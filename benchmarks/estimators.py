"""The estimators with their defaults, on real data sets of sets, beside summaries with scikit-learn and two plain networks.

    python -m benchmarks.estimators --quick                       three small data sets, two folds: a few minutes
    python -m benchmarks.estimators                               everything, the smallest sets first: hours; can be stopped
    python -m benchmarks.estimators --table                       tables and ranks of what was run
    python -m benchmarks.estimators --picture out/ranks.svg       the critical-difference picture of the reported half
    python -m benchmarks.estimators --sets musk1 --models setstream --folds 10 --repeats 5        the classic protocol

Every fit is one line of a JSON-lines file, so that a run can be stopped and continued. Lines of `setstream` carry a hash of the
estimators' code: fits of other code are kept, not shown, and made again.

Protocol: five stratified folds, shuffled by the number of the repeat; two repeats for 250 sets and fewer. Main measure: AUROC
(more than two classes: the mean over classes, one against the rest), R² for numbers. Intervals and differences: paired over
folds, with the variance corrected for overlapping training sets (Nadeau and Bengio 2003). Times: processor seconds of the fit.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import json
import math
import time
import warnings
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
from benchmarks.estimators_data import CHOOSE, REPORT, Sets, load
from benchmarks.estimators_models import MODELS, SUMMARIES
from scipy import stats
from sklearn.metrics import log_loss, r2_score, roc_auc_score
from sklearn.model_selection import KFold, StratifiedKFold

from setstream._utils.registry import cache_folder
from setstream.integrations import sklearn

SMALL = 250
QUICK = ("musk1", "watch", "covid")
Lines = dict[tuple[str, str], dict[tuple[int, int], dict[str, Any]]]


def code() -> str:
    """A hash of the estimators' code, without comments, docstrings and layout."""
    parts = []
    for file in sorted(Path(str(sklearn.__file__)).parent.glob("*.py")):
        tree = ast.parse(file.read_text())
        for node in ast.walk(tree):
            body = getattr(node, "body", None)
            if isinstance(body, list) and body and isinstance(body[0], ast.Expr) and isinstance(body[0].value, ast.Constant):
                body.pop(0)
        parts.append(ast.dump(tree))
    return hashlib.sha256("".join(parts).encode()).hexdigest()[:10]


def calibration_error(p: np.ndarray, y: np.ndarray, bins: int = 15) -> float:
    """Expected calibration error of the most probable class: Σ_bins (share of the sets) |accuracy - mean probability|."""
    top, right = p.max(1), p.argmax(1) == y
    bin_of = np.minimum((top * bins).astype(int), bins - 1)
    return float(sum(abs(right[bin_of == b].sum() - top[bin_of == b].sum()) for b in range(bins)) / len(y))


def measure(model: Any, data: Sets, train: np.ndarray, test: np.ndarray) -> dict[str, float]:
    """Fit on the sets in `train`, and measure on those in `test`."""
    given, asked = [data.sets[i] for i in train], [data.sets[i] for i in test]
    began = time.process_time()
    model.fit(given, data.y[train])
    seconds = time.process_time() - began
    wanted = data.y[test]
    if data.regression:
        found = model.predict(asked)
        rmse = float(np.sqrt(np.mean((found - wanted) ** 2)))
        return {"seconds": seconds, "score": float(r2_score(wanted, found)), "rmse": rmse}
    p, classes = model.predict_proba(asked), np.unique(data.y[train])
    p = np.clip(p, 1e-12, None) / np.clip(p, 1e-12, None).sum(1, keepdims=True)
    present = np.isin(classes, wanted)
    if len(classes) == 2:
        score = roc_auc_score(wanted, p[:, 1])
    else:
        score = np.mean([roc_auc_score(wanted == one, p[:, k]) for k, one in enumerate(classes) if present[k]])
    numbers = np.searchsorted(classes, wanted)
    return {
        "seconds": seconds,
        "score": float(score),
        "accuracy": float((p.argmax(1) == numbers).mean()),
        "log_loss": float(log_loss(wanted, p, labels=classes)),
        "ece": calibration_error(p, numbers),
    }


def run(arguments: argparse.Namespace) -> None:
    done = {key(line) for line in read(arguments.results) if line["model"] != "setstream" or line["code"] == code()}
    loaded = [load(name) for name in arguments.sets]
    if arguments.small_first:
        loaded.sort(key=lambda data: sum(map(len, data.sets)) * data.sets[0].shape[1])
    for data in loaded:
        repeats = arguments.repeats or (2 if len(data.sets) <= SMALL else 1)
        for repeat in range(repeats):
            splitter = KFold if data.regression else StratifiedKFold
            folds = list(splitter(arguments.folds, shuffle=True, random_state=repeat).split(data.sets, data.y))
            for fold, (train, test) in enumerate(folds[: arguments.first]):
                for name in arguments.models:
                    line: dict[str, Any] = {
                        "set": data.name,
                        "model": name,
                        "folds": arguments.folds,
                        "repeat": repeat,
                        "fold": fold,
                    }
                    line |= {"code": code() if name == "setstream" else None, "train": len(train), "test": len(test)}
                    if key(line) in done:
                        continue
                    with warnings.catch_warnings(action="ignore"):
                        line |= measure(MODELS[name](data.regression, data.y[train], repeat), data, train, test)
                    with arguments.results.open("a") as file:
                        file.write(json.dumps(line) + "\n")
                    shown = "  ".join(
                        f"{part} {line[part]:.3f}" for part in ("score", "accuracy", "log_loss", "seconds") if part in line
                    )
                    print(f"{data.name}  {name}  repeat {repeat} fold {fold}  {shown}", flush=True)


def key(line: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(line[name] for name in ("set", "model", "folds", "repeat", "fold"))


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []


def chosen(arguments: argparse.Namespace) -> Lines:
    """The lines of this protocol by data set and model; of `setstream`, those of the wanted code."""
    found: Lines = defaultdict(dict)
    wanted = arguments.code or code()
    for line in read(arguments.results):
        if line["folds"] == arguments.folds and line["code"] in (None, wanted):
            found[line["set"], line["model"]][line["repeat"], line["fold"]] = line
    return found


def difference(
    ours: dict[tuple[int, int], dict[str, Any]], theirs: dict[tuple[int, int], dict[str, Any]]
) -> tuple[float, float]:
    """The mean difference of the score over common folds, and half of its corrected 95% interval."""
    common = sorted(set(ours) & set(theirs))
    apart = np.array([ours[fold]["score"] - theirs[fold]["score"] for fold in common])
    if len(apart) < 2:
        return float(apart.mean()) if len(apart) else math.nan, math.nan
    share = ours[common[0]]["test"] / ours[common[0]]["train"]
    width = math.sqrt(apart.var(ddof=1) * (1 / len(apart) + share)) * stats.t.ppf(0.975, len(apart) - 1)
    return float(apart.mean()), float(width)


def mean(lines: dict[tuple[int, int], dict[str, Any]], name: str) -> float:
    return (
        float(np.mean([line[name] for line in lines.values()]))
        if lines and all(name in line for line in lines.values())
        else math.nan
    )


def complete(found: Lines, names: tuple[str, ...]) -> list[str]:
    """The data sets for which every model has the same folds."""
    return [
        name
        for name in names
        if found[name, "setstream"] and all(set(found[name, m]) == set(found[name, "setstream"]) for m in MODELS)
    ]


def ranks(found: Lines, names: list[str]) -> dict[str, float]:
    """Each model's mean rank of the score over the data sets; 1 is the best."""
    table = np.array([[mean(found[name, model], "score") for model in MODELS] for name in names])
    return dict(zip(MODELS, stats.rankdata(-table, axis=1).mean(0).tolist(), strict=True)) if len(names) else {}


def table(found: Lines) -> None:
    """Markdown tables of both halves."""
    for title, names in (("Chosen on", CHOOSE), ("Reported", REPORT)):
        print(f"\n### {title}\n\n| set | folds | " + " | ".join(MODELS) + " | against the best summary | s per fit | ECE |")
        print("|---" * (len(MODELS) + 5) + "|")
        for name in names:
            if not found[name, "setstream"]:
                continue
            scores = {model: mean(found[name, model], "score") for model in MODELS}
            cells = [f"{score:.3f}" for score in scores.values()]
            best = max(SUMMARIES, key=lambda model: -math.inf if math.isnan(scores[model]) else scores[model])
            by, width = difference(found[name, "setstream"], found[name, best])
            sign = "ahead" if by > width else "behind" if by < -width else "even"
            times, ece = mean(found[name, "setstream"], "seconds"), mean(found[name, "setstream"], "ece")
            cells += [f"{by:+.3f} ± {width:.3f} ({best}): {sign}", f"{times:.1f}", f"{ece:.3f}"]
            print(f"| {name} | {len(found[name, 'setstream'])} | " + " | ".join(cells) + " |")
        whole = complete(found, names)
        line = ", ".join(f"{model} {rank:.2f}" for model, rank in sorted(ranks(found, whole).items(), key=lambda item: item[1]))
        print(f"\nMean ranks over {len(whole)} sets: {line}")
        for part in ("accuracy", "log_loss", "ece", "seconds"):
            rows = {model: [mean(found[name, model], part) for name in whole] for model in MODELS}
            print(f"Mean {part}: " + ", ".join(f"{model} {np.nanmean(values):.3f}" for model, values in rows.items() if values))


def picture(found: Lines, path: Path) -> None:
    """Mean ranks on the reported half; models joined by a bar cannot be told apart (Nemenyi, 95%)."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    names = complete(found, REPORT)
    order = sorted(ranks(found, names).items(), key=lambda item: item[1])
    count = len(order)
    critical = (
        stats.studentized_range.ppf(0.95, count, math.inf) / math.sqrt(2) * math.sqrt(count * (count + 1) / (6 * len(names)))
    )
    figure, axes = pyplot.subplots(figsize=(8, 0.4 * count + 1.2))
    for place, (model, rank) in enumerate(order):
        axes.plot(rank, -place, "o", color="tab:red" if model == "setstream" else "black")
        axes.text(rank + 0.08, -place, f"{model} {rank:.2f}", va="center")
        axes.plot([rank, rank + critical], [-place - 0.3] * 2, color="tab:grey", lw=2)
    axes.set(
        yticks=[],
        xlim=(0.8, count + 1.5),
        xlabel=f"mean rank over {len(names)} data sets (1 is the best); bars: critical difference {critical:.2f}",
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, bbox_inches="tight")
    print(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sets", nargs="+", choices=[*CHOOSE, *REPORT], default=[*CHOOSE, *REPORT])
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--half", choices=["choose", "report"], help="only this half of the data sets")
    parser.add_argument("--folds", type=int, default=5)
    parser.add_argument("--first", type=int, default=None, help="only the first folds of each repeat")
    parser.add_argument("--repeats", type=int, default=None, help="default: 2 for 250 sets and fewer, else 1")
    parser.add_argument("--results", type=Path, default=cache_folder() / "estimators-panel.jsonl", help="a JSON-lines file")
    parser.add_argument("--code", default=None, help="show the fits of this version of the estimators' code")
    parser.add_argument("--quick", action="store_true", help=f"two folds of {', '.join(QUICK)}")
    parser.add_argument("--table", action="store_true", help="print tables and run nothing")
    parser.add_argument("--picture", type=Path, help="write the critical-difference picture and run nothing")
    arguments = parser.parse_args()
    arguments.small_first = True
    if arguments.half:
        arguments.sets = [name for name in (CHOOSE if arguments.half == "choose" else REPORT) if name in arguments.sets]
    if arguments.quick:
        arguments.sets, arguments.first, arguments.repeats = list(QUICK), 2, 1
    arguments.results.parent.mkdir(parents=True, exist_ok=True)
    if not arguments.table and not arguments.picture:
        run(arguments)
    if arguments.picture:
        picture(chosen(arguments), arguments.picture)
    else:
        table(chosen(arguments))


if __name__ == "__main__":
    main()
