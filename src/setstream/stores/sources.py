"""Sources of a consumer: lines of a file or pipe, and Redis Streams.

A Redis Stream with a consumer group gives each entry to one consumer of the group, in the order of the entries' ids. The store
keeps a position for each consumer, by its name. What was delivered to a consumer and is after its position is not in the
store yet, whoever asked for it; so a consumer whose machine is lost is replaced by one of the same name, and if the
first still lives, one of the two is refused by the store (CursorError).
"""

import json
import os
import select
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from setstream._utils.optional import need
from setstream.errors import CursorError, DataError
from setstream.stores.consume import Message
from setstream.stores.ledger import Position

# Bytes of one line, and of one read: what was read is given to the consumer at once, and nothing is left behind at a signal.
MOST_LINE, PIECE = 2**24, 2**16
# Entries that are acknowledged at a time.
PAGE = 1000


class Lines:
    r"""The lines of a file or a pipe.

    Args:
        file: The number of an open file: `sys.stdin.fileno()`.
        name: What the lines are, if the store should remember how many it has: the same input is given again from its
            beginning, and what was consumed is skipped. None: all lines are new.
        partition: Which part of it.
        offsets: Each line begins with its offset and a tab, which is the position instead of the number of the line. The input
            may then begin anywhere up to the position: `kcat -f '%o\t%s\n'`.
    """

    def __init__(self, file: int, name: str | None = None, partition: str = "", offsets: bool = False) -> None:
        self.file, self.name, self.partition, self.offsets = file, name, partition, offsets
        self.skipped = 0  #: Lines that were consumed before.
        self._number, self._rest, self._ended, self._began = 0, b"", False, False
        self._after: int | None = None

    def start(self, positions: dict[str, Position]) -> None:
        position = positions.get(self.partition)
        if isinstance(position, str):
            raise CursorError(f"{self.name}: the store has the position {position!r}, which is not that of a line")
        self._after = position

    def read(self, most: int, wait: float) -> Sequence[Message] | None:
        lines: list[bytes] = []
        while len(lines) < most and not self._ended and select.select([self.file], [], [], 0 if lines else wait)[0]:
            data = os.read(self.file, PIECE)
            *complete, self._rest = (self._rest + data).split(b"\n")
            lines += complete
            self._ended = not data
            if len(self._rest) > MOST_LINE:
                raise DataError(f"a line has at most {MOST_LINE} bytes; line {self._number + len(lines) + 1} has more")
        if self._ended and not lines:
            if not self._rest.strip():
                self._check_end()
                return None
            lines, self._rest = [self._rest], b""
            try:
                json.loads(lines[0].partition(b"\t")[2] if self.offsets else lines[0])
            except ValueError:
                raise DataError(f"the input ends in the middle of a line: {lines[0][-50:]!r}") from None
        return [message for message in map(self._message, lines) if message is not None]

    def _message(self, line: bytes) -> Message | None:
        self._number += 1
        if self.name is None and not self.offsets:
            return Message(None, line)
        number = self._number
        if self.offsets:
            offset, tab, line = line.partition(b"\t")
            if not tab or not offset.isdigit():
                raise DataError(f"line {number} does not begin with an offset and a tab; got {offset[:50]!r}")
            number = int(offset)
            if not self._began and self._after is not None and number > self._after + 1:
                raise CursorError(f"{self.name}: the store is at offset {self._after}, but the input begins at {number}")
            self._began = True
        if self._after is not None and number <= self._after:
            self.skipped += 1
            return None
        self._after = number
        return Message(number, line)

    def _check_end(self) -> None:
        if self.name is not None and not self.offsets and self._number < (self._after or 0):
            raise CursorError(
                f"{self.name}: the store has {self._after} lines of it, but the input has {self._number}: is it another one?"
            )

    def committed(self, position: Position) -> None:
        pass

    def lag(self) -> int | None:
        return None


