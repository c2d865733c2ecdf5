"""Immune repertoires: bags of T-cell receptors, of which a few carry a motif.

    sequence   CDR3 of a human T-cell receptor β chain as amino acids, drawn by OLGA (Sethna et al. 2019, PyPI `olga`);
               three residues at both ends are left out: germline genes decide them
    element    its codes (LENGTH,): 1 .. 20 for amino acids, 0 after the end; SHORTEST to LENGTH residues
    bag        N sequences of a pool that all bags share; bags with odd numbers are positive
    positive   max(1, round(rate · N)) of its sequences carry the motif, at a random place

The pool is drawn once (50 s) and kept in the cache folder. Training bags take their sequences from its first part, validation
and test bags from the others. Bag i of a split is a function of the seed and i, and is assembled at each use.
"""

import importlib
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from setstream._utils.registry import fetch_pypi, unpack_once
from setstream.errors import ConfigurationError
from setstream.training.task import mix

AMINO = "ACDEFGHIKLMNPQRSTVWY"
ENDS, SHORTEST, LENGTH = 3, 6, 14
POOL = 1_000_000
PARTS = {"train": (0.0, 0.6), "val": (0.6, 0.7), "test": (0.7, 1.0)}  # which shares of the pool
MOTIF = "LW.DK"  # a point leaves the residue that was there


def cdr3_generator(model: str = "human_T_beta", seed: int = 0) -> Callable[[], str]:
    """A function that draws the amino acids of one CDR3. OLGA draws from NumPy's global generator, which is seeded here."""
    package = fetch_pypi("olga", "1.3.0")
    if str(package) not in sys.path:
        sys.path.insert(0, str(package))
    load_model, generation = (importlib.import_module(f"olga.{name}") for name in ("load_model", "sequence_generation"))
    folder = package / "olga" / "default_models" / model
    genes, known = load_model.GenomicDataVDJ(), load_model.GenerativeModelVDJ()
    anchors = [str(folder / f"{gene}_gene_CDR3_anchors.csv") for gene in "VJ"]
    genes.load_igor_genomic_data(str(folder / "model_params.txt"), *anchors)
    known.load_and_process_igor_model(str(folder / "model_marginals.txt"))
    np.random.seed(seed)  # noqa: NPY002
    draw = generation.SequenceGenerationVDJ(known, genes).gen_rnd_prod_CDR3
    return lambda: draw()[1]


def codes(sequences: Sequence[str]) -> np.ndarray:
    """Sequences of at most LENGTH residues as rows of codes (n, LENGTH).

    >>> codes(["CAF"])[0, :5].tolist()
    [2, 1, 5, 0, 0]
    """
    code_of = np.zeros(256, np.uint8)
    code_of[np.frombuffer(AMINO.encode(), np.uint8)] = 1 + np.arange(len(AMINO))
    letters = np.frombuffer("".join(one.ljust(LENGTH) for one in sequences).encode(), np.uint8)
    return code_of[letters].reshape(-1, LENGTH)


def receptors(size: int = POOL) -> np.ndarray:
    """The sequences that all bags take theirs from (size, LENGTH), from the cache folder if they were drawn before."""

    def draw_all(folder: Path) -> None:
        draw, kept = cdr3_generator(), list[str]()
        while len(kept) < size:
            sequence = draw()[ENDS:-ENDS]
            if SHORTEST <= len(sequence) <= LENGTH:
                kept.append(sequence)
        np.save(folder / "unpacked" / "codes.npy", codes(kept))

    return np.load(unpack_once(f"repertoires-{size}", draw_all) / "codes.npy")


def part(name: str, sequences: np.ndarray) -> Tensor:
    """The sequences (n, LENGTH) of a split: train, val or test."""
    begin, end = (round(share * len(sequences)) for share in PARTS[name])
    return torch.from_numpy(sequences[begin:end])


def carries(rows: Tensor, motif: str) -> Tensor:
    """Which rows (n, LENGTH) contain the motif."""
    wanted = _pattern(motif)
    return ((rows.unfold(1, len(motif), 1) == wanted) | (wanted == 0)).all(2).any(1)


def implant(rows: Tensor, motif: str, generator: torch.Generator) -> Tensor:
    """The rows (n, LENGTH) with the motif written over residues at a random place of each."""
    wanted = _pattern(motif)
    room = (rows > 0).sum(1) - len(motif) + 1
    begins = (torch.rand(len(rows), generator=generator, dtype=torch.float64) * room).long()
    places = begins.unsqueeze(1) + torch.arange(len(motif))
    return rows.scatter(1, places, torch.where(wanted == 0, rows.gather(1, places), wanted))


def _pattern(motif: str) -> Tensor:
    """The codes of a motif; 0 for a point."""
    return torch.tensor([0 if letter == "." else 1 + AMINO.index(letter) for letter in motif], dtype=torch.uint8)


class Repertoires(Sequence[Tensor]):
    """Bags (N, LENGTH) of codes, assembled at each use; those with odd numbers are positive.

    Args:
        rows: the sequences of this split, codes (n, LENGTH).
        size: N.
        rate: the share of a positive bag's sequences that carry the motif; at least one does.
    """

    def __init__(self, rows: Tensor, *, count: int, size: int, rate: float, motif: str = MOTIF, seed: int = 0) -> None:
        if not 0 < rate <= 1:
            raise ConfigurationError(f"the rate of sequences with the motif must be above 0 and at most 1; got {rate}")
        if not set(motif) <= {*AMINO, "."} or not 0 < len(motif) <= SHORTEST:
            raise ConfigurationError(f"a motif has 1 to {SHORTEST} of the letters {AMINO} and points; got {motif!r}")
        self.rows, self.total, self.size, self.motif, self.seed = rows, count, size, motif, seed
        self.witnesses = max(1, round(rate * size))

    def __len__(self) -> int:
        return self.total

    def __getitem__(self, number: Any) -> Any:
        if not 0 <= number < self.total:
            raise IndexError(number)
        generator = torch.Generator().manual_seed(mix(self.seed, number, 17))
        bag = self.rows[torch.randint(len(self.rows), (self.size,), generator=generator)]
        if number % 2:
            chosen = torch.randperm(self.size, generator=generator)[: self.witnesses]
            bag[chosen] = implant(bag[chosen], self.motif, generator)
        return bag
