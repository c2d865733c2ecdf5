"""SetClassifier with its defaults on the classic MIL benchmarks: accuracy of 10-fold cross-validation, and seconds a fit.

python benchmarks/estimators.py                        musk1, elephant and ucsb, one seed: some five minutes
python benchmarks/estimators.py --sets musk1 --seeds 0 1 2
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch
from sklearn.model_selection import StratifiedKFold, cross_val_score

from setstream.integrations.sklearn import SetClassifier
from setstream.tasks.mil.task import CLASSIC, classic


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sets", nargs="+", choices=list(CLASSIC), default=["musk1", "elephant", "ucsb"])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0], help="of the folds and of the network")
    parser.add_argument("--folds", type=int, default=10)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    for name in arguments.sets:
        found = classic(name)
        bags, labels = [bag.numpy() for bag in found.tensors()], found.labels.numpy()
        means = []
        for seed in arguments.seeds:
            began = time.process_time()
            folds = StratifiedKFold(arguments.folds, shuffle=True, random_state=seed)
            scores = cross_val_score(SetClassifier(random_state=seed), bags, labels, cv=folds, error_score="raise")
            each = (time.process_time() - began) / arguments.folds
            means.append(100 * float(scores.mean()))
            print(f"{name}  seed {seed}  accuracy {means[-1]:.1f}  {each:.1f} s of one core a fit", flush=True)
        if len(means) > 1:
            print(f"{name}  mean {statistics.fmean(means):.1f}, deviation of the seeds {statistics.stdev(means):.1f}")


if __name__ == "__main__":
    main()
