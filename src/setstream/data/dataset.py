"""SetDataset: many sources with ids, labels and splits.

data = ss.data.open("slides/")                                   recognise the format
train, test = data.split("splits.csv"), ...                      CLAM's case_id,slide_id,label; or stratified, by seed
for batch in SetLoader(train, batch=4, chunk_size=256): ...      batch.sets is an input of ss.encode
"""

from __future__ import annotations

import copy
import csv
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from setstream._utils.prefetch import iterate_ahead
from setstream.data.collection import Block, Ids, SetCollection, Share, Skip, file_facts
from setstream.data.formats.file import existing, reading
from setstream.errors import ConfigurationError, DataError
from setstream.sets.chunks import SourceChunks
from setstream.sets.source import READ_BYTES, PartSource, SetSource

ID_COLUMNS = ("slide_id", "set_id", "bag_id", "id", "case_id")
LABEL_COLUMNS = ("label", "target", "class", "y")
MOST_SETS = 1024  # small sets in a block, or in a share
Range = tuple[int, int, int | None]  # the number of a set, and some of its elements: start and stop


class SetDataset(Sequence[SetSource], SetCollection):
    """Sources in order, each with its id and label.

    >>> from setstream.data import ArraySource
    >>> data = SetDataset([ArraySource(torch.randn(n, 3), id=f"s{n}", label=n % 2) for n in (5, 0, 7, 8)])
    >>> [len(source) for source in data], data.labels
    ([5, 0, 7, 8], [1, 0, 1, 0])
    >>> data
    SetDataset(4 sets: s5, s0, s7, ...; labels: 2 x 1, 2 x 0)
    """

    unit: ClassVar[str] = "sets"

    def __init__(self, sources: Sequence[SetSource]) -> None:
        self.sources = list(sources)
        if twice := sorted(name for name, count in Counter(self.ids).items() if count > 1):
            raise DataError(f"ids of sets must differ; {twice[:5]} appear more than once")

    def __len__(self) -> int:
        return len(self.sources)

    def __repr__(self) -> str:
        names = ", ".join(self.ids[:3] + ["..."] * (len(self) > 3))
        counts = Counter(str(label) for label in self.labels if label is not None)
        labels = ", ".join([f"{count} x {label}" for label, count in counts.most_common(5)] + ["..."] * (len(counts) > 5))
        return f"SetDataset({len(self)} sets: {names}{f'; labels: {labels}' if labels else ''})"

    def __getitem__(self, index: Any) -> Any:
        return SetDataset(self.sources[index]) if isinstance(index, slice) else self.sources[index]

    @property
    def ids(self) -> list[str]:
        return [source.id for source in self.sources]

    @property
    def labels(self) -> list[Any]:
        return [source.label for source in self.sources]

    def select(self, ids: Sequence[str]) -> SetDataset:
        """The sets of some ids, in that order."""
        known = {source.id: source for source in self.sources}
        if missing := [name for name in ids if name not in known]:
            raise DataError(f"there are no sets {missing[:5]}{' ...' if len(missing) > 5 else ''} among {len(known)}")
        return SetDataset([known[name] for name in ids])

    def with_labels(self, path: str | Path, *, missing: str = "error") -> SetDataset:
        """Labels from a CSV with columns of ids and labels; sets it does not name are an error, or left out: missing="drop"."""
        if missing not in ("error", "drop"):
            raise ConfigurationError(f"missing must be 'error' or 'drop'; got {missing!r}")
        rows = read_csv(path)
        ids, labels = column(rows, ID_COLUMNS, path), column(rows, LABEL_COLUMNS, path)
        table = dict(zip(ids, map(as_number, labels), strict=True))
        unnamed = [source.id for source in self.sources if source.id not in table]
        if unnamed and missing == "error":
            some = f"{unnamed[:5]}{' ...' if len(unnamed) > 5 else ''}"
            raise DataError(f"{path}: has no label for {some}; its ids are like {ids[:2]}. missing='drop' drops such sets")
        kept = [copy.copy(source) for source in self.sources if source.id in table]
        for source in kept:
            source.label = table[source.id]
        return SetDataset(kept)

    def split(self, path: str | Path) -> dict[str, SetDataset]:
        """Splits from a CSV: columns train, val, test that list ids (CLAM), or a column `split` beside the ids."""
        rows = read_csv(path)
        names = list(rows[0]) if rows else []
        lists = {name: [row[name] for row in rows if row[name]] for name in names if name in ("train", "val", "test")}
        if not lists and "split" in names:
            for name, row in zip(column(rows, ID_COLUMNS, path), rows, strict=True):
                lists.setdefault(row["split"], []).append(name)
        if lists:
            return {name: self.select(ids) for name, ids in lists.items()}
        raise DataError(f"{path}: has neither columns train, val, test nor a column split; its columns are {names}")

    def stratified(self, *shares: float, seed: int = 0) -> list[SetDataset]:
        """Random splits in which every label has its share, the same for the same seed.

        >>> from setstream.data import ArraySource
        >>> data = SetDataset([ArraySource(torch.zeros(1, 1), id=str(n), label=n % 2) for n in range(20)])
        >>> [sum(part.labels) for part in data.stratified(0.5, 0.5)]
        [5, 5]
        """
        if not shares or min(shares) <= 0 or sum(shares) > 1 + 1e-9:
            raise ConfigurationError(f"shares must be positive and sum to at most one; got {shares}")
        groups = defaultdict[Any, list[int]](list)
        for number, label in enumerate(self.labels):
            groups[label].append(number)
        parts: list[list[int]] = [[] for _ in shares]
        generator = np.random.default_rng(seed)
        for label in sorted(groups, key=str):
            order = generator.permutation(groups[label])
            bounds = np.round(np.cumsum(shares) * len(order)).astype(int)
            for part, some in zip(parts, np.split(order, bounds), strict=False):
                part.extend(some.tolist())
        return [SetDataset([self.sources[number] for number in sorted(part)]) for part in parts]

    def check(self, skip_bad: bool = False) -> tuple[SetDataset, list[str]]:
        """Open every set: all must have elements of one shape. Returns the good ones and what is wrong with the others."""
        shapes: dict[str, tuple[int, ...]] = {}
        problems: dict[str, str] = {}
        for source in self.sources:
            try:
                if len(source):
                    shapes[source.id] = source.shape
            except DataError as error:
                if not skip_bad:
                    raise
                problems[source.id] = str(error)
            finally:
                source.close()
        usual = Counter(shapes.values()).most_common(1)[0][0] if shapes else ()
        others = {name: shape for name, shape in shapes.items() if shape != usual}
        problems |= {name: f"{name}: elements are {others[name]}; those of most sets are {usual}" for name in others}
        if others and not skip_bad:
            raise DataError(next(iter(problems.values())))
        return SetDataset([source for source in self.sources if source.id not in problems]), list(problems.values())

    def facts(self) -> list[Any]:
        return [[source.id, len(source) if source.path is None else file_facts(source.path)] for source in self.sources]

    def total(self) -> int:
        return len(self)

    def blocks(self, position: int, chunk_size: int, decode_ahead: int, skip: Skip) -> Iterator[Block]:
        return iterate_ahead(self._read(((number, 0, None) for number in range(position, len(self))), chunk_size))

    def shares(self, size: int, skip: Skip) -> list[Share]:
        shares: list[Share] = []
        ranges: list[Range] = []
        elements = units = 0
        for number, source in enumerate(self.sources):
            try:
                length = len(source)
            except DataError as error:
                skip(source.id, str(error))
                continue
            for start in range(0, max(length, 1), size):
                stop = min(start + size, length)
                ranges, elements, units = [*ranges, (number, start, stop)], elements + stop - start, units + (stop == length)
                if elements >= size or len(ranges) >= MOST_SETS:
                    shares.append(Share(ranges, elements, units))
                    ranges, elements, units = [], 0, 0
        return [*shares, Share(ranges, elements, units)] if ranges else shares

    def read_share(self, share: Share, chunk_size: int, decode_ahead: int) -> Iterator[Block]:
        return iterate_ahead(self._read(share.where, chunk_size))

    def share_ids(self, share: Share) -> list[str]:
        return [self.sources[number].id for number, *_ in share.where]

    def _read(self, ranges: Iterable[Range], chunk_size: int) -> Iterator[Block]:
        """Ranges of sets, some megabytes at a time: a part of a large set, or small sets one after another."""
        waiting: dict[int, Tensor] = {}  # sets, or the ends of large ones, by their number
        total, last = 0, torch.empty(0)
        for number, start, stop in ranges:
            source = self.sources[number]
            place = str(source.path or "")
            try:
                piece = torch.empty(0)
                stop = len(source) if stop is None else stop
                size = max(1, math.prod(source.shape) * source.dtype.itemsize) if stop > start else 1
                step = chunk_size * max(1, READ_BYTES // (chunk_size * size))
                for begin in range(start, stop, step):
                    piece = source.read(begin, min(begin + step, stop))
                    if begin + step < stop:
                        yield Block(Ids.all(source.id, len(piece), place), piece)
            except DataError as error:
                yield from self._joined(waiting)
                yield Block(Ids.all(source.id, 0, place), error, number + 1)
                continue
            finally:
                source.close()
            alike = not len(piece) or not len(last) or (piece.shape[1:], piece.dtype) == (last.shape[1:], last.dtype)
            if not alike or total + piece.nbytes > READ_BYTES or len(waiting) >= MOST_SETS:
                yield from self._joined(waiting)
                total = 0
            waiting[number], total, last = piece, total + piece.nbytes, piece if len(piece) else last
        yield from self._joined(waiting)

    def _joined(self, waiting: dict[int, Tensor]) -> Iterator[Block]:
        """The waiting sets in one block, if there are any; empty ones, too."""
        if not waiting:
            return
        sources, pieces = [self.sources[number] for number in waiting], [piece for piece in waiting.values() if len(piece)]
        codes = np.repeat(np.arange(len(waiting)), [len(piece) for piece in waiting.values()])
        ids = Ids([source.id for source in sources], codes, {source.id: str(source.path or "") for source in sources})
        yield Block(ids, torch.cat(pieces) if len(pieces) > 1 else [*pieces, torch.empty(0)][0], max(waiting) + 1)
        waiting.clear()

    def output_order(self, names: list[str]) -> list[str]:
        return self.ids


def read_csv(path: str | Path) -> list[dict[str, str]]:
    """The rows of a CSV (or .tsv) by the names in its first line."""
    with reading(existing(path)), open(path, newline="") as file:
        return list(csv.DictReader(file, delimiter="\t" if str(path).endswith(".tsv") else ","))


def column(rows: Sequence[dict[str, Any]], names: Sequence[str], path: str | Path) -> list[Any]:
    """The cells of the first of these columns that a table has."""
    columns = list(rows[0]) if rows else []
    chosen = next((name for name in names if name in columns), None)
    if chosen is None:
        raise DataError(f"{path}: has none of the columns {', '.join(names)}; its columns are {columns}")
    for number, row in enumerate(rows, 1):
        if row[chosen] is None:
            raise DataError(f"{path}: row {number} after the header has no {chosen!r}")
    return [row[chosen] for row in rows]


def as_number(text: str) -> Any:
    """A number where the text is one, otherwise the text."""
    for kind in (int, float):
        with suppress(ValueError):
            return kind(text)
    return text


class SetBatch(NamedTuple):
    """Some sets, for `ss.encode`, and their labels."""

    sets: SourceChunks
    labels: list[Any]
    ids: list[str]


@dataclass(eq=False)
class SetLoader:
    """Batches of sets from their files, in chunks that are read ahead; each epoch in a new order, by seed.

    `partition` is how a set is cut into chunks: "contiguous", "blocks" (contiguous blocks in random order; the default while
    shuffling) or "random". `parallel` is what each process of torch.distributed gets. "data": its share of every batch's sets
    (while shuffling, a last batch that cannot be shared equally waits for another epoch). "set": its part of every set.

    >>> import setstream as ss
    >>> from setstream.data import ArraySource
    >>> data = SetDataset([ArraySource(torch.randn(n, 3), id=str(n), label=n) for n in (5, 9, 70)])
    >>> encoder = ss.SetEncoder(torch.nn.Linear(3, 8), ss.UMBC(8, num_slots=2))
    >>> for batch in SetLoader(data, batch=2, chunk_size=16):
    ...     z = ss.encode(encoder, batch.sets, gradient="exact")
    """

    dataset: SetDataset
    batch: int = 1  #: sets per batch
    chunk_size: int = 256  #: elements of a set that are read at a time
    _: KW_ONLY
    shuffle: bool = False  #: whether each epoch has a new order of the sets
    partition: str | None = None
    seed: int = 0
    parallel: str | None = None

    def __post_init__(self) -> None:
        if self.batch < 1:
            raise ConfigurationError(f"a batch has at least one set; got {self.batch}")
        if self.parallel not in (None, "data", "set"):
            raise ConfigurationError(f"parallel must be 'data', 'set' or None; got {self.parallel!r}")
        self.rank, self.ranks, self.epoch = 0, 1, 0
        if self.parallel and dist.is_available() and dist.is_initialized():
            self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
        if self.parallel == "data" and self.batch % self.ranks:
            raise ConfigurationError(f"{self.ranks} processes cannot share batches of {self.batch} sets: choose a multiple")

    def __len__(self) -> int:
        return len(self._batches(torch.arange(len(self.dataset))))

    def __iter__(self) -> Iterator[SetBatch]:
        generator = torch.Generator().manual_seed((self.seed * 2**32 + self.epoch) % 2**63)
        self.epoch += 1
        order = torch.randperm(len(self.dataset), generator=generator) if self.shuffle else torch.arange(len(self.dataset))
        for numbers in self._batches(order):
            sources = [self.dataset.sources[number] for number in numbers.tolist()]
            parts = [PartSource(source, self.rank, self.ranks) for source in sources] if self.parallel == "set" else sources
            partition = self.partition or ("blocks" if self.shuffle else "contiguous")
            chunks = SourceChunks(parts, self.chunk_size, partition, generator)
            yield SetBatch(chunks, [source.label for source in sources], [source.id for source in sources])

    def _batches(self, order: Tensor) -> list[Tensor]:
        batches = list(order.split(self.batch))
        if self.parallel == "data":
            shared = (numbers for numbers in batches if not self.shuffle or len(numbers) % self.ranks == 0)
            batches = [numbers.tensor_split(self.ranks)[self.rank] for numbers in shared]
        return [numbers for numbers in batches if len(numbers)]
