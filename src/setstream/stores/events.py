"""Events in lines of JSON: elements of one set, and when they happened.

{"id": "customer-7", "element": [0.1, 0.2]}
{"id": "customer-7", "elements": [[0.1, 0.2], [0.3, 0.4]], "time": 1700000000}
{"user": 7, "amount": 0.1, "hour": 0.2, "at": 1700000000}        Fields("user", ("amount", "hour"), "at")
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from setstream.errors import DataError
from setstream.stores.checks import checked_id

MOST_AXES = 8


class Event(NamedTuple):
    """Elements (n, ...) of a set, and their time in seconds since 1970; None: it is not known."""

    id: str
    elements: Tensor
    time: float | None


@dataclass(frozen=True)
class Fields:
    """The names of an event's fields.

    Args:
        id: The set, text or an integer.
        columns: The fields that hold the numbers of one element; none: "element" holds one, or "elements" holds a list of them.
        time: The time, in seconds since 1970; None: "time", which may be missing.
        others: Whether there may be other fields.
    """

    id: str = "id"
    columns: tuple[str, ...] = ()
    time: str | None = None
    others: bool = True

    def parse(self, line: bytes | str) -> Event:
        """The event in a line; DataError says what is wrong with it."""
        try:
            event = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise DataError(f"the line is not valid JSON: {error}") from None
        if not isinstance(event, dict):
            raise DataError(f"an event is an object with {self.id!r} and elements; got a {type(event).__name__}")
        if not self.others and (unknown := event.keys() - {self.id, "element", "elements", "time"}):
            raise DataError(f'an event has "id", "element" or "elements", and "time"; got {min(unknown)!r}')
        id = event.get(self.id)
        id = str(id) if type(id) is int else id
        if not isinstance(id, str):
            raise DataError(f"the field {self.id!r} must be text, the id of a set; got {id!r}")
        time = event.get("time") if self.time is None else event.get(self.time, math.nan)
        if time is not None and (type(time) not in (int, float) or not -(2**53) < time < 2**53):
            raise DataError(f"the time must be a number, seconds since 1970; got {time!r}")
        return Event(checked_id(id), self._elements(event), time)

    def _elements(self, event: Mapping[str, Any]) -> Tensor:
        names = [*self.columns] or [name for name in ("element", "elements") if name in event]
        if missing := [name for name in names if name not in event]:
            raise DataError(f"the event has no field {missing[0]!r}")
        if not self.columns and len(names) != 1:
            raise DataError('an event has either "element", one, or "elements", a list of them')
        try:
            array = np.asarray([event[name] for name in names])
        except (ValueError, OverflowError) as error:
            raise DataError(f"elements must be lists of numbers, all of one shape: {error}") from None
        array = array[None] if self.columns else array[0] if names == ["elements"] else array
        if not 0 < array.ndim <= MOST_AXES or (array.size and array.dtype.kind not in "fi"):
            raise DataError(f"elements must be lists of numbers, at most {MOST_AXES} deep; got {str(event[names[0]])[:50]}")
        return torch.from_numpy(array if array.size else array.astype(np.float32))
