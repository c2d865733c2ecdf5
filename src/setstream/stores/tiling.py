"""How time is cut into tiles, and tiles are joined into blocks.

    level 0     tile k       the elements with k·tile <= t < (k + 1)·tile
    level l     block k      the tiles k·sizes[l] .. (k + 1)·sizes[l] - 1
    level -1    block 0      the elements without a time

A store keeps a row for each tile and each block that has elements. Any range of N tiles then is the sum of few rows: with
blocks of 32 and 1,024 tiles, at most 62 tiles, 62 blocks and N / 1024 large blocks.
"""

import json
import math
import time as clock
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple, Self, TypeAlias

from setstream.errors import ConfigurationError

#: How long states are kept, in seconds: one number, or one for each size of tiles, as {3600: 7 * 86_400, 86_400: math.inf}.
Retention: TypeAlias = float | Mapping[float, float]
NO_TIME = (-1, 0)
# Tiles of one block, and blocks of one larger block; there are larger blocks until they hold this many tiles.
FAN_OUT, LARGE = 32, 512
# Before the first tile, and after the last.
FIRST, LAST = -(2**53), 2**53


class Kept(NamedTuple):
    """From which tile on there are rows: `dropped` of any level, `rolled` for each level but the last."""

    dropped: int = FIRST
    rolled: tuple[int, ...] = ()

    def first(self, level: int) -> int:
        """The first tile that rows of this level are kept for."""
        return max(self.dropped, self.rolled[level] if level < len(self.rolled) else FIRST)


class Range(NamedTuple):
    """The rows `start` to `stop` - 1 of one level."""

    level: int
    start: int
    stop: int


@dataclass(frozen=True)
class Tiling:
    """The length of a tile in time, and the size of the blocks of each level in tiles."""

    tile: float
    sizes: tuple[int, ...]

    @classmethod
    def plan(cls, tile: float, retention: Retention | None = None) -> Self:
        """The levels for a tile: those that the retention names, others between them if they are far apart, and larger ones."""
        if not 0 < tile < math.inf:
            raise ConfigurationError(f"a tile is a positive number of seconds, such as 3600; got {tile!r}")
        sizes = [1]
        units = sorted(retention) if isinstance(retention, Mapping) else []
        for unit in units:
            size = round(unit / tile)
            if size < 1 or abs(unit / tile - size) > 1e-9 * size or size % sizes[-1]:
                raise ConfigurationError(
                    f"each size of tiles in the retention is a multiple of the next smaller one, from tile={tile:g} on; "
                    f"got {units}"
                )
            while size > sizes[-1]:
                factor = size // sizes[-1]
                sizes.append(sizes[-1] * max((d for d in range(2, FAN_OUT + 1) if factor % d == 0), default=factor))
        while sizes[-1] < LARGE:
            sizes.append(sizes[-1] * FAN_OUT)
        return cls(tile, tuple(sizes))

    @classmethod
    def from_facts(cls, facts: Mapping[str, str]) -> Self:
        """The tiling that a store was made with."""
        return cls(json.loads(facts["tile"]), tuple(json.loads(facts["sizes"])))

    def facts(self) -> dict[str, str]:
        """What a store remembers of it."""
        return {"tile": json.dumps(self.tile), "sizes": json.dumps(self.sizes)}

    def number(self, time: float | None) -> int:
        """The number of the tile of a time; None: of now."""
        number = math.floor((clock.time() if time is None else time) / self.tile)
        if not FIRST < number < LAST:
            raise ConfigurationError(f"times are seconds since 1970, and fewer than 2**53 tiles of {self.tile:g}; got {time}")
        return number

    def rows_of(self, number: int, kept: Kept) -> list[tuple[int, int]]:
        """The (level, block) of the rows that a tile belongs to."""
        return [(level, number // size) for level, size in enumerate(self.sizes) if number >= kept.first(level)]

    def whole(self, since: float | None, until: float | None, kept: Kept) -> tuple[int, int]:
        """The tiles `start` to `stop` - 1 of since <= t < until, widened to tiles of the size that is kept there."""
        start = FIRST if since is None else max(FIRST, math.floor(since / self.tile))
        stop = LAST if until is None else min(LAST, math.ceil(until / self.tile))
        for level, size in enumerate(self.sizes[1:]):
            first = kept.rolled[level] if level < len(kept.rolled) else FIRST
            start = start // size * size if FIRST < start < first else start
            stop = -(-stop // size) * size if stop <= first else stop
        return start, stop

    def ranges(self, start: int, stop: int) -> list[Range]:
        """The rows whose sum is that of the tiles start to stop - 1, as few as there are."""
        ranges = []
        for level, size in enumerate(self.sizes):
            larger = self.sizes[level + 1] if level + 1 < len(self.sizes) else 0
            low, high = (-(-start // larger) * larger, stop // larger * larger) if larger else (stop, stop)
            if low >= high:
                low = high = stop
            ranges += [Range(level, start // size, low // size), Range(level, high // size, stop // size)]
            start, stop = low, high
        return [some for some in ranges if some.start < some.stop]

    def keep(self, retention: Retention, now: float, before: Kept) -> Kept:
        """What is kept from `now` on: no rows that were dropped or rolled up before come back."""
        units = retention if isinstance(retention, Mapping) else {self.tile: retention}
        levels = [self.sizes.index(size) if (size := round(unit / self.tile)) in self.sizes else -1 for unit in sorted(units)]
        if -1 in levels or levels[0] != 0:
            raise ConfigurationError(
                f"the retention names tiles of {sorted(units)} s; this store has {[self.tile * size for size in self.sizes]}, "
                "and the smallest must be among them"
            )
        rolled = [FIRST] * (len(self.sizes) - 1)
        first = FIRST
        for place, unit in enumerate(sorted(units)):
            age = units[unit]
            if not age > 0:
                raise ConfigurationError(f"states are kept for a positive number of seconds; got {age!r} for tiles of {unit:g}")
            next_level = levels[place + 1] if place + 1 < len(levels) else levels[place]
            size = self.sizes[next_level]
            first = FIRST if age == math.inf else math.floor((now - age) / self.tile) // size * size
            for level in range(levels[place], next_level):
                rolled[level] = first
        older = [*before.rolled, *[FIRST] * len(rolled)]
        return Kept(max(before.dropped, first), tuple(map(max, rolled, older)))


def check_tiles(tile: float, retention: Retention | None) -> None:
    """Raise ConfigurationError unless a new store can have these tiles and keep them for so long."""
    tiling = Tiling.plan(tile, retention)
    if retention is not None:
        tiling.keep(retention, 0.0, Kept())