class RedisStream:
    """A consumer of a group of a Redis Stream (Redis 7 or Valkey). The field `event` of each entry is a line of JSON.

    Args:
        url: redis://host:6379/0
        stream: The key of the stream.
        group: The consumer group. It is created at the stream's beginning if the store has no position of it.
        consumer: The name of this consumer in the group: the same one after a restart, another one for each process.
    """

    def __init__(self, url: str, stream: str, group: str = "setstream", consumer: str = "0") -> None:
        library = need("redis", "redis", "Redis Streams")
        self.stream, self.group, self.partition, self.name = stream, group, consumer, f"redis {stream} {group}"
        try:
            self._redis = library.Redis.from_url(url, protocol=2)
        except ValueError as error:
            raise DataError(f"a Redis URL is redis://host:6379/0; {error}") from None
        self._failure, self._refusal = library.RedisError, library.ResponseError
        self._after: str | None = None
        self._last, self._delivered = "0-0", list[str]()
        self._lag: int | None = None

    def start(self, positions: dict[str, Position]) -> None:
        self._after = None if self.partition not in positions else str(positions[self.partition])
        if not positions:  # otherwise the group must exist: a new one would begin anew
            self._create_group()
        self._look()
        with self._errors():  # committed, and not acknowledged
            while self._after is not None and (done := self._pending("-", self._after, self._redis)):
                self._redis.xack(self.stream, self.group, *[entry["message_id"] for entry in done])

    def read(self, most: int, wait: float) -> Sequence[Message] | None:
        pending, new = self._look()
        if not pending:
            pending, new = self._look(most)
        if not pending and not new and wait:
            with self._errors():
                self._redis.xread({self.stream: self._last}, count=1, block=max(1, int(1000 * wait)))
            pending, new = self._look(most)
        if pending:  # to a consumer of this name that was killed, or lives elsewhere
            with self._errors():
                new = self._redis.xreadgroup(self.group, self.partition, {self.stream: self._after or "0"}, count=most)
        entries = [(_text(id), fields) for _, some in new for id, fields in some]
        if removed := [id for id, fields in entries if not fields]:
            raise CursorError(f"{self.name}: the entry {removed[0]} was removed from the stream before it was in the store")
        self._delivered = [id for id, _ in entries]
        return [Message(id, fields.get(b"event", repr(fields))) for id, fields in entries]

    def committed(self, position: Position) -> None:
        self._after = str(position)
        with self._errors():
            self._redis.xack(self.stream, self.group, *self._delivered)

    def lag(self) -> int | None:
        return self._lag

    def _create_group(self) -> None:
        with self._errors():
            removed = _removed(self._redis.xinfo_stream(self.stream)) if self._redis.exists(self.stream) else 0
            try:
                self._redis.xgroup_create(self.stream, self.group, "0", mkstream=True, entries_read=removed)
            except self._refusal as error:
                if "BUSYGROUP" not in str(error):  # another consumer made it
                    raise

    def _look(self, most: int = 0) -> tuple[Any, Any]:
        """What was delivered to this consumer and is not in the store, and up to `most` new entries, at one moment.

        CursorError if entries were removed from the stream before they were read. It looks once without reading, so that
        nothing has changed then, and the next consumer finds the same.
        """
        with self._errors(), self._redis.pipeline(transaction=True) as commands:
            commands.xinfo_stream(self.stream)
            commands.xinfo_groups(self.stream)
            self._pending(f"({self._after}" if self._after else "-", "+", commands, 1)
            if most:
                commands.xreadgroup(self.group, self.partition, {self.stream: ">"}, count=most)
            stream, groups, pending, *new = commands.execute()
        group = next(one for one in groups if _text(one["name"]) == self.group)
        self._last, read = _text(stream["last-generated-id"]), _text(group["last-delivered-id"])
        if self._after is not None and _order(self._after) > _order(self._last):
            raise CursorError(
                f"{self.name}: the store is at {self._after}, but the stream ends at {self._last}: is it another one?"
            )
        removed, seen = _removed(stream), group["entries-read"]
        if seen is not None and removed > seen:
            raise CursorError(
                f"{self.name}: entries after {read} were removed from the stream before they were read. To go on without them: "
                f"XGROUP SETID {self.stream} {self.group} {read} ENTRIESREAD {removed}"
            )
        new = new[0] if new else []
        self._lag = None if group["lag"] is None else group["lag"] - sum(len(some) for _, some in new)
        return pending, new

    def _pending(self, first: str, last: str, commands: Any, most: int = PAGE) -> Any:
        return commands.xpending_range(self.stream, self.group, first, last, most, self.partition)

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except self._refusal as error:
            hint = f". If it was deleted: XGROUP CREATE {self.stream} {self.group} ID, after which nothing was consumed"
            raise CursorError(f"{self.name}: {error}{hint}") from error
        except self._failure as error:
            raise DataError(f"{self.name}: Redis does not answer: {error}") from error


def _text(value: bytes | str) -> str:
    return value.decode() if isinstance(value, bytes) else value


def _order(id: str) -> tuple[int, int]:
    """What the ids of entries are sorted by."""
    milliseconds, _, number = id.partition("-")
    return int(milliseconds), int(number)


def _removed(stream: Any) -> int:
    """How many entries were removed from a stream."""
    return int(stream["entries-added"]) - int(stream["length"])
