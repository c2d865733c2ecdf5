"""Bulk encoding: a model and many sets in; a row for each set out.

    rows: id, count, z (representation), y (prediction)                  Parquet or HDF5
    states, if asked for: a StateStore, to which tomorrow's elements are added without reading today's again

Work in progress lies in a journal beside the output (SQLite). A set's state, or those that a table's row groups changed, are
committed together with the position: whenever the process is killed, the next run goes on with neither a row missing nor one
doubled. The output itself is written at the end, aside, and renamed.
"""

from __future__ import annotations

import hashlib
import json
import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from setstream.data.dataset import SetDataset
from setstream.data.files import need
from setstream.data.parquet import ParquetSets
from setstream.durable import flush
from setstream.encoder import SetEncoder
from setstream.errors import ConfigurationError, DataError, MismatchError, NonFiniteError, ShapeError
from setstream.model import SetModel
from setstream.scale.partial import add_rows
from setstream.state import State
from setstream.store import StateStore

WHAT = ("representations", "predictions", "both")
OUTPUTS = (".parquet", ".h5")
# Work on a table is committed after so many rows, or when so many sets have changed.
COMMIT_ROWS, COMMIT_SETS = 2**20, 2**12

JOURNAL = """
CREATE TABLE IF NOT EXISTS meta (key TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS states (id TEXT PRIMARY KEY, place INTEGER NOT NULL, count INTEGER NOT NULL, state BLOB NOT NULL);
"""

Progress = Callable[[int, int], None]  # elements so far; sets so far, of a table rows


class Journal:
    """States of finished sets (or of all sets of a table so far), and the position that they belong to."""

    def __init__(self, path: Path, job: dict[str, Any]) -> None:
        self.database = sqlite3.connect(path, isolation_level=None)
        self.database.execute("PRAGMA journal_mode = WAL")
        self.database.executescript(JOURNAL)
        before = self.meta("job")
        if before is not None and json.loads(before) != job:
            raise ConfigurationError(
                f"{path}: is the journal of another job ({before}); finish that one, or delete the journal to begin anew"
            )
        if before is None:
            self.database.execute("INSERT INTO meta VALUES ('job', ?)", (json.dumps(job),))

    def meta(self, key: str) -> str | None:
        """A note."""
        row = self.database.execute("SELECT value FROM meta WHERE key = ?", (key,)).fetchone()
        return None if row is None else str(row[0])

    def commit(self, states: dict[str, State], position: int) -> None:
        """Write states and position, all or nothing."""
        self.database.execute("BEGIN IMMEDIATE")
        count = self.database.execute("SELECT COUNT(*) FROM states").fetchone()[0]
        for number, (name, state) in enumerate(states.items()):
            self.database.execute(
                "INSERT INTO states VALUES (?1, ?2, ?3, ?4) ON CONFLICT (id) DO UPDATE SET count = ?3, state = ?4",
                (name, count + number, int(state.count), state.to_bytes()),
            )
        self.database.execute("INSERT OR REPLACE INTO meta VALUES ('position', ?)", (str(position),))
        self.database.execute("COMMIT")

    @property
    def position(self) -> int:
        """How many sets, or rows of a table, are done."""
        return int(self.meta("position") or 0)

    def state(self, name: str) -> State | None:
        """The state of one set, if there is one."""
        row = self.database.execute("SELECT state FROM states WHERE id = ?", (name,)).fetchone()
        return None if row is None else State.from_bytes(row[0])

    def states(self) -> Iterator[tuple[str, State]]:
        """All states, in the order in which their sets first came."""
        for name, blob in self.database.execute("SELECT id, state FROM states ORDER BY place"):
            yield name, State.from_bytes(blob)

    def close(self) -> None:
        """Close the file."""
        self.database.close()


def encode_sets(
    model: SetModel | SetEncoder,
    data: SetDataset | ParquetSets,
    out: str | Path,
    *,
    what: str = "both",
    states: str | Path | None = None,
    update: str | Path | None = None,
    chunk_size: int = 4096,
    engine: str = "local",
    progress: Progress | None = None,
    ray_address: str | None = None,
    workers: int | None = None,
    on_bad: Callable[[str], None] | None = None,
) -> int:
    """Encode all sets and write a row for each; gives the number of rows.

    states:  keep the states too, in a StateStore of this name.
    update:  begin with the states of this store, which is only read: `data` then holds new elements of known or new sets.
    engine:  local, or ray (see `scale/ray.py`).
    on_bad:  called with what is wrong with a set that cannot be read; it is left out. Without it, that is an error.
    """
    out = Path(out)
    if out.suffix not in OUTPUTS:
        raise ConfigurationError(f"the output is a {' or '.join(OUTPUTS)} file; got {out.name!r}")
    if what not in WHAT:
        raise ConfigurationError(f"unknown output {what!r}: choose one of {', '.join(WHAT)}")
    if engine not in ("local", "ray"):
        raise ConfigurationError(f"unknown engine {engine!r}: choose local or ray")
    encoder = model.encoder if isinstance(model, SetModel) else model
    if encoder.training:
        raise ConfigurationError("a model in training mode draws its slots anew for every set: call model.eval() first")
    out.parent.mkdir(parents=True, exist_ok=True)
    if update is not None and not Path(update).is_file():
        raise ConfigurationError(f"there is no store of earlier states {update}")
    if what == "predictions" and not isinstance(model, SetModel):
        raise ConfigurationError("an encoder alone makes no predictions: ask for representations")
    need("pyarrow" if out.suffix == ".parquet" else "h5py")
    job = {"encoder": encoder.empty(1).fingerprint, "data": identity(data), "engine": engine, "update": str(update or "")}
    place = out.with_name(f".{out.name}.journal")
    if states is not None and Path(states).exists() and not place.exists():
        raise ConfigurationError(f"{states} is already there: name a new file for the states")
    journal = Journal(place, job)
    if engine == "ray":
        from setstream.scale.ray import ray_states

        if not journal.position:
            journal.commit(ray_states(encoder, data, chunk_size, ray_address, workers), 1)
    elif isinstance(data, ParquetSets):
        _work_through_table(encoder, data, journal, chunk_size, progress)
    else:
        _work_through_files(encoder, data, journal, chunk_size, progress, on_bad)
    whole = _with_earlier(journal, encoder, update)
    rows = write_rows(model, whole, out, what)
    if states is not None:
        _write_store(model, _with_earlier(journal, encoder, update), Path(states))
    journal.close()
    for file in (place, *place.parent.glob(f"{place.name}-*")):
        file.unlink(missing_ok=True)
    return rows


