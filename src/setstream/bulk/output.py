"""Output of a bulk job: states are finalised some at a time, and become rows of a Parquet or HDF5 file.

    id, count, z (representation), y (prediction)

The file is written aside and renamed: it is whole, or not there.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from setstream._utils.atomic import whole_or_nothing
from setstream._utils.optional import need
from setstream.errors import ConfigurationError, MismatchError, NonFiniteError
from setstream.models.encoder import SetEncoder
from setstream.models.model import SetModel
from setstream.states.state import State

OUTPUTS = (".parquet", ".h5")


def as_rows(output: Any) -> Tensor:
    """Whatever a head gives, as one row of numbers for each set: (B, D)."""
    if isinstance(output, Tensor):
        return output.reshape(len(output), -1)
    if isinstance(output, dict):
        return torch.cat([as_rows(value) for value in output.values()], dim=1)
    flat = getattr(output, "flat", None)
    if flat is None:
        raise MismatchError(f"a prediction of type {type(output).__name__} cannot be written: give the head a tensor output")
    rows: Tensor = flat()
    return rows


@torch.no_grad()
def write_rows(
    model: SetModel | SetEncoder,
    states: Iterator[tuple[str, State]],
    out: Path,
    what: str,
    skip: Callable[[str, str], None],
    chunks: str | None = None,
    batch: int = 256,
) -> int:
    """Finalise states and write their rows, some at a time. `skip` is told the sets, and why, that have no finite encoding."""
    encoder = model.encoder if isinstance(model, SetModel) else model
    predict = isinstance(model, SetModel) and what != "representations"
    total = 0
    home = encoder.device or torch.device("cpu")
    with whole_or_nothing(out) as hidden:
        writer = (_ParquetRows if out.suffix == ".parquet" else _H5Rows)(hidden)
        for names, group in _batches(states, batch):
            try:
                z = encoder.finalize(State.cat(group).to(home), chunks=chunks)
            except NonFiniteError:
                names, group = _finite(encoder, names, group, skip, chunks)
                if not names:
                    continue
                z = encoder.finalize(State.cat(group).to(home), chunks=chunks)
            whole = State.cat(group)
            columns: dict[str, np.ndarray] = {"count": whole.count.cpu().numpy()}
            if what != "predictions":
                columns["z"] = as_rows(z).float().cpu().numpy()
            if predict:
                assert isinstance(model, SetModel)
                columns["y"] = as_rows(model.head(z)).float().cpu().numpy()
            writer.write(names, columns)
            total += len(names)
        writer.close()
    return total


def _finite(
    encoder: SetEncoder, names: list[str], group: list[State], skip: Callable[[str, str], None], chunks: str | None
) -> tuple[list[str], list[State]]:
    """The sets whose encoding is finite; the others are told to `skip`."""
    kept = []
    for name, state in zip(names, group, strict=True):
        try:
            encoder.finalize(state.to(encoder.device or torch.device("cpu")), chunks=chunks)
            kept.append((name, state))
        except NonFiniteError as error:
            skip(name, f"set {name!r}: {error}")
    return [name for name, _ in kept], [state for _, state in kept]


def _batches(states: Iterator[tuple[str, State]], size: int) -> Iterator[tuple[list[str], list[State]]]:
    names: list[str] = []
    group: list[State] = []
    for name, state in states:
        names.append(name)
        group.append(state)
        if len(names) == size:
            yield names, group
            names, group = [], []
    if names:
        yield names, group


class _ParquetRows:
    """Rows into a Parquet file, a row group for each batch."""

    def __init__(self, path: Path) -> None:
        need("pyarrow.parquet")
        self.path = path
        self.writer: Any = None

    def write(self, names: list[str], columns: dict[str, np.ndarray]) -> None:
        """Add rows."""
        arrow = need("pyarrow")
        arrays = {"id": arrow.array(names)}
        for name, values in columns.items():
            if values.ndim == 1:
                arrays[name] = arrow.array(values)
            else:
                arrays[name] = arrow.FixedSizeListArray.from_arrays(arrow.array(values.ravel()), values.shape[1])
        table = arrow.table(arrays)
        if self.writer is None:
            self.writer = need("pyarrow.parquet").ParquetWriter(self.path, table.schema)
        self.writer.write_table(table)

    def close(self) -> None:
        """Finish the file."""
        if self.writer is None:
            raise ConfigurationError("there are no sets to encode")
        self.writer.close()


class _H5Rows:
    """Rows into HDF5: a data set for each column, growing."""

    def __init__(self, path: Path) -> None:
        self.file = need("h5py").File(path, "w")
        self.rows = 0

    def write(self, names: list[str], columns: dict[str, np.ndarray]) -> None:
        """Add rows."""
        text = need("h5py").string_dtype()
        values: dict[str, Any] = {"id": np.array(names, dtype=object)} | columns
        for name, column in values.items():
            if name not in self.file:
                kind = text if name == "id" else column.dtype
                self.file.create_dataset(name, (0, *column.shape[1:]), kind, maxshape=(None, *column.shape[1:]), chunks=True)
            self.file[name].resize(self.rows + len(names), axis=0)
            self.file[name][self.rows :] = column
        self.rows += len(names)

    def close(self) -> None:
        """Finish the file."""
        self.file.close()
        if not self.rows:
            raise ConfigurationError("there are no sets to encode")
