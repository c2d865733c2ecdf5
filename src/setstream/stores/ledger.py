"""What makes a repeated delivery count once: keys of changes, and positions of consumers, in the transaction of the change.

    keys       (id, key)            -> digest, count    a change with a known key is not made: it gets its first answer
    cursors    (source, partition)  -> position         moved together with what a consumer read up to there

A change and its key are committed together, or neither is. So a client that got no answer repeats its request with the same
key, and a consumer that was killed goes on from the position that it finds.
"""

import json
import time as clock
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple, TypeAlias

from setstream.errors import ConfigurationError, CursorError, KeyReusedError, SetstreamError
from setstream.stores import checks
from setstream.stores.backend import Rows, Transaction
from setstream.stores.checks import Change, Changed

#: Where a consumer goes on in a partition of its source: an offset, or an id as text.
Position: TypeAlias = int | str
Results: TypeAlias = list[Changed | SetstreamError]
# Keys that are deleted in one transaction.
PAGE = 1000
KEY_LENGTH = 255


class Cursor(NamedTuple):
    """The position after a batch of changes, and the one that it was read from. A triple without `after` is checked less.

    Args:
        source: What is read, such as the name of a topic.
        partition: Which part of it.
        offset: The position after the batch: where to go on.
        after: The position that the store must have before; None: none yet. If another consumer has moved on, it is an error.
    """

    source: str
    partition: str
    offset: Position
    after: Position | None


def lock_of(cursor: Cursor | tuple[str, str, Position] | None) -> set[str]:
    """What writers of a position lock, beside the ids of sets."""
    return set() if cursor is None else {f"cursor {json.dumps(cursor[:2])}"}


def read_positions(rows: Rows, source: str) -> dict[str, Position]:
    """The committed positions of the consumers of a source, by partition."""
    found = rows.query(f"SELECT part, position FROM {rows.cursors} WHERE source = %s", source)
    return {part: json.loads(position) for part, position in found}


def move(transaction: Transaction, cursor: Cursor | tuple[str, str, Position]) -> None:
    """Move a consumer's position; CursorError unless it is where the consumer believes, or before the new one."""
    table, names, offset = transaction.rows.cursors, [*cursor[:2]], cursor[2]
    select = f"SELECT position FROM {table} WHERE source = %s AND part = %s"
    found = transaction.execute(select, names).fetchall()
    position = json.loads(found[0][0]) if found else None
    if isinstance(cursor, Cursor):
        stale, read = position != cursor.after, f"were read from {cursor.after!r}"
    else:
        back = isinstance(position, int) and isinstance(offset, int) and offset < position
        stale, read = position is not None and (back or position == offset), f"end at {offset!r}"
    if stale:
        raise CursorError(
            f"{names[0]}, partition {names[1]!r}: the store is at {position!r}, but these changes {read}: they were applied "
            "before, or another consumer reads this partition. Go on from store.position(source, partition)"
        )
    transaction.put(table, "source, part, position", "source, part", [(*names, json.dumps(offset))])


class Replays:
    """Which changes of a batch have a key that is known, or that an earlier change of the batch has."""

    def __init__(self, transaction: Transaction, changes: Sequence[Change]) -> None:
        self.changes = changes
        keys = {
            (change.id, checked_key(change.key))
            for change in changes
            if change.key is not None and isinstance(change.id, str) and checks.is_text(change.id)
        }
        self._known = transaction.read_keys(sorted(keys)) if keys else {}
        #: The changes to make.
        self.fresh: list[Change] = []
        self._places: list[tuple[int, bool]] = []  # for each change: its place among the fresh ones, and if it is a repetition
        first: dict[tuple[str, str | None], int] = {}
        for change in changes:
            pair, place = (change.id, change.key), len(self.fresh)
            if change.key is not None:
                place = -1 if pair in self._known else first.setdefault(pair, place)
            self._places.append((place, place != len(self.fresh)))
            if place == len(self.fresh):
                self.fresh.append(change)

    def results(self, fresh: Results) -> Results:
        """The results of all changes, from those of the fresh ones."""
        return [self._result(change, *place, fresh) for change, place in zip(self.changes, self._places, strict=True)]

    def _result(self, change: Change, place: int, repeated: bool, fresh: Results) -> Changed | SetstreamError:
        if not repeated:
            return fresh[place]
        if place < 0:
            digest, count = self._known[change.id, str(change.key)]
            result: Changed | SetstreamError = Changed(count, False, replayed=True)
        else:
            digest, result = self.fresh[place].digest, fresh[place]
        if digest != change.digest:
            message = f"the key {change.key!r} of set {change.id!r} belongs to a change with other contents: use a new key"
            return KeyReusedError(message)
        return result if isinstance(result, SetstreamError) else replace(result, began=False, replayed=True)


def record(transaction: Transaction, changes: Iterable[tuple[Change, Changed | SetstreamError]]) -> None:
    """Keep the keys of the changes that were made."""
    now = int(clock.time())
    made = [(change, result) for change, result in changes if change.key is not None and isinstance(result, Changed)]
    if made:
        transaction.write_keys((change.id, str(change.key), change.digest, result.count, now) for change, result in made)


def expire_keys(rows: Rows, before: float) -> None:
    """Delete the keys of changes that were made before a time, some at a time."""
    some = f"SELECT id, key FROM {rows.keys} WHERE time < %s LIMIT {PAGE}"
    deleted = PAGE
    while deleted == PAGE:
        with rows.transaction([]) as transaction:
            deleted = transaction.execute(f"DELETE FROM {rows.keys} WHERE (id, key) IN ({some})", [int(before)]).rowcount


def checked_key(key: object) -> str:
    """A key: text that a database can hold."""
    if not isinstance(key, str) or not 0 < len(key) <= KEY_LENGTH or not checks.is_text(key) or "\0" in key:
        raise ConfigurationError(f"a key is a str of 1 to {KEY_LENGTH} characters, such as str(uuid.uuid4()); got {key!r}")
    return key
