"""Where pieces of unequal length share rows: first fit, in the order in which they come.

Rows are filled a window at a time, a window being `rows` rows on each of `devices`. A piece goes to the first row of
the newest window that has room for it, else to a new window. The places are a function of the lengths in their order
and of nothing else, so that a recorded order gives the same places again, whatever happened in between.
"""

import dataclasses
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from typing import NamedTuple

SHORTEST = 8  # tokens; a row of L tokens is given room for L / SHORTEST pieces
MOST_PIECES = 32  # per row: what is computed per piece grows with this number


def pieces_of(length: int) -> int:
    """Pieces that a row of `length` tokens may hold."""
    return max(2, min(length // SHORTEST, MOST_PIECES))


def first_fit(rows: Sequence[Sequence[int]], length: int, *, capacity: int, pieces: int) -> int | None:
    """The first of `rows`, each the lengths of its pieces, that has room for one more of `length`; None if none has."""
    for index, row in enumerate(rows):
        if len(row) < pieces and sum(row) + length <= capacity:
            return index
    return None


class Place(NamedTuple):
    """Row `row` of a window on a device; `slot` counts the pieces of that device in the order of their coming."""

    window: int
    device: int
    row: int
    slot: int


@dataclasses.dataclass
class Packing:
    """The places of the pieces so far; each device has `slots` of them.

    The n-th row of a window lies on device n mod devices. With pieces at most devices * slots in number there are never
    more than ceil(slots / rows) windows: a device that still has slots got a piece in each of its rows before a window
    was closed.
    """

    devices: int
    rows: int
    slots: int
    capacity: int
    pieces: int

    def __post_init__(self):
        self.clear()

    def clear(self) -> None:
        self.places: list[Place] = []
        self._taken = [0] * self.devices
        self._newest = -1
        self._open: list[list[int]] = []

    def copy(self) -> "Packing":
        other = dataclasses.replace(self)
        other.places, other._taken, other._newest = list(self.places), list(self._taken), self._newest
        other._open = [list(row) for row in self._open]
        return other

    def pieces_in(self, window: int) -> range:
        """Numbers of the pieces in a window: they came one after the other."""
        first, last = (
            side(self.places, window, key=lambda place: place.window) for side in (bisect_left, bisect_right)
        )
        return range(first, last)

    def add(self, length: int) -> Place:
        """Raises ValueError for a piece that fits no row, or one more than there are slots."""
        if not 1 <= length <= self.capacity:
            raise ValueError(f"a piece of {length} tokens does not fit a row of {self.capacity}")
        if sum(self._taken) == self.devices * self.slots:
            raise ValueError(f"all {self.devices * self.slots} slots are taken")
        index = self._room(length)
        if index is None:
            self._newest += 1
            self._open = [[] for _ in range(self.devices * self.rows)]
            index = self._room(length)
        device, row = index % self.devices, index // self.devices
        self._open[index].append(length)
        place = Place(self._newest, device, row, self._taken[device])
        self._taken[device] += 1
        self.places.append(place)
        return place

    def _room(self, length: int) -> int | None:
        left = [i for i in range(len(self._open)) if self._taken[i % self.devices] < self.slots]
        found = first_fit([self._open[i] for i in left], length, capacity=self.capacity, pieces=self.pieces)
        return None if found is None else left[found]

    def closes_window(self, lengths: Iterable[int]) -> bool:
        """Whether pieces of these lengths, if they came next, would end a window that holds some already."""
        after, newest = self.copy(), self._newest
        return newest >= 0 and any(after.add(length).window > newest for length in lengths)
