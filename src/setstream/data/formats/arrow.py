"""Arrow IPC files (.arrow, .feather): a record batch is a row group."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from setstream._utils.optional import need
from setstream.data.formats.arrow_ipc import check_file
from setstream.data.formats.table import TableFile, batch_rows

# Arrow files whose framing was checked, with their size and time at that moment.
_intact: dict[Path, tuple[int, int]] = {}


class ArrowFile(TableFile):
    """An Arrow IPC file, memory-mapped. pyarrow may crash on damaged files: the framing is checked before it reads."""

    suffixes = (".arrow", ".feather")
    mapped = True

    def open(self, dictionaries: list[str]) -> tuple[Any, Any]:
        mapped = need("pyarrow").memory_map(str(self.path))
        status = self.path.stat()
        if _intact.get(self.path) != (status.st_size, status.st_mtime_ns):
            check_file(mapped.read_buffer(), str(self.path))
            _intact[self.path] = (status.st_size, status.st_mtime_ns)
        file = need("pyarrow.ipc").open_file(mapped)
        return file, file.schema

    def __len__(self) -> int:
        return int(self.file.num_record_batches)

    def rows(self, group: int) -> int:
        return int(self.file.get_batch(group).num_rows)

    def _batches(self, group: int, columns: list[str]) -> Iterator[Any]:
        whole = self.file.get_batch(group).select(columns)
        whole.validate(full=True)  # offsets outside the buffers would be followed
        rows = batch_rows(whole.nbytes, whole.num_rows)
        yield from (whole.slice(start, rows) for start in range(0, whole.num_rows, rows))
