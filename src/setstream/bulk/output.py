"""Output of bulk encoding: states are finalised some at a time, and become rows of a Parquet or HDF5 file.

    id, count, z (representation), y (prediction)

The file is written under another name and renamed when it is complete.
"""

from collections.abc import Iterator
from contextlib import ExitStack
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from setstream._utils.atomic import whole_or_nothing
from setstream._utils.optional import need
from setstream.bulk import EncodeOptions
from setstream.data.collection import Skip
from setstream.errors import ConfigurationError, MismatchError, NonFiniteError
from setstream.models.encoder import SetEncoder
from setstream.models.model import SetModel
from setstream.states.state import State

BATCH = 256  # sets whose rows are made at a time


def as_rows(output: Any) -> Tensor:
    """The output of a head as one row of numbers per set: (B, D)."""
    if isinstance(output, Tensor):
        return output.reshape(len(output), -1)
    if isinstance(output, dict):
        return torch.cat([as_rows(value) for value in output.values()], dim=1)
    if not hasattr(output, "flat"):
        raise MismatchError(f"a prediction of type {type(output).__name__} cannot be written: give the head a tensor output")
    return output.flat()


@torch.no_grad()
def write_rows(
    model: SetModel | SetEncoder, states: Iterator[tuple[str, State]], out: Path, options: EncodeOptions, skip: Skip
) -> int:
    """Finalise states and write their rows, some at a time. Sets without a finite encoding go to `skip`."""
    encoder = model.encoder if isinstance(model, SetModel) else model
    device = encoder.device or torch.device("cpu")

    def finalize(pairs: list[tuple[str, State]]) -> Tensor:
        return encoder.finalize(State.cat([state for _, state in pairs]).to(device), chunks=options.chunks)

    with whole_or_nothing(out) as hidden, WRITERS[out.suffix](hidden) as writer:
        while batch := list(islice(states, BATCH)):
            try:
                z = finalize(batch)
            except NonFiniteError:
                bad = set()
                for name, state in batch:
                    try:
                        finalize([(name, state)])
                    except NonFiniteError as error:
                        bad.add(name)
                        skip(name, f"set {name!r}: {error}")
                batch = [pair for pair in batch if pair[0] not in bad]
                if not batch:
                    continue
                z = finalize(batch)
            columns = {"count": np.array([int(state.count) for _, state in batch])}
            if options.what != "predictions":
                columns["z"] = as_rows(z).float().cpu().numpy()
            if options.what != "representations" and isinstance(model, SetModel):
                columns["y"] = as_rows(model.head(z)).float().cpu().numpy()
            writer.write([name for name, _ in batch], columns)
        if not writer.rows:
            raise ConfigurationError("there are no sets to encode")
    return writer.rows


class _ParquetRows(ExitStack):
    """Write rows to a Parquet file, one row group per batch."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path, self.rows = path, 0
        self.writer: Any = None

    def write(self, names: list[str], columns: dict[str, np.ndarray]) -> None:
        arrow, arrays = need("pyarrow"), {"id": need("pyarrow").array(names)}
        for name, values in columns.items():
            flat = arrow.array(values.ravel())
            arrays[name] = flat if values.ndim == 1 else arrow.FixedSizeListArray.from_arrays(flat, values.shape[1])
        table = arrow.table(arrays)
        if self.writer is None:
            self.writer = self.enter_context(need("pyarrow.parquet").ParquetWriter(self.path, table.schema))
        self.writer.write_table(table)
        self.rows += len(names)


class _H5Rows(ExitStack):
    """Write rows to HDF5: one growing data set per column."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.file, self.rows = self.enter_context(need("h5py").File(path, "w")), 0

    def write(self, names: list[str], columns: dict[str, np.ndarray]) -> None:
        values: dict[str, Any] = {"id": np.array(names, dtype=object)} | columns
        for name, column in values.items():
            if name not in self.file:
                kind, width = need("h5py").string_dtype() if name == "id" else column.dtype, column.shape[1:]
                self.file.create_dataset(name, (0, *width), kind, maxshape=(None, *width), chunks=True)
            self.file[name].resize(self.rows + len(names), axis=0)
            self.file[name][self.rows :] = column
        self.rows += len(names)


#: The writer of a file, by its ending.
WRITERS: dict[str, type[_ParquetRows] | type[_H5Rows]] = {".parquet": _ParquetRows, ".h5": _H5Rows}
