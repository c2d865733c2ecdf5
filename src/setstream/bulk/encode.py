"""Bulk encoding: a model and many sets in; a row for each set out.

    rows: id, count, z (representation), y (prediction)                  Parquet or HDF5
    states, if asked for: a StateStore, to which tomorrow's elements are added without reading today's again

Work in progress lies in a journal beside the output (SQLite). A set's state, or those that a table's row groups changed, are
committed together with the position: whenever the process is killed, the next run goes on with neither a row missing nor one
doubled. The output itself is written at the end, aside, and renamed.
"""

from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from setstream._utils.atomic import whole_or_nothing
from setstream._utils.optional import need
from setstream._utils.prefetch import decoded_ahead
from setstream.bulk.journal import Journal, Skips, identity
from setstream.bulk.output import OUTPUTS, as_rows, write_rows
from setstream.bulk.partial import BAD, Progress, add_good_rows, described
from setstream.data.dataset import SetDataset
from setstream.data.parquet import ParquetSets
from setstream.errors import ConfigurationError
from setstream.models.encoder import SetEncoder
from setstream.models.model import SetModel
from setstream.states.state import State
from setstream.stores.store import StateStore

__all__ = ["Journal", "as_rows", "encode_sets", "identity", "write_rows"]

WHAT = ("representations", "predictions", "both")
# Work on a table is committed after so many rows, or when so many sets have changed.
COMMIT_ROWS, COMMIT_SETS = 2**20, 2**12


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
    chunks: str | None = None,
) -> int:
    """Encode all sets and write a row for each; gives the number of rows.

    states:  keep the states too, in a StateStore of this name.
    update:  begin with the states of this store, which is only read: `data` then holds new elements of known or new sets.
    engine:  local, or ray (see `bulk/ray.py`).
    chunks:  "average" lets a model that is not consistent take a set in several chunks; otherwise a ConsistencyError.
    on_bad:  called with what is wrong with a set that cannot be read or encoded; it is left out, of an update its new elements.
             A run that goes on tells what was left out before, too. Without on_bad, such sets are an error.
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
    skips = Skips(journal, on_bad)
    if engine == "ray":
        if encoder.pool.refuse_chunks(chunks):
            raise encoder.pool.inconsistent()  # any worker may get any part of a set
        from setstream.bulk.ray import work_on_ray

        work_on_ray(encoder, data, skips, chunk_size, ray_address, workers, progress)
    elif isinstance(data, ParquetSets):
        _work_through_table(encoder, data, skips, chunk_size, progress, chunks)
    else:
        _work_through_files(encoder, data, skips, chunk_size, progress, chunks)
    whole = _with_earlier(journal, encoder, update)
    rows = write_rows(model, whole, out, what, skips, chunks)
    if states is not None:
        whole = _with_earlier(journal, encoder, update)
        _write_store(model, ((name, state) for name, state in whole if name not in skips.known), Path(states), skips)
    journal.close()
    for file in (place, *place.parent.glob(f"{place.name}-*")):
        file.unlink(missing_ok=True)
    return rows


def _work_through_files(
    encoder: SetEncoder,
    data: SetDataset,
    skips: Skips,
    chunk_size: int,
    progress: Progress | None = None,
    chunks: str | None = None,
) -> None:
    elements = 0
    start = skips.journal.position
    for number, source in enumerate(data):
        if number < start:
            continue
        states: list[tuple[str, State]] = []
        try:
            state = encoder.empty(1)
            for chunk in source.chunks(chunk_size):
                with torch.no_grad():
                    state = encoder.update(state, chunk.unsqueeze(0).to(state.device), chunks=chunks)
                elements += len(chunk)
                if progress is not None:
                    progress(elements, number)
            states = [(source.id, state)]
        except BAD as error:
            skips(source.id, described(source, error))
        finally:
            source.close()
        skips.commit(states, number + 1)
        if progress is not None:
            progress(elements, number + 1)


def _work_through_table(
    encoder: SetEncoder,
    data: ParquetSets,
    skips: Skips,
    chunk_size: int,
    progress: Progress | None = None,
    chunks: str | None = None,
) -> None:
    changed: dict[str, State] = {}  # since the last commit
    done = committed = start = skips.journal.position
    ahead = decoded_ahead(encoder.device or torch.device("cpu"))
    for ids, features in data.stream(start, ahead, skips.files()):
        add_good_rows(encoder, ids, features, chunk_size, changed, skips, skips.journal.state, chunks)
        done += len(ids)
        if done - committed >= COMMIT_ROWS or len(changed) >= COMMIT_SETS:
            skips.commit(changed.items(), done)
            changed, committed = {}, done
        if progress is not None:
            progress(done - start, done)
    skips.commit(changed.items(), done)


def _with_earlier(journal: Journal, encoder: SetEncoder, update: str | Path | None) -> Iterator[tuple[str, State]]:
    """The journal's states, each added to what an earlier store knows of its set; then the sets that nothing was added to."""
    if update is None:
        yield from journal.states()
        return
    with StateStore(update, encoder) as earlier:
        seen = set()
        for name, state in journal.states():
            seen.add(name)
            yield name, earlier.get(name) + state.to(encoder.device or "cpu") if name in earlier else state
        for name in earlier.ids():
            if name not in seen:
                yield name, earlier.get(name)


def _write_store(model: SetModel | SetEncoder, states: Iterator[tuple[str, State]], path: Path, skips: Skips) -> None:
    with whole_or_nothing(path) as hidden, StateStore(hidden, model) as store:
        store.fill(states, skips)
