"""The estimators with their defaults, on real data sets of sets, beside summaries with scikit-learn and two plain networks.

    python -m benchmarks.estimators --minutes 60                  continue: the fits that are missing, the smallest sets first
    python -m benchmarks.estimators --repeats 3                   two more repeats of each data set
    python -m benchmarks.estimators --table                       tables and ranks of what was run
    python -m benchmarks.estimators --picture out/ranks.svg       the critical-difference picture of the reported half
    python -m benchmarks.estimators --sets musk1 --models setstream --folds 10 --repeats 5        the classic protocol

Every fit is one line of docs/results/estimators.jsonl: a run can be stopped and continued, on another machine, too. Lines of
`setstream` carry the version of its defaults (`DEFAULTS`): fits with other defaults are kept, not shown, and made again.

Protocol: five stratified folds, shuffled by the number of the repeat. Main measure: AUROC (more than two classes: the mean over
classes, one against the rest), R² for numbers. Intervals and differences: paired over folds, with the variance corrected for
overlapping training sets (Nadeau and Bengio 2003). Calibration error: 15 bins over all test sets of a repeat together. Times:
processor seconds of the fit.
"""

from __future__ import annotations

import argparse
import json
import math
import time
import warnings
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
from benchmarks.estimators_data import CHOOSE, REPORT, Sets, load, stored_bytes
from benchmarks.estimators_models import DEFAULTS, MODELS, SUMMARIES
from scipy import stats
from sklearn.metrics import log_loss, r2_score, roc_auc_score
from sklearn.model_selection import KFold, StratifiedKFold

RESULTS = Path(__file__).parents[1] / "docs" / "results" / "estimators.jsonl"
BINS = 15
Lines = dict[tuple[str, str], dict[tuple[int, int], dict[str, Any]]]


