"""Bulk encoding: from a model and many sets to one row per set.

    rows: id, count, z (representation), y (prediction)                  Parquet or HDF5
    states, if requested: a StateStore, to which later elements are added without reading the earlier ones again

Work in progress is in a journal beside the output (SQLite). A set's state, or those that some rows of a table changed, are
committed together with the position: whenever the process is killed, the next run continues with no row missing and none
doubled. The output is written at the end, under another name, and renamed.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from setstream._utils.atomic import whole_or_nothing
from setstream._utils.optional import need
from setstream._utils.prefetch import decoded_ahead
from setstream.bulk import EncodeOptions, Progress
from setstream.bulk.journal import Journal, identity
from setstream.bulk.output import WRITERS, as_rows, write_rows
from setstream.bulk.partial import PartialStates
from setstream.bulk.ray import encode_on_ray
from setstream.data.collection import SetCollection
from setstream.errors import ConfigurationError
from setstream.models.encoder import SetEncoder
from setstream.models.model import SetModel
from setstream.states.state import State
from setstream.stores.store import StateStore

__all__ = ["EncodeOptions", "Journal", "as_rows", "encode_sets", "identity", "write_rows"]

# Work is committed after this many rows, when this many sets have changed, or when a set is complete.
COMMIT_ROWS, COMMIT_SETS = 2**20, 2**12


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
    _check(model, encoder, out, options)
    out.parent.mkdir(parents=True, exist_ok=True)
    path = out.with_name(f".{out.name}.journal")
    if options.states is not None and Path(options.states).exists() and not path.exists():
        raise ConfigurationError(f"{options.states} already exists: name a new file for the states")
    fingerprint, update = encoder.empty(1).fingerprint, str(options.update or "")
    run = {"encoder": fingerprint, "data": identity(data), "engine": options.engine, "update": update}
    journal = Journal(path, run, on_bad)
    engine = encode_on_ray if options.engine == "ray" else encode_locally
    engine(encoder, data, journal, options, progress or (lambda *done: None))
    rows = write_rows(model, _with_earlier(journal, encoder, options.update), out, options, journal.skip)
    if options.states is not None:
        whole = _with_earlier(journal, encoder, options.update)
        with whole_or_nothing(Path(options.states)) as hidden, StateStore(hidden, model) as store:
            store.fill(((name, state) for name, state in whole if name not in journal.skipped), journal.skip)
    journal.delete()
    return rows


def _check(model: SetModel | SetEncoder, encoder: SetEncoder, out: Path, options: EncodeOptions) -> None:
    if out.suffix not in WRITERS:
        raise ConfigurationError(f"the output must be a {' or '.join(WRITERS)} file; got {out.name!r}")
    if encoder.training:
        raise ConfigurationError("a model in training mode draws its slots anew for every set: call model.eval() first")
    if options.what == "predictions" and not isinstance(model, SetModel):
        raise ConfigurationError("an encoder alone makes no predictions: choose what='representations'")
    if options.engine == "ray" and encoder.pool.refuse_chunks(options.chunks):
        raise encoder.pool.inconsistent()  # any worker may get any part of a set
    need("pyarrow" if out.suffix == ".parquet" else "h5py")


def encode_locally(encoder: SetEncoder, data: SetCollection, journal: Journal, options: EncodeOptions, show: Progress) -> None:
    """Add all elements after the journal's position to the states in the journal."""
    partial = PartialStates(encoder, options.chunk_size, journal.skip, options.chunks, journal.state)
    elements = uncommitted = 0
    done = journal.position
    for block in data.blocks(done, options.chunk_size, decoded_ahead(partial.device), journal.skip):
        partial.add(block)
        elements, uncommitted = elements + len(block.ids), uncommitted + len(block.ids)
        if block.position is not None:
            done = block.position
            if block.final or uncommitted >= COMMIT_ROWS or len(partial.states) >= COMMIT_SETS:
                journal.commit(partial.states.items(), done)
                partial.states.clear()
                uncommitted = 0
        show(elements, done)
    journal.commit(partial.states.items(), done)


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
