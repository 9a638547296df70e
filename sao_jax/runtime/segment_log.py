"""What is on disk of the attempts under way: their finished segments, each stored once.

A new attempt goes on from the segments that join on one another, whichever attempts they are of; a trajectory that ends
adds only what came after its last seam. Its location is that of one record, or the list of those of its segments.
"""

import dataclasses
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np

from sao_jax.data.segments import Segment, cut_segment, join_segments, load_segment, locations_of, save_segment
from sao_jax.data.storage import TrajectoryStore
from sao_jax.data.trajectory import COLUMNS, Trajectory, save_trajectory
from sao_jax.runtime.ledger import Ledger


@dataclasses.dataclass
class _Stored:
    """Of one attempt: where its segments lie, how many tokens they hold, and the checksum of each column over them."""

    locations: list[Any] = dataclasses.field(default_factory=list)
    tokens: int = 0
    checksums: dict[str, int] = dataclasses.field(default_factory=lambda: dict.fromkeys(COLUMNS, 0))

    def add(self, part: Segment | Trajectory) -> None:
        self.tokens += part.length
        for name, checksum in self.checksums.items():
            self.checksums[name] = zlib.crc32(np.ascontiguousarray(getattr(part, name)), checksum)

    def begins(self, t: Trajectory) -> bool:
        """Whether the segments are, to the bit, how the trajectory begins."""
        parts = {name: np.ascontiguousarray(getattr(t, name)[: self.tokens]) for name in COLUMNS}
        return t.length >= self.tokens and {n: zlib.crc32(part) for n, part in parts.items()} == self.checksums


class SegmentLog:
    """Stores segments and finished trajectories of a run, and finds what a new attempt can go on from."""

    def __init__(
        self,
        store: TrajectoryStore,
        ledger: Ledger,
        *,
        steps_per_segment: int,
        note: Callable[[str], None] = lambda text: None,
    ):
        self._store, self._ledger, self._steps, self._note = store, ledger, steps_per_segment, note
        self._attempts: dict[int, _Stored] = {}
        self._resumed: dict[int, Any] = {}  # the newest segment that an attempt under way has gone on from

    def begin(self, rollout: int, attempt: int) -> Trajectory | None:
        """An attempt begins: returns what it goes on from, what was stored up to the last good segment, or None if it
        starts over.

        Not the same twice in a row, since an environment that cannot be restored fails each time.
        """
        stored = self._attempts[rollout] = _Stored()
        before = self._resumed.pop(rollout, None)
        locations = self._ledger.segments(rollout) if attempt else []
        snapshot, count = self._joined(rollout, locations)
        if snapshot is None or before == locations[count - 1]:
            return None
        self._resumed[rollout] = locations[count - 1]
        stored.locations = locations[:count]
        stored.add(snapshot)
        return snapshot

    def _joined(self, rollout: int, locations: list[Any]) -> tuple[Trajectory | None, int]:
        """What the segments at these locations join to, as many from the first on as are good; and how many."""
        segments: list[Segment] = []
        snapshot, problem = None, None
        try:
            for location in locations_of(locations):
                segments.append(load_segment(self._store.read(location)))
        except ValueError as error:  # the disk
            problem = error
        while segments and snapshot is None:
            try:
                snapshot = join_segments(segments)
            except ValueError as error:  # who sent it
                problem = error
                segments.pop()
        if problem is not None:
            self._note(f"rollout {rollout} goes on from {len(segments)} of {len(locations)} segments: {problem}")
        return snapshot, len(segments)

    def add(self, segment: Segment) -> bool:
        """Stores the newest segment of an attempt; False, and nothing is stored, if it does not join on the others."""
        stored = self._attempts.setdefault(segment.rollout, _Stored())
        if segment.first_token != stored.tokens:
            return False
        location = vars(self._store.append(save_segment(segment)))
        self._ledger.segment(segment.rollout, location, segment.first_token)
        stored.locations.append(location)
        stored.add(segment)
        return True

    def finish(self, t: Trajectory) -> Any:
        """Stores what is not stored yet of a trajectory that has ended; returns its location."""
        stored = self._attempts.pop(t.rollout, _Stored())
        self._resumed.pop(t.rollout, None)
        if not stored.locations or not stored.begins(t):
            return vars(self._store.append(save_trajectory(t)))
        rest = cut_segment(t, stored.tokens, t.length, steps_per_segment=self._steps)
        return [*stored.locations, vars(self._store.append(save_segment(rest)))]

    def forget(self, rollout: int) -> None:
        """No further attempt is made; what is stored stays where it is."""
        self._attempts.pop(rollout, None)
        self._resumed.pop(rollout, None)
