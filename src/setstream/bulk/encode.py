"""Bulk encoding: from a model and many sets to one row per set.

    rows: id, count, z (representation), y (prediction)                  Parquet or HDF5
    states, if requested: a StateStore, to which later elements are added without reading the earlier ones again

Work in progress is in a journal beside the output (`journal.py`). States are committed together with the position: whenever the
process is killed, the next run continues with no row missing and none doubled. A model with several passes reads the data once
for each. The output is written at the end, under another name, and renamed.
"""

import json
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from setstream._utils.atomic import whole_or_nothing
from setstream._utils.optional import need
from setstream._utils.prefetch import decoded_ahead
from setstream.bulk import EncodeOptions, Progress
from setstream.bulk.journal import Engine, Journal, Step
from setstream.bulk.partial import PartialStates, SetStates
from setstream.bulk.ray import ray_engine
from setstream.data.collection import SetCollection, Skip
from setstream.errors import ConfigurationError, MismatchError, NonFiniteError
from setstream.models.encoder import SetEncoder
from setstream.models.model import SetModel
from setstream.states.digest import digest
from setstream.states.state import State
from setstream.stores.store import Change, StateStore

# Work is committed after this time, or when the states that have changed take this much memory.
COMMIT_SECONDS, COMMIT_BYTES = 5.0, 2**26
BATCH = 256  # sets whose rows are made at a time


def encode_sets(
    model: SetModel | SetEncoder,
    data: SetCollection,
    out: str | Path,
    options: EncodeOptions | None = None,
    *,
    progress: Progress | None = None,
    on_bad: Callable[[str], None] | None = None,
    **changes: Any,
) -> int:
    """Encode all sets and write one row per set; returns the number of rows.

    Args:
        model: In eval mode.
        data: A `SetDataset`, or the `ParquetSets` of tables.
        out: The .parquet or .h5 file to write.
        options: How to encode; also by name: `encode_sets(model, data, out, states="monday.db")`.
        progress: Called with the number of elements so far, and of sets (of a table: rows).
        on_bad: Called with what is wrong with a set that cannot be read or encoded. The set is left out (of an update, its
            new elements). A resumed run also reports what was left out before. Without on_bad, such sets are an error.
        changes: Fields of `options`.
    """
    options, out = replace(options or EncodeOptions(), **changes), Path(out)
    encoder = model.encoder if isinstance(model, SetModel) else model
    _check(model, encoder, data, out, options)
    out.parent.mkdir(parents=True, exist_ok=True)
    path = out.with_name(f".{out.name}.journal")
    if options.states is not None and Path(options.states).exists() and not path.exists():
        raise ConfigurationError(f"{options.states} already exists: name a new file for the states")
    fingerprint, update = encoder.empty(1).fingerprint, str(options.update or "")
    facts = digest(json.dumps(data.facts()).encode())  # of the files, or sets in memory: a journal is for no others
    run = {"encoder": fingerprint, "data": facts, "engine": options.engine, "update": update, "tile": options.tile}
    journal = Journal(path, encoder, run, on_bad, tiled=options.tile is not None)
    with (ray_engine if options.engine == "ray" else local_engine)(encoder, data, options) as read:
        encode_states(encoder, data, journal, options, progress or (lambda *done: None), read)
    if options.engine == "ray":
        journal.arrange(data.output_order)
    rows = write_rows(model, _with_earlier(journal, encoder, options.update), out, options, journal.skip)
    if options.states is not None:
        whole = (Change(*pair, replace=True) for pair in _with_earlier(journal, encoder, options.update))
        written = whole if options.tile is None else journal.changes()
        with whole_or_nothing(Path(options.states)) as hidden, StateStore(hidden, model, tile=options.tile) as store:
            store.fill((change for change in written if change.id not in journal.skipped), journal.skip)
    journal.delete()
    return rows


def _check(model: SetModel | SetEncoder, encoder: SetEncoder, data: SetCollection, out: Path, options: EncodeOptions) -> None:
    if (options.tile is None) != (data.time_column is None):
        raise ConfigurationError(
            f"tiles need the time of each element, and times are used for tiles only; got tile={options.tile} and the column "
            f"{data.time_column!r}: give both (ParquetSets(..., time_column=), --time and --tile), or neither"
        )
    if out.suffix not in WRITERS:
        raise ConfigurationError(f"the output must be a {' or '.join(WRITERS)} file; got {out.name!r}")
    if encoder.training:
        raise ConfigurationError("a model in training mode draws its slots anew for every set: call model.eval() first")
    if options.what == "predictions" and not isinstance(model, SetModel):
        raise ConfigurationError("an encoder alone makes no predictions: choose what='representations'")
    if options.states is not None or options.update is not None:
        encoder.check_one_pass("states= and update=: a store keeps states and not elements")
    if options.engine == "ray" and encoder.pool.refuse_chunks(options.chunks):
        raise encoder.pool.inconsistent()  # any worker may get any part of a set
    need("pyarrow" if out.suffix == ".parquet" else "h5py")


def encode_states(
    encoder: SetEncoder, data: SetCollection, journal: Journal, options: EncodeOptions, show: Progress, read: Engine
) -> None:
    """Add all elements after the journal's position to the states in the journal, in this pass and in those that follow."""
    elements, total = 0, data.total() if encoder.passes > 1 else 0
    while True:
        states, committed, position = SetStates(encoder, options.chunks), time.monotonic(), journal.position
        before = total * (journal.number - 1)
        for step in read(journal, states):
            elements += step.elements
            if step.position is not None:
                position = step.position
                if states.nbytes >= COMMIT_BYTES or time.monotonic() - committed >= COMMIT_SECONDS:
                    journal.commit(states, position)
                    committed = time.monotonic()
            show(elements, before + step.units)
        journal.commit(states, position)
        if journal.number == encoder.passes:
            return
        journal.next_pass()


@contextmanager
def local_engine(encoder: SetEncoder, data: SetCollection, options: EncodeOptions) -> Iterator[Engine]:
    """The engine that reads and computes in this process."""

    def read(journal: Journal, states: SetStates) -> Iterator[Step]:
        begin = None if journal.number == 1 else journal.begun
        partial = PartialStates(encoder, options.chunk_size, journal.skip, states, begin, options.tile)
        done = journal.position
        for block in data.blocks(done, options.chunk_size, decoded_ahead(partial.device), journal.skip):
            partial.add(block)
            done = done if block.position is None else block.position
            yield Step(len(block.ids), block.position, done)

    yield read


def _with_earlier(journal: Journal, encoder: SetEncoder, update: str | Path | None) -> Iterator[tuple[str, State]]:
    """The journal's states, each added to its set in an earlier store; then that store's other sets."""
    if update is None:
        yield from journal.states()
        return
    with StateStore(update, encoder) as earlier:
        left = dict.fromkeys(earlier.ids(), True)
        for name, state in journal.states():
            known = left.pop(name, False)
            yield name, earlier.get(name) + state.to(encoder.device or torch.device("cpu")) if known else state
        yield from ((name, earlier.get(name)) for name in left)


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
