"""Columns of a table inside the network: numbers, some of them missing, and categories as codes 0 .. K - 1::

    number      (x - mean) / scale, and 0 (the mean) where x is NaN
    missing     1 where a number is NaN or a category is unknown, less its mean; for columns where training has seen that
    category    one-hot of its first codes, less their means; all 0 (the mean) where it is unknown: NaN, or any other code
    many codes  code + 1, and 0 where it is unknown: the row of a table of embeddings

A linear layer on a one-hot is an embedding; one with many codes has its own table. The statistics of a one-hot are counts.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn

from setstream.nn.standardise import Standardise
from setstream.sets.source import SetSource

#: Codes that have a column of their own; columns with more codes have a table of embeddings, too.
ONE_HOT = 32
EMBEDDING = 16  # width of these embeddings


class TableColumns(NamedTuple):
    """The names of all columns, and the texts of the categories of the last ones."""

    names: tuple[str, ...]
    categories: tuple[tuple[str, ...], ...] = ()


class MixedColumns(Standardise):
    """Raw elements, with NaN and codes, as finite numbers; the codes of columns with many categories come last.

    Args:
        in_dim: The number of columns; those with categories are the last.
        categories: The categories of each such column.
        missing: Columns with an indicator of missing values.
        nan: Whether numbers may be NaN.
        names: Names of the columns, for readers of config.json.
    """

    def __init__(
        self,
        in_dim: int,
        categories: Sequence[Sequence[str]] = (),
        missing: Sequence[int] = (),
        nan: bool = True,
        names: Sequence[str] = (),
    ) -> None:
        sizes, numbers = [len(texts) for texts in categories], in_dim - len(categories)
        super().__init__(numbers + len(missing) + sum(min(size, ONE_HOT) for size in sizes))
        self.in_features, self.numbers, self.sizes = in_dim, numbers, sizes
        self.missing, self.nan = list(missing), nan

    @property
    def out_features(self) -> int:
        return len(self.mean) + len(self.tables)

    @property
    def tables(self) -> list[int]:
        """The sizes of the columns that need an embedding."""
        return [size for size in self.sizes if size > ONE_HOT]

    def fill_missing(self, x: Tensor) -> Tensor:
        where = torch.isnan(x) if self.nan else torch.isnan(x) & (torch.arange(x.shape[-1], device=x.device) >= self.numbers)
        return x.masked_fill(where, 0)

    def _unknown(self, x: Tensor, number: int) -> Tensor:
        """Where a column has no known category."""
        codes = x[..., self.numbers + number]
        return ~((codes >= 0) & (codes < self.sizes[number]) & (codes == codes.floor()))

    def expand(self, x: Tensor) -> Tensor:
        """(..., columns with mean and scale): NaN where a number is missing or a category unknown."""
        absent = [torch.isnan(x[..., : self.numbers]), *(self._unknown(x, i).unsqueeze(-1) for i in range(len(self.sizes)))]
        parts = [x[..., : self.numbers], torch.cat(absent, -1)[..., self.missing].to(x.dtype)]
        for number, size in enumerate(self.sizes):
            codes = torch.arange(min(size, ONE_HOT), device=x.device, dtype=x.dtype)
            hot = (x[..., self.numbers + number, None] == codes).to(x.dtype)
            parts.append(hot.masked_fill(self._unknown(x, number).unsqueeze(-1), torch.nan))
        return torch.cat(parts, -1)

    @torch.no_grad()
    def fit(self, sets: Any, chunk_size: int = 1024) -> Self:
        super().fit(sets, chunk_size)
        self.scale[self.numbers :] = 1.0  # a rare category would be a large number
        return self

    def forward(self, x: Tensor) -> Tensor:
        x = x.to(self.mean.dtype)
        numbers = super().forward(self.expand(x))
        many = [
            (x[..., self.numbers + number] + 1).masked_fill(self._unknown(x, number), 0).unsqueeze(-1)
            for number, size in enumerate(self.sizes)
            if size > ONE_HOT
        ]
        return torch.cat([numbers.masked_fill(torch.isnan(numbers), 0.0), *many], -1)


class Embedded(nn.Module):
    """Numbers as they are, and embeddings of the codes after them. Row 0 of each table, of unknown codes, begins at zero."""

    def __init__(self, numbers: int, sizes: Sequence[int]) -> None:
        super().__init__()
        self.numbers, self.out_features = numbers, numbers + EMBEDDING * len(sizes)
        tables = [nn.Embedding(size + 1, EMBEDDING) for size in sizes]
        for table in tables:
            nn.init.zeros_(table.weight[0])
        self.tables = nn.ModuleList(tables)

    def forward(self, x: Tensor) -> Tensor:
        codes = x[..., self.numbers :].long()
        return torch.cat([x[..., : self.numbers], *(table(codes[..., i]) for i, table in enumerate(self.tables))], -1)


def fit_columns(
    in_dim: int, columns: TableColumns | None, nan: bool, sets: list[SetSource], chunk_size: int
) -> tuple[dict[str, Any], Standardise]:
    """The first layer of a network for these sets, and its options for `MODELS`: none where all columns are plain numbers."""
    names, categories = columns or TableColumns(())
    if not (nan or categories):
        return {}, Standardise(in_dim).fit(sets, chunk_size)
    options: dict[str, Any] = {"categories": [list(texts) for texts in categories], "nan": nan, "names": list(names)}
    every = MixedColumns(in_dim, missing=range(in_dim), **options).fit(sets, chunk_size)
    start, end = every.numbers, every.numbers + in_dim
    seen = [number for number in range(in_dim) if every.mean[start + number] > 0]
    layer = MixedColumns(in_dim, missing=seen, **options)
    kept = [*range(start), *(start + number for number in seen), *range(end, len(every.mean))]
    layer.load_state_dict({name: value[kept] for name, value in every.state_dict().items()})
    return {"columns": options | {"missing": seen}}, layer
