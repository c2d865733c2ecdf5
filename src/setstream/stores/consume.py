"""A consumer: events from a source into a store, each once.

    read some events  ->  encode those of one set and tile together  ->  one transaction: states and position  ->  acknowledge

While a batch is encoded and committed, nothing is read: a slow store holds the source back, and what arrives meanwhile shares
the next commit. The position in the source is committed with the states, so a consumer that was killed goes on after what it
brought, and what is delivered again is left out. Events that cannot be read go to a file of dead letters, which is on the disk
before the position passes them.
"""

import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

import torch

from setstream.errors import ConfigurationError, DataError, SetstreamError
from setstream.states.state import State
from setstream.stores.encoding import encode_all
from setstream.stores.events import Event, Fields
from setstream.stores.ledger import Position, Results
from setstream.stores.store import Change, Cursor, StateStore


class Message(NamedTuple):
    """A line of JSON, and its position in the source."""

    position: Position | None
    line: bytes | str


class Source(Protocol):
    """One partition of a stream of events: what a consumer needs of it. `name` None: it has no positions."""

    @property
    def name(self) -> str | None: ...

    @property
    def partition(self) -> str: ...

    def start(self, positions: dict[str, Position]) -> None:
        """Go on after `positions[self.partition]`; without it, begin. CursorError if that position no longer exists."""

    def read(self, most: int, wait: float) -> Sequence[Message] | None:
        """The next messages, about `most`; none if there are none within so many seconds; None at the end of the source."""

    def committed(self, position: Position) -> None:
        """What was read is in the store, up to this position."""

    def lag(self) -> int | None:
        """How many messages wait in the source, if that is known."""


class _RefusedError(Exception):
    """Messages that were encoded together were refused: which of them is not known."""

    def __init__(self, places: set[int]) -> None:
        self.places = places


class Consumer:
    """Brings the events of a source into a store.

    Args:
        store: The store.
        source: The source; `setstream.stores.sources` has some.
        fields: The names of an event's fields.
        batch: Messages per transaction, about.
        wait: Seconds to wait for messages.
        dead_letters: A file to which lines of JSON are added about messages that cannot be read or are refused. None: they
            are an error.
    """

    def __init__(
        self,
        store: StateStore,
        source: Source,
        *,
        fields: Fields | None = None,
        batch: int = 5000,
        wait: float = 1.0,
        dead_letters: str | Path | None = None,
    ) -> None:
        if batch < 1:
            raise ConfigurationError(f"batch is a positive number of messages; got {batch}")
        self.store, self.source, self.fields, self.batch, self.wait = store, source, fields or Fields(), batch, wait
        self.dead_letters = dead_letters
        if self.fields.time is not None and store.tiles is None:
            raise ConfigurationError(f"a field of times, {self.fields.time!r}, is for a store with tiles: open it with tile=")
        #: Messages and elements that were committed, and messages that became dead letters.
        self.messages = self.elements = self.dead = 0
        positions = {} if source.name is None else store.positions(source.name)
        #: The committed position.
        self.position = positions.get(source.partition)
        source.start(positions)

    def run(self, stop: Callable[[], bool] = lambda: False) -> None:
        """Consume until the source ends or `stop()`: then what was read is committed."""
        while not stop() and self.step():
            pass

    def step(self) -> bool:
        """Read some messages and commit them; returns whether the source goes on."""
        messages = self.source.read(self.batch, self.wait)
        if messages:
            self._commit(messages)
        return messages is not None

    def _commit(self, messages: Sequence[Message]) -> None:
        events: dict[int, tuple[Event, int | None]] = {}
        problems: dict[int, SetstreamError] = {}
        tiles = self.store.tiles
        for place, message in enumerate(messages):
            if message.line.strip():
                try:
                    event = self.fields.parse(message.line)
                    events[place] = event, tiles.tiling.number(event.time) if tiles else None
                except SetstreamError as error:
                    problems[place] = error
        alone: set[int] = set()
        while True:
            try:
                problems |= self._apply(messages, events, problems, alone)
                break
            except _RefusedError as refused:
                alone |= refused.places
        self.messages += len(messages)
        self.dead += len(problems)
        self.elements += sum(len(event.elements) for place, (event, _) in events.items() if place not in problems)
        if (last := messages[-1].position) is not None:
            self.position = last
            self.source.committed(last)

    def _apply(
        self,
        messages: Sequence[Message],
        events: Mapping[int, tuple[Event, int | None]],
        unread: Mapping[int, SetstreamError],
        alone: set[int],
    ) -> dict[int, SetstreamError]:
        """Commit events, those of one set and tile together unless they are in `alone`; returns those that were refused."""
        groups: dict[object, list[int]] = {}
        for place, ((id, elements, _), tile) in events.items():
            key = id, tile, elements.dtype, elements.shape[1:], place if place in alone else None
            groups.setdefault(key, []).append(place)
        together = [torch.cat([events[place][0].elements for place in places]) for places in groups.values()]
        errors: list[tuple[list[int], SetstreamError]] = []
        changes: list[tuple[list[int], Change]] = []
        for places, part in zip(groups.values(), encode_all(self.store, together), strict=True):
            if isinstance(part, State):
                event, tile = events[places[0]]
                changes.append((places, Change(event.id, part, tiles=None if tile is None else {tile: part})))
            elif isinstance(part, SetstreamError):
                errors.append((places, part))

        def write_letters(results: Results) -> None:
            refused = [
                (places, one) for (places, _), one in zip(changes, results, strict=True) if isinstance(one, SetstreamError)
            ]
            refused += errors
            if several := {place for places, _ in refused if len(places) > 1 for place in places}:
                raise _RefusedError(several)
            errors[:] = refused
            self._write_letters(messages, {**unread, **{places[0]: error for places, error in refused}})

        last, cursor = messages[-1].position, None
        if self.source.name is not None and last is not None:
            cursor = Cursor(self.source.name, self.source.partition, last, self.position)
        self.store.apply([change for _, change in changes], cursor=cursor, before_commit=write_letters)
        return {places[0]: error for places, error in errors}

    def _write_letters(self, messages: Sequence[Message], problems: Mapping[int, SetstreamError]) -> None:
        """Add messages to the dead letters, on the disk."""
        if not problems:
            return
        letters = []
        for place, error in sorted(problems.items()):
            position, line = messages[place]
            if self.dead_letters is None:
                where = "a message" if position is None else f"the message at {position!r} of {self.source.name!r}"
                raise DataError(f"{where} cannot be added: {error}. Give a file of dead letters to go on without such messages")
            text = line if isinstance(line, str) else line.decode("utf-8", "backslashreplace")
            letter = {"source": self.source.name, "partition": self.source.partition, "position": position}
            letters.append(json.dumps(letter | {"problem": str(error), "line": text}) + "\n")
        with Path(self.dead_letters or "").open("ab+") as file:
            if file.tell():  # the last line is incomplete if a consumer was killed while it wrote
                file.seek(-1, os.SEEK_END)
                letters[:0] = [] if file.read(1) == b"\n" else ["\n"]
            file.write("".join(letters).encode())
            file.flush()
            os.fsync(file.fileno())
