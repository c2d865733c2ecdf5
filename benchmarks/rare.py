"""Rare evidence: sets of 200,000 elements on disk, of which one in a thousand or fewer decides; beside summaries.

    python -m benchmarks.rare --one-in 1000
    python -m benchmarks.rare --one-in 10000 --train 48 --test 40

Elements are T-cell receptors of the field's own generator (wheel `olga`), as in `estimators_data`: 40 numbers each. Every set
is another random half of 400,000 sequences, a file of 16 MB; in every other set, one sequence in `one_in` carries a motif. It
prints AUROC, processor and wall seconds, and the memory that `fit` added to the process, for SetClassifier with its defaults,
which reads the files, and for scikit-learn on summaries, which are made from one file at a time.
"""

from __future__ import annotations

import argparse
import math
import re
import time
from pathlib import Path

import numpy as np
from benchmarks.estimators_data import numbers_of, receptors, with_motif
from benchmarks.estimators_models import boosting, linear, moments, quantiles
from sklearn.metrics import roc_auc_score

from setstream._utils.registry import cache_folder
from setstream.data import NpySource
from setstream.integrations.sklearn import SetClassifier

POOL, SIZE = 400_000, 200_000


def write_sets(folder: Path, count: int, one_in: int) -> list[Path]:
    """The files of sets 0 to count - 1; sets with odd numbers have the motif."""
    files = [folder / f"{number}.npy" for number in range(count)]
    if all(file.is_file() for file in files):
        return files
    folder.mkdir(parents=True, exist_ok=True)
    drawn = list(receptors("human_T_beta", POOL))
    plain = numbers_of(drawn).astype(np.float16)
    marked = numbers_of([with_motif(one) for one in drawn[: SIZE // 100]]).astype(np.float16)
    for number, file in enumerate(files):
        random = np.random.default_rng([number, one_in])
        rows = plain[random.permutation(POOL)[:SIZE]]
        if number % 2:
            places = random.choice(SIZE, SIZE // one_in, replace=False)
            rows[places] = marked[random.choice(len(marked), len(places))]
        np.save(file, rows)
    return files


def megabytes(name: str) -> float:
    """VmHWM: the most memory that this process has used; VmRSS: what it uses now."""
    return int(re.search(rf"{name}:\s+(\d+)", Path("/proc/self/status").read_text())[1]) / 1024  # type: ignore[index]


def interval(wanted: np.ndarray, scores: np.ndarray) -> str:
    """AUROC, with half of its 95% interval (Hanley and McNeil 1982)."""
    area, n, m = float(roc_auc_score(wanted, scores)), int(wanted.sum()), int((1 - wanted).sum())
    q1, q2 = area / (2 - area), 2 * area**2 / (1 + area)
    variance = (area * (1 - area) + (n - 1) * (q1 - area**2) + (m - 1) * (q2 - area**2)) / (n * m)
    return f"{area:.3f} ± {1.96 * math.sqrt(variance):.3f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--one-in", type=int, default=1000, help="one element in so many has the motif")
    parser.add_argument("--train", type=int, default=48)
    parser.add_argument("--test", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--summaries", action="store_true", help="fit the summary baselines, too")
    arguments = parser.parse_args()
    count = arguments.train + arguments.test
    files = write_sets(cache_folder() / f"rare-{arguments.one_in}", count, arguments.one_in)
    y, train = np.arange(count) % 2, arguments.train
    sources = [NpySource(file) for file in files]
    before, began, wall = megabytes("VmRSS"), time.process_time(), time.perf_counter()
    model = SetClassifier(random_state=arguments.seed).fit(sources[:train], y[:train])
    spent = f"{time.process_time() - began:.0f} s of processor time, {time.perf_counter() - wall:.0f} s of wall time"
    print(f"fit: {spent}, {megabytes('VmHWM') - before:.0f} MB of memory for {train * 16} MB of files", flush=True)
    print(f"setstream: AUROC {interval(y[train:], model.predict_proba(sources[train:])[:, 1])}", flush=True)
    for summary in (moments, quantiles) if arguments.summaries else ():
        began = time.process_time()
        rows = np.concatenate([summary([np.load(file).astype(np.float32)]) for file in files])
        print(f"{summary.__name__} of all sets: {time.process_time() - began:.0f} s", flush=True)
        for name, estimator in (
            ("logistic", linear(False, y[:train])),
            ("boosting", boosting(False, y[:train], arguments.seed)),
        ):
            scores = estimator.fit(rows[:train], y[:train]).predict_proba(rows[train:])[:, 1]
            print(f"{name} on {summary.__name__}: AUROC {interval(y[train:], scores)}", flush=True)


if __name__ == "__main__":
    main()