def identity(data: SetDataset | ParquetSets) -> str:
    """A digest of which files (or sets in memory) these are, so that a journal is never continued with others."""
    if isinstance(data, ParquetSets):
        facts: list[Any] = [data.set_column, data.columns, *map(_file_facts, data.files)]
    else:
        facts = [[s.id, _file_facts(s.path) if hasattr(s, "path") else len(s)] for s in data]
    return hashlib.blake2b(json.dumps(facts).encode(), digest_size=16).hexdigest()


def _file_facts(path: Path) -> list[Any]:
    if not path.exists():
        return [str(path.resolve())]
    return [str(path.resolve()), path.stat().st_size, path.stat().st_mtime_ns]


def _work_through_files(
    encoder: SetEncoder,
    data: SetDataset,
    journal: Journal,
    chunk_size: int,
    progress: Progress | None = None,
    on_bad: Callable[[str], None] | None = None,
) -> None:
    elements = 0
    start = journal.position
    for number, source in enumerate(data):
        if number < start:
            continue
        state: State | None = encoder.empty(1)
        try:
            for chunk in source.chunks(chunk_size):
                assert state is not None
                with torch.no_grad():
                    state = encoder.update(state, chunk.unsqueeze(0).to(state.device))
                elements += len(chunk)
                if progress is not None:
                    progress(elements, number)
        except (DataError, NonFiniteError, ShapeError) as error:
            message = str(error) if isinstance(error, DataError) else f"{source.id}: {error}"
            if on_bad is None:
                raise DataError(message) from error
            on_bad(message)
            state = None
        finally:
            source.close()
        journal.commit({} if state is None else {source.id: state}, number + 1)
        if progress is not None:
            progress(elements, number + 1)


def _work_through_table(
    encoder: SetEncoder, data: ParquetSets, journal: Journal, chunk_size: int, progress: Progress | None = None
) -> None:
    changed: dict[str, State] = {}  # since the last commit
    done = committed = start = journal.position
    for ids, features in data.stream(start):
        add_rows(encoder, ids, features, chunk_size, changed, journal.state)
        done += len(ids)
        if done - committed >= COMMIT_ROWS or len(changed) >= COMMIT_SETS:
            journal.commit(changed, done)
            changed, committed = {}, done
        if progress is not None:
            progress(done - start, done)
    journal.commit(changed, done)


def _with_earlier(journal: Journal, encoder: SetEncoder, update: str | Path | None) -> Iterator[tuple[str, State]]:
    """The journal's states, each added to what an earlier store knows of its set; then the sets that nothing was added to."""
    if update is None:
        yield from journal.states()
        return
    with StateStore(update, encoder) as earlier:
        seen = set()
        for name, state in journal.states():
            seen.add(name)
            yield name, earlier.get(name) + state.to(encoder.home() or "cpu") if name in earlier else state
        for name in earlier.ids():
            if name not in seen:
                yield name, earlier.get(name)


def _write_store(model: SetModel | SetEncoder, states: Iterator[tuple[str, State]], path: Path) -> None:
    hidden = path.with_name(f".{path.name}.writing")
    for file in (hidden, *hidden.parent.glob(f"{hidden.name}-*")):
        file.unlink(missing_ok=True)
    with StateStore(hidden, model) as store:
        store.fill(states)
    hidden.replace(path)


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
    model: SetModel | SetEncoder, states: Iterator[tuple[str, State]], out: Path, what: str, batch: int = 256
) -> int:
    """Finalise states and write their rows, some at a time."""
    encoder = model.encoder if isinstance(model, SetModel) else model
    predict = isinstance(model, SetModel) and what != "representations"
    hidden = out.with_name(f".{out.name}.writing")
    writer = (_ParquetRows if out.suffix == ".parquet" else _H5Rows)(hidden)
    total = 0
    home = encoder.home() or torch.device("cpu")
    for names, group in _batches(states, batch):
        whole = State.cat(group).to(home)
        z = encoder.finalize(whole)
        columns: dict[str, np.ndarray] = {"count": whole.count.cpu().numpy()}
        if what != "predictions":
            columns["z"] = as_rows(z).float().cpu().numpy()
        if predict:
            assert isinstance(model, SetModel)
            columns["y"] = as_rows(model.head(z)).float().cpu().numpy()
        writer.write(names, columns)
        total += len(names)
    writer.close()
    flush(hidden)
    hidden.replace(out)
    return total


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
