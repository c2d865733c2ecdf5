"""Events of many sets in one request: a line of JSON for each, {"id": "a", "element": [0.1, 0.2], "time": 1700000000}.

All lines are read before anything is added. Elements of one set and tile are one change; changes of a request need not share a
commit. With a key each change is made once, so that a repetition of the request makes those that are missing.
"""

import asyncio
import hashlib
from itertools import islice

import torch
from pydantic import TypeAdapter

from setstream.errors import DataError, SetstreamError
from setstream.serve.answers import Appended, SetId, TooManyElements, message_of
from setstream.serve.service import SMALL, Service
from setstream.serve.writer import ROUND_CHANGES, Request
from setstream.stores.events import Event, Fields
from setstream.stores.store import Changed

NDJSON = "application/x-ndjson"
# Bytes of a line: while one is parsed, no other thread runs.
MOST_LINE = 2**16
FIELDS, VALID_ID = Fields(others=False), TypeAdapter(SetId).validator


def parse_events(body: bytes, most: int) -> dict[int, Event]:
    """The events in a body by the number of their line, with at most `most` elements; DataError names a bad line."""
    events, count = {}, 0
    for number, line in enumerate(body.split(b"\n"), 1):
        if not line.strip():
            continue
        try:
            if len(line) > MOST_LINE:
                raise TooManyElements(f"it has {len(line)} bytes; at most {MOST_LINE} are allowed")
            event = FIELDS.parse(line)
            if not VALID_ID.isinstance_python(event.id):
                raise DataError(f"{event.id[:200]!r} is not a valid id")
        except SetstreamError as error:
            raise type(error)(f"line {number}: {message_of(error)}. Nothing was added") from None
        count += len(event.elements)
        if count > most:
            raise TooManyElements(f"a request has at most {most} elements; this one has {count} or more")
        events[number] = event
    return events


async def append_events(service: Service, body: bytes, key: str | None) -> tuple[Appended, bool]:
    """Add the events in a body; returns the answer, and whether all of it had been added before."""
    most = service.options.max_elements
    small = len(body) <= SMALL
    events = parse_events(body, most) if small else await service.run_in_reader(parse_events, body, most)
    digest = hashlib.blake2b(body, digest_size=16).digest()
    groups: dict[tuple[str, object], list[int]] = {}
    for number, event in events.items():
        when = "now" if event.time is None else service.tile(event.time)
        groups.setdefault((event.id, (when, event.elements.dtype, event.elements.shape[1:])), []).append(number)

    async def add(id: str, kind: object, numbers: list[int]) -> Changed | SetstreamError:
        elements = torch.cat([events[number].elements for number in numbers])
        request = Request(id, elements, tile=service.tile(events[numbers[0]].time, now=True))
        own = None if key is None else hashlib.blake2b(repr((key, kind)).encode(), digest_size=16).hexdigest()
        try:
            result = await service.submit(request, own, NDJSON, digest)
        except SetstreamError as error:
            return error
        service.metrics.elements.inc(0 if result.replayed else len(elements))
        return result

    results: list[Changed | SetstreamError] = []
    rest = iter(groups.items())
    while some := list(islice(rest, ROUND_CHANGES)):  # other requests come in between
        results += await asyncio.gather(*[add(id, kind, numbers) for (id, kind), numbers in some])
    for ((id, _), numbers), result in zip(groups.items(), results, strict=True):
        if isinstance(result, SetstreamError):
            made = sum(len(lines) for lines, one in zip(groups.values(), results, strict=True) if isinstance(one, Changed))
            where = f"line {numbers[0]}{f' and {len(numbers) - 1} more' if len(numbers) > 1 else ''} (set {id!r})"
            raise type(result)(f"{where}: {message_of(result)}. Of {len(events)} events, {made} were added")
    answer = Appended(events=len(events), sets=len({id for id, _ in groups}))
    return answer, bool(results) and all(isinstance(one, Changed) and one.replayed for one in results)
