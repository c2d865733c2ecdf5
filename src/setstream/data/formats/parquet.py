"""Parquet files."""

from collections.abc import Iterator
from functools import partial
from typing import Any

from setstream._utils.optional import need
from setstream.data.formats.parquet_pages import check_pages
from setstream.data.formats.table import FEWEST_ROWS, TableFile, batch_rows
from setstream.errors import DataError

# Pages are read through a buffer of this size; a memory map would count as the process's memory, page by page.
FILE_BUFFER = 2**20


class ParquetTable(TableFile):
    """A Parquet file."""

    suffixes = (".parquet", ".pq")

    def open(self, dictionaries: list[str]) -> tuple[Any, Any]:
        try:
            file = need("pyarrow.parquet").ParquetFile(
                self.path, read_dictionary=dictionaries, buffer_size=FILE_BUFFER, pre_buffer=False
            )
        except KeyError as error:
            raise DataError(f"{self.path}: has no column {', '.join(dictionaries)}, unlike the files before it") from error
        return file, file.schema_arrow

    def __len__(self) -> int:
        return int(self.file.num_row_groups)

    def rows(self, group: int) -> int:
        return int(self.file.metadata.row_group(group).num_rows)

    def _batches(self, group: int, columns: list[str]) -> Iterator[Any]:
        self._check_pages(group, columns)
        read = partial(self.file.iter_batches, row_groups=[group], columns=columns, use_threads=False)
        sizes = [_row_bytes(self.schema.field(name).type) for name in columns]
        if None in sizes:  # lists of any length: as long as those of the first rows
            first = next(read(FEWEST_ROWS), None)
            sizes = [first.nbytes // first.num_rows if first else 1]
        yield from read(batch_rows(sum(filter(None, sizes)), 1))

    def _check_pages(self, group: int, columns: list[str]) -> None:
        row_group = self.file.metadata.row_group(group)
        chunks = [row_group.column(number) for number in range(row_group.num_columns)]
        with self.path.open("rb", buffering=0) as file:
            for chunk in chunks:
                if chunk.num_values and any(f"{chunk.path_in_schema}.".startswith(f"{name}.") for name in columns):
                    offsets = (chunk.dictionary_page_offset or 0, chunk.data_page_offset)
                    check_pages(file, min(filter(None, offsets)), chunk.total_compressed_size)


def _row_bytes(kind: Any) -> int | None:
    """The bytes of a row of a column of this type, if all have the same; a text counts as its code."""
    types = need("pyarrow").types
    if types.is_list(kind) or types.is_large_list(kind):
        return None
    value, count = (kind.value_type, kind.list_size) if types.is_fixed_size_list(kind) else (kind, 1)
    return int(count * value.bit_width // 8) if types.is_primitive(value) else 4 * count
