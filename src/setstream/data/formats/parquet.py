"""Parquet files."""

from collections.abc import Iterator
from functools import partial
from typing import Any

from setstream._utils.optional import need
from setstream.data.formats.table import FEWEST_ROWS, TableFile, batch_rows
from setstream.errors import DataError

# Pages are read through a buffer of this size; a memory map would count as the process's memory, page by page. With a buffer,
# pyarrow allocates the size that the header of a page declares, 2 GiB if it is damaged: small files are read without one.
FILE_BUFFER, SMALL_FILE = 2**20, 2**26


class ParquetTable(TableFile):
    """A Parquet file."""

    suffixes = (".parquet", ".pq")

    def open(self, dictionaries: list[str]) -> tuple[Any, Any, int]:
        options = {"buffer_size": FILE_BUFFER if self.path.stat().st_size > SMALL_FILE else 0, "pre_buffer": False}
        try:
            file = need("pyarrow.parquet").ParquetFile(self.path, read_dictionary=dictionaries, **options)
        except KeyError as error:
            raise DataError(f"{self.path}: has no column {', '.join(dictionaries)}, unlike the files before it") from error
        return file, file.schema_arrow, file.num_row_groups

    def rows(self, group: int) -> int:
        return int(self.file.metadata.row_group(group).num_rows)

    def _batches(self, group: int, columns: list[str]) -> Iterator[Any]:
        library, kinds = need("pyarrow"), [self.schema.field(name).type for name in columns]
        read = partial(self.file.iter_batches, row_groups=[group], columns=columns, use_threads=False)
        if any(library.types.is_list(kind) or library.types.is_large_list(kind) for kind in kinds):
            first = next(read(FEWEST_ROWS), None)  # rows of any length: all as long as these
            size, rows = (first.nbytes, first.num_rows) if first else (1, 1)
        else:
            size, rows = sum(library.nulls(64, kind).nbytes for kind in kinds), 64
        yield from read(batch_rows(size, rows))
