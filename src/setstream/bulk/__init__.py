"""Encoding many sets from files and tables, resumable: on this machine, or on Ray.

encode.py      encode_sets(model, data, out, EncodeOptions(...)): the passes over the data, and from states to rows
partial.py     from blocks of elements to the states of their sets, merged many at a time
journal.py     what is done so far: with it, a stopped run goes on
ray.py         the engine `ray`
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from setstream.errors import ConfigurationError

WHAT = ("representations", "predictions", "both")
ENGINES = ("local", "ray")

Progress = Callable[[int, int], None]  # called with the elements so far, and the sets (of a table: rows) so far


@dataclass(frozen=True)
class EncodeOptions:
    """Options of `encode_sets`.

    Args:
        what: "representations", "predictions" or "both".
        states: Keep the states, too, in a new StateStore of this name.
        tile: Keep the states by tiles of so many seconds, too. The data is a table with a `time_column`.
        update: Begin with the states of this store, which is only read. The data are new elements of known or new sets.
        chunk_size: Elements that are encoded at a time.
        engine: "local", or "ray" for a Ray cluster.
        ray_address: An existing Ray cluster; a local one unless given.
        workers: Ray workers; one less than the cluster has CPUs unless given.
        chunks: "average" lets a model that is not consistent read a set in several chunks, which otherwise is a
            ConsistencyError.
    """

    what: str = "both"
    states: str | Path | None = None
    tile: float | None = None
    update: str | Path | None = None
    chunk_size: int = 4096
    engine: str = "local"
    ray_address: str | None = None
    workers: int | None = None
    chunks: str | None = None

    def __post_init__(self) -> None:
        for name, value, choices in (("what", self.what, WHAT), ("engine", self.engine, ENGINES)):
            if value not in choices:
                raise ConfigurationError(f"unknown {name} {value!r}: choose one of {', '.join(choices)}")
        if self.chunk_size < 1:
            raise ConfigurationError(f"chunk_size must be at least 1; got {self.chunk_size}")
        if self.tile is not None and (self.states is None or self.update is not None):
            raise ConfigurationError("tile= is for a new store: name it with states=, and leave update= out")
        if self.update is not None and not Path(self.update).is_file():
            raise ConfigurationError(f"there is no store of earlier states {self.update}")
