"""Many changes that are made in one transaction.

    state[id] <- state[id] + part        in the order of the changes; sums of different sets are made together

A change that fails does not affect the others. A part that the model cannot read, alone or in its set, fails: it is found by
running the head on everything that would be written, and everything is summed again without it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from math import inf
from typing import TYPE_CHECKING

from setstream.errors import ConfigurationError, SetstreamError, StoreFullError
from setstream.states.state import MOST_ELEMENTS, State
from setstream.stores import checks
from setstream.stores.checks import Change, Changed

if TYPE_CHECKING:
    from setstream.stores.store import StateStore

Results = list[Changed | SetstreamError]


class Batch:
    """The effect of changes on sets whose rows were read: nothing is written.

    Args:
        store: The store, for its encoder, its head and its cache.
        changes: The changes, in their order.
        stored: The bytes of the sets that exist, by id.
        room: How many sets may be created.
        refused: Errors of parts that must not be added, by `id(part)`.
    """

    def __init__(
        self,
        store: StateStore,
        changes: Sequence[Change],
        stored: Mapping[str, bytes],
        room: int | None = None,
        refused: Mapping[int, SetstreamError] | None = None,
    ) -> None:
        self.store, self.changes, self.stored, self.room = store, changes, stored, inf if room is None else room
        self.known = store.known(stored)
        #: The result of each change, the new states by id, and the parts in them.
        self.results: Results
        self.states: dict[str, State]
        self.parts: list[State]
        refused, suspects = dict(refused or {}), set[str]()
        while True:
            self.results, self.states, self.parts = self._sum(refused, suspects)
            bad = checks.unreadable(store.finalize, [*self.parts, *self.states.values()])
            bad_parts = {id(change.part): bad[id(change.part)] for change in changes if id(change.part) in bad}
            bad_sets = {name for name, state in self.states.items() if id(state) in bad} - suspects
            if not bad_parts and not bad_sets:
                break
            refused, suspects = refused | bad_parts, suspects | bad_sets

    def _sum(
        self, refused: Mapping[int, SetstreamError], suspects: Collection[str]
    ) -> tuple[Results, dict[str, State], list[State]]:
        """All changes, but for parts in `refused`; the sets in `suspects` are checked after each change."""
        store, stored, room = self.store, self.stored, self.room
        results: dict[int, Changed | SetstreamError] = {}
        states: dict[str, State] = {}
        parts: dict[int, State] = {}
        waiting: dict[str, tuple[int, State, State]] = {}  # sums of different sets are made together
        origin = store.encoder.origin  # computed once for all parts that were just made with these weights

        def add_waiting() -> None:
            wholes = checks.sums([(before, part) for _, before, part in waiting.values()])
            for (name, (place, *_)), whole in zip(waiting.items(), wholes, strict=True):
                if isinstance(whole, State):
                    states[name] = whole
                else:
                    results[place] = whole
                    del parts[place]
            waiting.clear()

        def state_of(name: str) -> State | None:
            if name in states or name not in stored:
                return states.get(name)
            return self.known.get(name) or store.parsed(name, stored[name])  # which raises the error for a damaged one

        for place, change in enumerate(self.changes):
            try:
                if id(change.part) in refused:
                    raise refused[id(change.part)]
                name = checks.checked_id(change.id)
                if name in waiting or (isinstance(change.part, str) and change.part in waiting):
                    add_waiting()
                began = name not in stored and name not in states
                if began and room < 1:
                    raise StoreFullError(f"{store.rows.place}: no more sets can be created; delete some")
                if change.part == name:
                    raise ConfigurationError(f"a set cannot be merged into itself: {name!r} would count every element twice")
                part = change.part if isinstance(change.part, State) else state_of(checks.checked_id(change.part))
                if part is None:
                    raise store.unknown(str(change.part))
                if part.origin is not origin or len(part) != 1:
                    store.check(part)
                before = None if change.replace else state_of(name)
                count, seen = int(part.count), 0 if before is None else int(before.count)
                if seen and count and store.one_chunk:
                    raise store.encoder.pool.inconsistent()
                count += seen
                if count > MOST_ELEMENTS:
                    raise ConfigurationError(f"a set can count {MOST_ELEMENTS} elements; {name!r} would have {count}")
                if before is not None and name not in suspects:
                    waiting[name] = place, before, part
                else:
                    whole = part if before is None else before + part
                    if name in suspects:
                        checks.must_be_readable(store.finalize, [whole])
                    states[name] = whole
                results[place], parts[place] = Changed(count, began), part
                room -= began
            except SetstreamError as error:
                results[place] = error
        add_waiting()
        return [results[place] for place in range(len(self.changes))], states, list(parts.values())
