"""What a fit of SetClassifier with its defaults costs, by the number and the size of the sets.

    python -m benchmarks.estimators_sizes                          every row in a process of its own
    python -m benchmarks.estimators_sizes --sets 1000 --size 100   one row

Sets of 20 normal features; in every other set one element is shifted by two deviations. Processor seconds of fit, milliseconds
of predict_proba per set, and how much memory the process used beyond that before `fit`.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time

import numpy as np
from benchmarks.rare import megabytes

from setstream.integrations.sklearn import SetClassifier

ROWS = ((100, 100), (1000, 100), (10_000, 100), (1000, 10), (1000, 1000), (100, 10_000))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sets", type=int)
    parser.add_argument("--size", type=int)
    arguments = parser.parse_args()
    if arguments.sets is None:
        for count, size in ROWS:
            row = ["--sets", str(count), "--size", str(size)]
            subprocess.run([sys.executable, "-m", "benchmarks.estimators_sizes", *row], check=True)
        return
    random, y = np.random.default_rng(0), np.arange(arguments.sets) % 2
    sets = [random.normal(size=(arguments.size, 20)).astype(np.float32) for _ in y]
    for one in sets[1::2]:
        one[0] += 2
    SetClassifier(members=1, min_steps=1, epochs=1).fit(sets[:4], y[:4])  # torch loads parts of itself at first use
    before, began = megabytes("VmRSS"), time.process_time()
    model = SetClassifier(random_state=0).fit(sets, y)
    fit = time.process_time() - began
    began = time.process_time()
    model.predict_proba(sets[:100])
    each = (time.process_time() - began) / min(100, len(sets))
    memory = megabytes("VmHWM") - before
    print(f"| {arguments.sets} sets of {arguments.size} | {fit:.1f} s | {1000 * each:.2f} ms | {memory:.0f} MB |", flush=True)


if __name__ == "__main__":
    main()
