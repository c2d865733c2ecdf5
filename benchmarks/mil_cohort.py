"""A simulated cohort of slides: python benchmarks/mil_cohort.py FOLDER, then the commands of docs/mil.md.

60 slides of 5,000 to 60,000 patches with 512 features, standard normal: 4 GB. In half of the slides, 0.5 % of the patches are
shifted in the same direction by `--shift`; the standard deviation of the noise in any direction is 1.

    features/slide00.h5 ...     features (N, 512) float32, coords (N, 2)
    labels.csv                  slide_id, case_id (a patient has two slides), label (tumor or normal), time, event: times are
                                exponential, with three times the hazard for a tumour; about half are censored
    splits/splits_0.csv ...     five folds as CLAM writes them: columns train, val, test
    split.csv                   one split: slide_id, split
"""

import argparse
import csv
from pathlib import Path

import h5py
import numpy as np
from torch import tensor

from setstream.tasks.mil.splits import folds

DIM, SHARE, FOLDS = 512, 0.005, 5


def write_slide(path: Path, patches: int, sick: bool, direction: np.ndarray, rng: np.random.Generator) -> None:
    """The features of one slide."""
    features = rng.standard_normal((patches, DIM), dtype=np.float32)
    if sick:
        features[rng.permutation(patches)[: max(1, round(SHARE * patches))]] += direction
    with h5py.File(path, "w") as file:
        file["features"], file["coords"] = features, rng.integers(0, 100_000, (patches, 2))


def write_rows(path: Path, header: list[str], rows: list[list[object]]) -> None:
    """A CSV."""
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([header, *rows])


def write_cohort(out: Path, slides: int, smallest: int, largest: int, shift: float, seed: int) -> None:
    """Features, labels and splits."""
    rng = np.random.default_rng(seed)
    direction = rng.standard_normal(DIM)
    direction = (shift * direction / np.linalg.norm(direction)).astype(np.float32)
    (out / "features").mkdir(parents=True, exist_ok=True)
    (out / "splits").mkdir(exist_ok=True)
    rows: list[list[object]] = []
    for number in range(slides):
        name, sick = f"slide{number:02d}", number // 2 % 2 == 1  # a patient has two slides of one kind
        write_slide(out / "features" / f"{name}.h5", int(rng.integers(smallest, largest + 1)), sick, direction, rng)
        if number % 2 == 0:
            time, censoring = rng.exponential(20 / (3 if sick else 1)), rng.exponential(30)
        label, event = "tumor" if sick else "normal", int(time < censoring)
        rows.append([name, f"case{number // 2:02d}", label, min(time, censoring), event])
    write_rows(out / "labels.csv", ["slide_id", "case_id", "label", "time", "event"], rows)
    cases = folds(tensor([number % 2 for number in range(slides // 2)]), FOLDS, seed)
    parts = [[f"slide{2 * case + n:02d}" for case in fold for n in (0, 1)] for fold in cases]
    for number in range(FOLDS):
        test, val = parts[number], parts[(number + 1) % FOLDS]
        train = [name for name, *_ in rows if name not in {*test, *val}]
        padded = [[*part, *[""] * (len(train) - len(part))] for part in (train, val, test)]
        write_rows(
            out / "splits" / f"splits_{number}.csv",
            ["", "train", "val", "test"],
            [[n, *row] for n, row in enumerate(zip(*padded, strict=True))],
        )
    part_of = {name: part for part, names in (("test", parts[0]), ("val", parts[1])) for name in names}
    write_rows(out / "split.csv", ["slide_id", "split"], [[name, part_of.get(str(name), "train")] for name, *_ in rows])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--slides", type=int, default=60)
    parser.add_argument("--smallest", type=int, default=5_000)
    parser.add_argument("--largest", type=int, default=60_000)
    parser.add_argument("--shift", type=float, default=8.0)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    write_cohort(**vars(options))