def gaps(p: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Of each bin of probabilities of the most probable class: how many sets are right, less the sum of the probabilities."""
    top, right = p.max(1), p.argmax(1) == y
    return np.bincount(np.minimum((top * BINS).astype(int), BINS - 1), right - top, BINS)


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
        "gaps": gaps(p, numbers).round(4).tolist(),
    }


def run(arguments: argparse.Namespace) -> None:
    """Make the missing fits: the first repeat of all data sets, then the second, the smallest data sets first."""
    done = {key(line) for line in read(arguments.results) if line["defaults"] in (None, DEFAULTS)}
    names = sorted(arguments.sets, key=stored_bytes)
    for repeat, data in ((repeat, load(name)) for repeat in range(arguments.repeats) for name in names):
        splitter = KFold if data.regression else StratifiedKFold
        folds = list(splitter(arguments.folds, shuffle=True, random_state=repeat).split(data.sets, data.y))
        for fold, name in ((fold, name) for fold in range(len(folds)) for name in arguments.models):
            train, test = folds[fold]
            line: dict[str, Any] = {"set": data.name, "model": name, "folds": len(folds), "repeat": repeat, "fold": fold}
            line |= {"defaults": DEFAULTS if name == "setstream" else None, "train": len(train), "test": len(test)}
            if key(line) in done:
                continue
            if time.process_time() > 60 * arguments.minutes:
                return
            with warnings.catch_warnings(action="ignore"):
                found = measure(MODELS[name](data.regression, data.y[train], repeat), data, train, test)
            line |= {part: round(value, 5) if isinstance(value, float) else value for part, value in found.items()}
            with arguments.results.open("a") as file:
                file.write(json.dumps(line) + "\n")
            shown = "  ".join(f"{part} {found[part]:.3f}" for part in ("score", "log_loss", "seconds") if part in found)
            print(f"{data.name}  {name}  repeat {repeat} fold {fold}  {shown}", flush=True)


def key(line: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(line[name] for name in ("set", "model", "folds", "repeat", "fold"))


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []


def chosen(arguments: argparse.Namespace) -> Lines:
    """The lines of this protocol by data set and model; of `setstream`, those of the wanted defaults."""
    found: Lines = defaultdict(dict)
    for line in read(arguments.results):
        if line["folds"] == arguments.folds and line["defaults"] in (None, arguments.defaults):
            found[line["set"], line["model"]][line["repeat"], line["fold"]] = line
    return found


def calibration_error(lines: dict[tuple[int, int], dict[str, Any]]) -> float:
    """The expected calibration error over the test sets of all folds of a repeat, averaged over the repeats."""
    repeats: dict[int, list[dict[str, Any]]] = defaultdict(list)
    for (repeat, _), line in lines.items():
        if "gaps" in line:
            repeats[repeat].append(line)
    each = [
        np.abs(sum(np.array(line["gaps"]) for line in some)).sum() / sum(line["test"] for line in some)
        for some in repeats.values()
    ]
    return float(np.mean(each)) if each else math.nan


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
    if name == "ece":
        return calibration_error(lines)
    values = [line[name] for line in lines.values() if name in line]
    return float(np.mean(values)) if values else math.nan


def shared(found: Lines) -> Lines:
    """The same, with only those folds of each data set that `setstream` has."""
    kept: Lines = defaultdict(dict)
    for (name, model), lines in found.items():
        kept[name, model] = {fold: line for fold, line in lines.items() if fold in found.get((name, "setstream"), {})}
    return kept


def complete(found: Lines, names: tuple[str, ...], models: list[str]) -> list[str]:
    """The data sets for which every model has the same folds."""
    return [name for name in names if found[name, models[0]] and len({frozenset(found[name, m]) for m in models}) == 1]


def ranks(found: Lines, names: list[str], models: list[str]) -> tuple[dict[str, float], float]:
    """Each model's mean rank of the score over the data sets, the best first; and Friedman's p that all are alike."""
    table = np.array([[mean(found[name, model], "score") for model in models] for name in names])
    means = stats.rankdata(-table, axis=1).mean(0).tolist() if names else []
    p = float(stats.friedmanchisquare(*table.T).pvalue) if len(names) > 2 else math.nan
    return dict(sorted(zip(models, means, strict=bool(names)), key=lambda item: item[1])), p


def critical_difference(models: int, sets: int) -> float:
    """Mean ranks that are closer than this cannot be told apart: Nemenyi, 95% (Demšar 2006)."""
    return float(
        stats.studentized_range.ppf(0.95, models, math.inf) / math.sqrt(2) * math.sqrt(models * (models + 1) / (6 * sets))
    )


def against(found: Lines, name: str, models: tuple[str, ...]) -> tuple[str, float, float]:
    """The model among these with the best score, the difference of `setstream` to it, and half of the interval."""
    best = max(models, key=lambda model: -math.inf if math.isnan(score := mean(found[name, model], "score")) else score)
    return best, *difference(found[name, "setstream"], found[name, best])


def table(found: Lines, models: list[str]) -> None:
    """Markdown tables of both halves, over the folds that `setstream` has."""
    found, summaries = shared(found), tuple(model for model in models if model in SUMMARIES)
    for title, names in (("Chosen on", CHOOSE), ("Reported", REPORT)):
        print(f"\n### {title}\n\n| set | folds | " + " | ".join(models) + " | against the best summary |")
        print("|---" * (len(models) + 3) + "|")
        signs = {"ahead": 0, "even": 0, "behind": 0, "?": 0}
        for name in names:
            if not found[name, "setstream"]:
                continue
            best, by, width = against(found, name, summaries)
            sign = "?" if math.isnan(width) else "ahead" if by > width else "behind" if by < -width else "even"
            signs[sign] += 1
            cells = [f"{mean(found[name, model], 'score'):.3f}" for model in models]
            print(
                f"| {name} | {len(found[name, 'setstream'])} | "
                + " | ".join(cells)
                + f" | {by:+.3f} ± {width:.3f} ({best}): {sign} |"
            )
        whole = complete(found, names, models)
        order, p = ranks(found, whole, models)
        print("\n" + ", ".join(f"{sign} {count}" for sign, count in signs.items()))
        if whole:
            listed = ", ".join(f"{model} {rank:.2f}" for model, rank in order.items())
            print(
                f"Mean ranks over {len(whole)} sets: {listed}; Friedman's p {p:.2g}, critical difference "
                f"{critical_difference(len(order), len(whole)):.2f}"
            )
        for part in ("accuracy", "log_loss", "ece", "seconds"):
            print(f"\n| {part} | " + " | ".join(models) + " |\n" + "|---" * (len(models) + 1) + "|")
            for name in names:
                values = [mean(found[name, model], part) for model in models]
                if found[name, "setstream"] and not all(map(math.isnan, values)):
                    shown = [f"{value:.1f}" if part == "seconds" else f"{value:.3f}" for value in values]
                    print(f"| {name} | " + " | ".join(shown) + " |")


def picture(found: Lines, path: Path, models: list[str]) -> None:
    """Mean ranks on the reported half; a bar joins models that cannot be told apart (Nemenyi, 95%)."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    found = shared(found)
    names = complete(found, REPORT, models)
    order = list(ranks(found, names, models)[0].items())
    critical = critical_difference(len(order), len(names))
    joined = [
        (start, max(i for i, (_, rank) in enumerate(order) if rank - first < critical))
        for start, (_, first) in enumerate(order)
    ]
    bars = [(start, end) for start, end in joined if end > start and not any(s < start and end <= e for s, e in joined)]
    figure, axes = pyplot.subplots(figsize=(8, 0.4 * len(order) + 1.2))
    for place, (model, rank) in enumerate(order):
        axes.plot(rank, -place, "o", color="tab:red" if model == "setstream" else "black")
        axes.text(len(order) + 0.6, -place, f"{model} {rank:.2f}", va="center")
    for number, (start, end) in enumerate(bars):
        axes.plot([order[start][1], order[end][1]], [0.6 + 0.35 * number] * 2, color="tab:grey", lw=4)
    axes.set(
        yticks=[],
        xlim=(0.8, len(order) + 0.2),
        xlabel=f"mean rank over {len(names)} data sets (1 is the best); bars join ranks closer than {critical:.2f}",
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, bbox_inches="tight")
    print(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sets", nargs="+", choices=[*CHOOSE, *REPORT], default=[*CHOOSE, *REPORT])
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS), help="run, or show, these")
    parser.add_argument("--half", choices=["choose", "report"], help="only this half of the data sets")
    parser.add_argument("--folds", type=int, default=5)
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--minutes", type=float, default=math.inf, help="begin no fit after so much processor time")
    parser.add_argument("--results", type=Path, default=RESULTS, help="a JSON-lines file")
    parser.add_argument("--defaults", type=int, default=DEFAULTS, help="show the fits of this version of the defaults")
    parser.add_argument("--table", action="store_true", help="print tables and run nothing")
    parser.add_argument("--picture", type=Path, help="write the critical-difference picture and run nothing")
    arguments = parser.parse_args()
    if arguments.half:
        arguments.sets = [name for name in (CHOOSE if arguments.half == "choose" else REPORT) if name in arguments.sets]
    if not arguments.table and not arguments.picture:
        run(arguments)
    if arguments.picture:
        picture(chosen(arguments), arguments.picture, arguments.models)
    else:
        table(chosen(arguments), arguments.models)


if __name__ == "__main__":
    main()
