"""The sum of the last n tiles of a window, without subtraction: two stacks, and a Fenwick tree for what comes late.

    tiles      s ........ split ........ head           s = head - n + 1, head is the newest
    front      Σ_{i..split-1} tiles, for each i >= s    made together when s passes the old split, then dropped one by one
    back       Σ_{split..head-1} tiles                  grows by one tile at a time
    total    = front[s] + (back + tiles[head]) + late

Each tile is added once to the front and once to the back, and the total needs one sum more: three merges per tile, for any n.
What comes late for a tile of the front goes to a Fenwick tree over these tiles: log2(n) merges to add it, as many to sum it.
"""

from collections.abc import Mapping

from setstream.states.state import State

NEVER = -(2**60)  # before every tile


class SlidingSum:
    """The sum of the last `length` tiles. Tiles that are missing are empty.

    A tile's state may be replaced by a larger one. `add` must be called then, unless the tile is the newest.
    """

    def __init__(self, length: int) -> None:
        self.length = length
        self._split = NEVER
        self._next = NEVER  # the first tile that is not in the back
        self._front: list[tuple[int, State]] = []  # newest tile first
        self._back: State | None = None
        self._late: dict[int, State] = {}  # by distance from the split
        self._latest: tuple[State, State, State] | None = None  # back, a tile, and their sum

    def add(self, tile: int, part: State) -> None:
        """A part was added to a tile."""
        if tile >= self._next:
            return  # it is read when it is needed
        if tile >= self._split:
            self._back = part if self._back is None else self._back + part
            return
        place = self._split - tile
        while place <= self.length:
            self._late[place] = self._late[place] + part if place in self._late else part
            place += place & -place

    def total(self, tiles: Mapping[int, State], head: int) -> State | None:
        """The sum of the tiles head - length + 1 to head; None if all are empty."""
        first = head - self.length + 1
        if first > self._split:
            self._start(tiles, first, head)
        while self._front and self._front[-1][0] < first:
            self._front.pop()
        for tile in range(self._next, head):
            self._back = self._with(tiles.get(tile))
        self._next = head
        parts = [self._front[-1][1] if self._front else None, self._with(tiles.get(head))]
        place = self._split - first if self._late else 0
        while place > 0:
            parts.append(self._late.get(place))
            place -= place & -place
        states = [part for part in parts if part is not None]
        return sum(states[1:], states[0]) if states else None

    def _start(self, tiles: Mapping[int, State], first: int, head: int) -> None:
        """Put all tiles but the newest into the front."""
        self._split = self._next = head
        self._front, self._back, self._late, self._latest = [], None, {}, None
        for tile in sorted((tile for tile in tiles if first <= tile < head), reverse=True):
            self._front.append((tile, tiles[tile] + self._front[-1][1] if self._front else tiles[tile]))

    def _with(self, tile: State | None) -> State | None:
        """The back and a tile. The last sum is kept: the newest tile is often complete when its sum is asked for."""
        if tile is None or self._back is None:
            return self._back if tile is None else tile
        if self._latest is None or self._latest[0] is not self._back or self._latest[1] is not tile:
            self._latest = self._back, tile, self._back + tile
        return self._latest[2]
